//! Moves of bytes without computation.
//!
//! ```text
//! page_moves -- copy -- host_pages     pages between pools, and to and from pinned host memory
//! compact                              slots of rows, in all planes
//! ```

pub(super) mod compact;
pub(super) mod copy;
pub(super) mod host_pages;
mod page_moves;
