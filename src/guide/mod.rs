//! Chapters on the use of the crate. Each contains programs that run as doctests.
//!
//! 1. [`the_loop`]: admit, plan, store and attend, append, commit, complete.
//! 2. [`overlap`]: plan a step before the tokens of the last one arrive.
//! 3. [`samples`]: several outputs from one prompt, and a rejected fork.
//! 4. [`speculation`]: draft tokens in chains and trees, and the accepted branch.
//! 5. [`ranks`]: tensor parallelism with workers in threads or processes, and the byte forms that workers read.
//! 6. [`scheduling`]: admission, preemption, promises and leaders.
//! 7. [`tenants`]: prompts that must not share K and V, and a change of weights.
//! 8. [`gpu`]: a whole step on a GPU, together with cudarc or libtorch.
//! 9. [`fp8`]: K and V in half the bytes, and the source of their scales.
//! 10. [`sparse`]: attention to a few tokens of a long context.
//! 11. [`groups`]: models with layers that read only a window or a chunk.
//! 12. [`models`]: the changes to a model's code.
//! 13. [`events`]: routers and stores that track the cache.
//! 14. [`errors`]: the host's action after each error.
//! 15. [`tree`]: the prefix tree without an engine, over a host's own allocator.
//!
//! The programs have no model: they make up K, V, queries and tokens. A program that needs no bytes uses the backend
//! [`Null`](crate::Null), which has none.
//!
//! The chapters add no code to the crate: only documentation builds and doctests compile them. The documentation of
//! [`Engine`](crate::Engine) describes the results of each call.

pub mod errors;
pub mod events;
pub mod fp8;
pub mod gpu;
pub mod groups;
pub mod models;
pub mod overlap;
pub mod ranks;
pub mod samples;
pub mod scheduling;
pub mod sparse;
pub mod speculation;
pub mod tenants;
pub mod the_loop;
pub mod tree;
