//! For tests of stores and of hosts: a store in memory, a store that fails, and the contract of stores.

mod contract;
mod faulty;
pub(crate) mod memory;

pub use contract::contract;
pub use faulty::{Faulty, Gate};
pub use memory::Memory;
