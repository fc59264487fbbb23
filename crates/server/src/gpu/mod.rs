//! The host on a GPU, from the command line.
//!
//! ```text
//! setup, report   from the command line to a server; the work of the device
//! check, bench    the check of the tokens; measurements of speed
//! ```

#![allow(unsafe_code)] // The bench of sums launches on raw addresses.

pub mod bench;
pub mod check;
pub mod report;
pub mod setup;
