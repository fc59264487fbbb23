//! The oracle, shared by tests, fuzz targets and benches.

pub mod contract;
pub mod planner;
pub mod rng;
