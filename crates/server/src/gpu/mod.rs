//! The host on a GPU, from the command line.
//!
//! ```text
//! setup, report   from the command line to a server; what the device did meanwhile
//! check, bench    whether the model generates the right tokens, and how fast
//! ```

#![allow(unsafe_code)] // The bench of sums launches on raw addresses.

pub mod bench;
pub mod check;
pub mod report;
pub mod setup;
