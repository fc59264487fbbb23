//! The host on a GPU, from the command line.
//!
//! ```text
//! setup    converts the command line to a server
//! report   times of the device and the host
//! check    compares the tokens with the CPU's
//! bench    measures the speed
//! ```

#![allow(unsafe_code)] // The bench of sums launches on raw addresses.

pub mod bench;
pub mod check;
pub mod report;
pub mod setup;
