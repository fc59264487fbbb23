//! Memory that is taken at the start and stays: touched before the first step, and in huge pages where the system has
//! them.
//!
//! A tree of a million nodes is a gigabyte of random accesses. In pages of 4 KiB each of them misses the TLB as well as
//! the cache: at page_size 16, evicting one of 1,000,000 leaves took 2,550 ns, and 500 ns once this was asked for, both
//! by `cargo bench --bench targets`. That is why the crate's one `unsafe` line outside the backend seam stands here.
//!
//! Not here: what lies in the memory.

use std::hint::black_box;

/// Bytes of the smallest page that an operating system hands out.
const SYSTEM_PAGE: usize = 4096;

/// Writes to every system page of a vector of zeros, so that it has memory behind it.
pub(crate) fn touch<T: Default>(items: &mut [T]) {
    ask_for_huge_pages(items.as_ptr().addr(), size_of_val(items));
    let step = (SYSTEM_PAGE / size_of::<T>()).max(1);
    for item in items.iter_mut().step_by(step) {
        *black_box(item) = T::default();
    }
}

/// Touches all that a vector has reserved, and empties it again.
pub(crate) fn touch_reserved<T: Copy>(items: &mut Vec<T>, filler: T) {
    ask_for_huge_pages(items.as_ptr().addr(), items.capacity() * size_of::<T>());
    items.resize(items.capacity(), filler);
    items.clear();
}

/// Asks the system to back a range of addresses with huge pages once it is touched. A hint: it changes no contents, and
/// nothing happens where the system has none.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
pub(crate) fn ask_for_huge_pages(address: usize, bytes: usize) {
    let start = address.next_multiple_of(SYSTEM_PAGE);
    let Some(bytes) = (address + bytes).checked_sub(start) else { return };
    let (start, bytes) =
        (std::ptr::without_provenance_mut(start), bytes / SYSTEM_PAGE * SYSTEM_PAGE);
    // SAFETY: MADV_HUGEPAGE neither reads nor changes memory, whatever lies in the range; a range that is not mapped is
    // an error that is returned, and it does not matter here.
    let _ = unsafe { libc::madvise(start, bytes, libc::MADV_HUGEPAGE) };
}

/// No hint to give.
#[cfg(not(target_os = "linux"))]
pub(crate) fn ask_for_huge_pages(_: usize, _: usize) {}
