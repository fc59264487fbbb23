//! The staged plan: a step's arrays at fixed device addresses, and the page tables.
//!
//! ```text
//! stage -- image     the staged plan and its device addresses
//!       -- ring      pinned slots that bring it there
//!       -- tables    page tables
//! ```
//!
//! Not here: the split of attention (`attention/split`).

pub(super) mod image;
pub(super) mod ring;
pub(super) mod stage;
pub(super) mod tables;
