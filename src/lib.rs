//! The KV-cache core of an LLM serving engine, as one linkable crate.
//!
//! A host (an LLM server in Rust) brings the scheduling policy, and as much of the rest as it has. There are three ways
//! to link:
//!
//! | you have | link | you get | read |
//! |---|---|---|---|
//! | allocator, page tables, tensors, kernels | [`tree::Tree`] | cached prefixes, locks, exact LRU eviction, hashes, events | [`guide::tree`] |
//! | scheduler, tensors, kernels | [`Engine<Outbox>`](Outbox) | also pages, page tables, plans, forks, drafts, swap memory | [`guide::own_tensors`] |
//! | scheduler, model | [`Engine<Cuda>`, `Engine<Cpu>`](backend) | also memory, stores of K and V, attention | [`guide::the_loop`] |
//!
//! The first two need no default features: `default-features = false` leaves 20 small dependencies. The crate has no
//! tensor framework, no async runtime and no server. This is the third way, whole:
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The shape of K and V, and the sizes of the pool.
//! let shape = KvShape::heads(1, 8);
//! let config = PoolConfig { layers: 2, shape, page_size: 4, ..Default::default() };
//! let mut engine = Engine::new(config, CpuOptions::default())?;
//! let mut scratch = StepScratch::new(); // stores the plan; reused by each step
//! let attend = Attend::new(2, 8); // two query heads share the kv head
//!
//! // Two requests with the same prompt, one after the other.
//! let prompt: Vec<TokenId> = (100..110).map(TokenId::new).collect();
//! for expected_hit in [0, 8] {
//!     let promise = prompt.len() as u32; // tokens that pages are reserved for
//!     let seq = engine.admit(Namespace::default(), &prompt, promise)?;
//!     assert_eq!(engine.cached_len(seq)?, expected_hit); // whole pages, and never the last token
//!     for _ in 0..3 {
//!         // Prefill first, then one token at a time.
//!         let len = engine.token_count(seq)? - engine.cached_len(seq)?;
//!         let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }])?;
//!         let rows = plan.token_count();
//!         // The model runs on plan.tokens and plan.positions. K, V and Q are made up here.
//!         let (k, v, q) = (vec![0.5; rows * 8], vec![0.25; rows * 8], vec![1.0; rows * 16]);
//!         let mut out = vec![0.0; rows * 16];
//!         for layer in (0..2).map(LayerId::new) {
//!             let backend = engine.backend_mut();
//!             backend.store_cache(&plan, layer, k.as_slice().into(), v.as_slice().into())?;
//!             backend.attend(&plan, layer, &attend, q.as_slice().into(), out.as_mut_slice().into(), None)?;
//!         }
//!         assert!(out.iter().all(|x| (x - 0.25).abs() < 1e-6)); // a mean of equal values
//!         let step = plan.step();
//!         engine.append(seq, &[TokenId::new(7)])?; // what the model sampled
//!         engine.commit(step)?; // cached_len advances, whole pages may be shared from now on
//!         engine.complete(step)?; // the backend is done: pages and locks that waited for the step return
//!     }
//!     engine.finish(seq)?; // the prefix stays for the next request
//! }
//! assert_eq!(engine.stats().hit_tokens, 8);
//! engine.verify()?;
//! # Ok(())
//! # }
//! ```
//!
//! Two things to know first. Pass `admit` a [promise](Admit::promise) of at least the prompt, as above: without one, a
//! loop that admits prompts while they fit admits too many. And an error leaves the state unchanged;
//! [`is_shortage()`](EngineError::is_shortage) returns whether a later call may succeed.
//!
//! In the repository, `examples/adopt` has block managers and prefix caches in the forms of vLLM and SGLang:
//! `cargo run --release --example adopt`.
//!
//! [`guide`] continues in chapters. [`engine`] has all calls, [`config`] and [`layout`] the sizes, [`plan`] the arrays
//! of a step, and [`backend`] the devices. ARCHITECTURE.md follows one step from start to end.

// On docs.rs, marks the feature that an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
// Checks and tables of backends with bytes have no other users.
#![cfg_attr(not(feature = "cpu"), allow(dead_code, unused_macros))]

pub mod backend;
mod bitmap;
pub mod config;
pub mod engine;
pub mod error;
pub mod event;
mod fence;
#[cfg(any(doc, doctest))]
pub mod guide;
pub mod hash;
pub mod id;
pub mod layout;
mod memory;
pub mod moves;
mod page;
pub mod plan;
mod prefix;
mod sequence;
pub mod stats;
mod step;
mod swap;
mod system;
#[cfg(any(test, feature = "testkit"))]
pub mod testkit;
pub mod tree;
mod world;

#[doc(inline)]
pub use backend::{Attend, Backend, Null, Outbox, OutboxOptions, Work};
#[cfg(feature = "cpu")]
#[doc(inline)]
pub use backend::{Cpu, CpuOptions};
#[doc(inline)]
pub use config::EngineConfig;
#[doc(inline)]
pub use engine::Engine;
#[doc(inline)]
pub use error::{ConfigError, EngineError, Error};
#[doc(inline)]
pub use id::{LayerId, Namespace, PageId, SeqKey, SlotId, StepId, TokenId};
#[doc(inline)]
pub use layout::{Capacity, KvDtype, KvShape, PoolConfig};
#[doc(inline)]
pub use plan::{Admit, BatchPlan, Extend, Keep, Prompt, StepScratch};
