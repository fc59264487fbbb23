//! Chapters on the use of the crate. Each contains programs that run as doctests.
//!
//! 1. [`the_loop`]: admit, plan, store and attend, append, commit, complete.
//! 2. [`own_tensors`]: the engine over a host's own tensors and kernels, and the calls of vLLM, SGLang and nano-vllm
//!    here.
//! 3. [`tree`]: the prefix tree without an engine, over a host's own allocator.
//! 4. [`overlap`]: plan a step before the tokens of the last one arrive.
//! 5. [`samples`]: several outputs from one prompt, and a rejected fork.
//! 6. [`speculation`]: draft tokens in chains and trees, and the accepted branch.
//! 7. [`ranks`]: tensor parallelism with workers in threads or processes, and the byte forms that workers read.
//! 8. [`scheduling`]: admission, preemption, promises and leaders.
//! 9. [`tenants`]: prompts that must not share K and V, and a change of weights.
//! 10. [`gpu`]: a whole step on a GPU, together with cudarc or libtorch.
//! 11. [`fp8`]: K and V in half the bytes, and the source of their scales.
//! 12. [`sparse`]: attention to a few tokens of a long context.
//! 13. [`groups`]: models with layers that read only a window or a chunk.
//! 14. [`states`]: models with layers that keep a state instead of K and V.
//! 15. [`models`]: the changes to a model's code.
//! 16. [`events`]: routers and stores that track the cache.
//! 17. [`errors`]: the host's action after each error.
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
pub mod own_tensors;
pub mod ranks;
pub mod samples;
pub mod scheduling;
pub mod sparse;
pub mod speculation;
pub mod states;
pub mod tenants;
pub mod the_loop;
pub mod tree;
