//! How to use the crate, in chapters. Each is a program that runs as a test of this documentation.
//!
//! 1. [`the_loop`]: admit, plan, store and attend, append, commit, complete.
//! 2. [`overlap`]: plan a step before the last one's tokens are known.
//! 3. [`samples`]: many answers to one prompt, and a fork that is refused.
//! 4. [`speculation`]: drafts, in chains and trees, and keeping the branch that is right.
//! 5. [`ranks`]: workers of tensor parallelism, in threads or processes; the byte forms that they read.
//! 6. [`scheduling`]: who is admitted, who is preempted, what a promise is, who waits for a leader.
//! 7. [`tenants`]: prompts that must not share, and a model whose weights change.
//! 8. [`gpu`]: the whole step on a GPU, beside cudarc or libtorch.
//! 9. [`fp8`]: K and V in half the bytes, and where their scales come from.
//! 10. [`sparse`]: a few tokens of a long context instead of all.
//! 11. [`events`]: routers and stores that follow the cache.
//! 12. [`errors`]: what to do after each error.
//!
//! The programs have no model: K, V and queries are made up, and so are the tokens. Where bytes do not matter the
//! backend is [`Null`](crate::Null), which has none.
//!
//! The module has no items and is compiled for documentation only. Not here: what each call answers, which its own
//! documentation says.

pub mod errors;
pub mod events;
pub mod fp8;
pub mod gpu;
pub mod overlap;
pub mod ranks;
pub mod samples;
pub mod scheduling;
pub mod sparse;
pub mod speculation;
pub mod tenants;
pub mod the_loop;
