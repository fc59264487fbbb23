//! The host on a GPU, from the command line.
//!
//! ```text
//! setup    converts the command line to a server
//! report   times of the device and the host
//! bench    measures the speed
//! ```

pub mod bench;
pub mod report;
pub mod setup;
