//! The KV-cache core of an LLM serving engine, as one linkable crate.
//!
//! A host (an LLM server in Rust) brings the model and the scheduling policy. `kvarena` finds the prompt tokens that
//! already have K and V, and chooses the slots for new K and V of each step. It computes attention over the cached
//! pages. It contains the prefix tree, the page pool, the sequence table, the plan of each step, and the kernels behind
//! [`Backend`]. It has no tensor framework, no async runtime and no server.
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
//!     let seq = engine.admit(Namespace::default(), &prompt, 0)?;
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
//! [`guide`] continues in chapters. [`engine`] has all calls, [`config`] and [`layout`] the sizes, [`plan`] the arrays
//! of a step, and [`backend`] the devices. ARCHITECTURE.md follows one step from start to end.

// On docs.rs, marks the feature that an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod backend;
mod bitmap;
pub mod config;
pub mod engine;
pub mod error;
pub mod event;
#[doc(hidden)]
pub mod fence;
#[cfg(any(doc, doctest))]
pub mod guide;
pub mod hash;
pub mod id;
pub mod layout;
mod memory;
mod moves;
#[doc(hidden)]
pub mod page;
pub mod plan;
#[doc(hidden)]
pub mod prefix;
#[doc(hidden)]
pub mod sequence;
pub mod stats;
#[doc(hidden)]
pub mod step;
mod swap;
#[doc(hidden)]
pub mod system;
#[cfg(any(test, feature = "testkit"))]
pub mod testkit;
#[doc(hidden)]
pub mod world;

#[doc(inline)]
pub use backend::{
    Attend, Backend, Cpu, CpuOptions, CpuRows, CpuRowsMut, Moved, NO_POSITION, Null, OpenBackend, Outbox, OutboxError,
    OutboxOptions, PlanError, Queries, Rope, Select, Selection, SlotMove, SparseBackend, SwapMemory, Work,
};
#[doc(inline)]
pub use config::{EngineConfig, EngineShape, PrefixMode, StepBounds};
#[doc(inline)]
pub use engine::Engine;
#[doc(inline)]
pub use error::{ConfigError, EngineError, Error};
#[doc(inline)]
pub use event::{Event, Medium, Stored};
#[cfg(feature = "sha256")]
#[doc(inline)]
pub use hash::HashSeed;
#[doc(inline)]
pub use hash::{Hashing, NamespaceNames, PageHash, PageHashes};
#[doc(inline)]
pub use id::{
    LayerId, MoveId, Namespace, NodeKey, PageId, PrefixLock, RowId, Scope, SeqKey, SlotId, StepId, SwapPageId, TokenId,
};
#[cfg(feature = "serde")]
#[doc(inline)]
pub use layout::HfError;
#[doc(inline)]
pub use layout::{
    Capacity, Dtype, GroupShape, Groups, KvDtype, KvScales, KvShape, LabelChannels, LabelError, LayerPlace, Layout,
    Plane, PlaneName, PlaneOrder, PoolConfig, PoolLayout, Reach, ScaleError, Scaling, Strides, TableShape,
};
#[doc(inline)]
pub use moves::{Fetch, FetchId, Put, PutId};
#[doc(inline)]
pub use plan::{
    Admission, Admit, Admitted, BatchPlan, BatchRow, Branch, Compaction, DRAFT_MAX, Draft, DraftTree, Extend, Forked,
    Keep, Leader, OwnedPlan, PackedLevels, PackedPlan, PageCopy, PageMove, PlanSize, Prompt, SharedSpan, SharedSpans,
    SlotMapping, StepEnd, StepScratch, TableWrite,
};
#[doc(inline)]
pub use prefix::PrefixMatch;
#[doc(inline)]
pub use stats::Stats;
#[doc(inline)]
pub use world::{Broken, EngineBytes, Owner};
