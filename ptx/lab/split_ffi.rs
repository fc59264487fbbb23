//! The crate's own planner behind a C function, so that the lab runs what the crate runs.
//! Build: rustc -O --edition 2024 --crate-type cdylib -o libsplit.so ptx/lab/split_ffi.rs

pub mod id {
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[repr(transparent)]
    pub struct RowId(u32);
    impl RowId {
        pub const fn new(raw: u32) -> Self {
            Self(raw)
        }
        pub const fn raw(self) -> u32 {
            self.0
        }
    }
}
pub mod layout {
    pub const PAGE_SIZE_MAX: u32 = 1024;
}
pub mod plan {
    macro_rules! words {
        ($name:ident, $first:ident, $second:ident) => {
            #[derive(Clone, Copy, Debug)]
            #[repr(C)]
            pub struct $name {
                pub $first: u32,
                pub $second: u32,
            }
        };
    }
    words!(TableWrite, index, value);
    words!(PageCopy, source, target);
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[repr(C)]
    pub struct BatchRow {
        pub row: crate::id::RowId,
        pub qo_start: u32,
        pub extend_len: u32,
        pub kv_len: u32,
    }
}
#[path = "../../src/backend/cuda/params.rs"]
pub mod params;
#[path = "../../src/backend/cuda/split/mod.rs"]
pub mod split;

use split::{Split, SplitShape};

/// `shape`: the eight words of a SplitShape in order. `sizes` gets: decode words, extend words, decode partial, extend
/// partial, decode counter and extend counter bytes, decode lanes. With null `rows` only the sizes. Returns nanoseconds of a warm plan.
///
/// # Safety
/// All pointers hold as many words as said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn split_plan(
    shape: *const u32,
    rows: *const plan::BatchRow,
    count: usize,
    decode: *mut u32,
    extend: *mut u32,
    sizes: *mut u64,
) -> u64 {
    let s = unsafe { core::slice::from_raw_parts(shape, 8) };
    let shape = SplitShape {
        kv_heads: s[0],
        group: s[1],
        head_dim: s[2],
        window: s[3],
        decode_ctas: s[4],
        extend_ctas: s[5],
        batch_max: s[6],
        tokens_max: s[7],
    };
    let all = [
        shape.decode_words(),
        shape.extend_words(),
        shape.decode_partial_bytes(),
        shape.extend_partial_bytes(),
        shape.decode_counter_bytes(),
        shape.extend_counter_bytes(),
        shape.decode_lanes() as usize,
    ];
    for (i, size) in all.into_iter().enumerate() {
        unsafe { *sizes.add(i) = size as u64 };
    }
    if rows.is_null() {
        return 0;
    }
    let rows = unsafe { core::slice::from_raw_parts(rows, count) };
    let mut split = Split::new(shape);
    let decode = unsafe { core::slice::from_raw_parts_mut(decode, shape.decode_words()) };
    split.plan(rows, decode);
    let start = std::time::Instant::now();
    split.plan(rows, decode);
    let time = start.elapsed().as_nanos() as u64;
    unsafe {
        extend.copy_from_nonoverlapping(split.extend_words().as_ptr(), split.extend_words().len());
    }
    time
}
