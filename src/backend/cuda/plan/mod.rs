//! The staged plan: a step's arrays at fixed device addresses, and the page tables.
//!
//! ```text
//! stage -- image       the staged plan and its device addresses
//!       -- chunk_rows  the rows of a step for layers with chunks
//!       -- states      the pages of the states of a step's rows
//!       -- ring        pinned slots for the upload
//!       -- tables      page tables
//! ```

pub(super) mod chunk_rows;
pub(super) mod image;
pub(super) mod ring;
pub(super) mod stage;
mod states;
pub(super) mod tables;
