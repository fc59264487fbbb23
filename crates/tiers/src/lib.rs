//! Stores of K and V for `kvarena` engines.
//!
//! A store keeps records: pages of one group of layers, with the tokens that they belong to and checks of all bytes.

pub mod check;
pub mod child;
pub mod disk;
pub mod identity;
pub mod miss;
pub mod name;
#[cfg(feature = "object-store")]
pub mod objects;
pub mod record;
#[cfg(feature = "redis")]
pub mod redis;
pub mod store;
pub mod testing;
pub mod tier;
mod vectored;
pub mod weights;
