//! Memory that is taken at the start and stays.
//!
//! Not here: what lies in it.

use std::hint::black_box;

/// Bytes of the smallest page that an operating system hands out.
const SYSTEM_PAGE: usize = 4096;

/// Writes to every system page of a vector of zeros, so that it has memory behind it.
pub(crate) fn touch<T: Default>(items: &mut [T]) {
    let step = (SYSTEM_PAGE / size_of::<T>()).max(1);
    for item in items.iter_mut().step_by(step) {
        *black_box(item) = T::default();
    }
}
