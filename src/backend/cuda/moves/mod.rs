//! Moves of bytes without computation.
//!
//! ```text
//! page_moves                                   the calls of a backend
//!   swap_moves -- direction, transfer, region  pages to and from pinned memory
//!   copy                                       pages on the device
//! compact                                      slots of rows, in all planes
//! ```

pub(super) mod compact;
pub(super) mod copy;
pub(super) mod direction;
pub(super) mod page_moves;
pub(super) mod region;
pub(super) mod swap_moves;
mod transfer;
