//! For tests of stores and of hosts: a store in memory, stores that fail, and the contract of stores.

mod contract;
mod doubles;
pub(crate) mod memory;

pub use contract::contract;
pub use doubles::{Full, Gone, Held, Liar, Slow, Torn};
pub use memory::Memory;
