//! Stores of K and V for `kvarena` engines.
//!
//! A store keeps records: pages of one group of layers, with the tokens that they belong to and checks of all bytes.
//!
//! ```text
//! engine --puts, lookup, fetch--> [tier] --have, get, put--> [store]: disk, Redis, objects, a child process
//!                                   |
//!                                [record]: head (fields, checks, tokens) and pages
//! ```
//!
//! A reader accepts a record only if its name, fields, lengths, checks and tokens are those of the prompt. Everything
//! else is a [`Miss`](miss::Miss) with a reason, and the host computes the tokens. Stores that others can write need a
//! [`Secret`](check::Secret).

pub mod check;
pub mod child;
pub mod disk;
pub mod identity;
mod lock;
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
