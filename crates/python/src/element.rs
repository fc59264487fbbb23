//! The types of an array's elements.

use std::ffi::CStr;

/// The type of an array's elements.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Dtype {
    /// Its name in numpy and torch.
    pub name: &'static str,
    /// Its format in the buffer protocol. Types that the protocol lacks are unsigned integers there.
    pub format: &'static CStr,
    pub bytes: usize,
    /// Its code in DLPack.
    pub code: u8,
}

impl Dtype {
    pub const F32: Self = Self { name: "float32", format: c"f", bytes: 4, code: 2 };
    pub const F16: Self = Self { name: "float16", format: c"e", bytes: 2, code: 2 };
    pub const BF16: Self = Self { name: "bfloat16", format: c"H", bytes: 2, code: 4 };
    pub const FP8: Self = Self { name: "float8_e4m3fn", format: c"B", bytes: 1, code: 10 };
}

/// A type of integers in results.
pub trait Integer: Send + Sync + 'static {
    const DTYPE: Dtype;
}

impl Integer for i32 {
    const DTYPE: Dtype = Dtype { name: "int32", format: c"i", bytes: 4, code: 0 };
}

impl Integer for i64 {
    const DTYPE: Dtype = Dtype { name: "int64", format: c"q", bytes: 8, code: 0 };
}

impl Integer for u32 {
    const DTYPE: Dtype = Dtype { name: "uint32", format: c"I", bytes: 4, code: 1 };
}

/// Axes of an array: at most pages, slots, heads and elements.
pub const AXES: usize = 4;
