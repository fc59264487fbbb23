//! candle models over the paged K and V of [`kvarena`].
//!
//! A [`KvArena`] holds the K and V of all sequences. A [`Step`] is one forward pass over new tokens
//! of any number of sequences. The sequences may have unequal lengths; their rows are packed
//! without padding. In each layer the model calls [`Step::attend`], which stores the layer's K and
//! V and returns each new token's attention over the tokens up to itself. No cached K or V is copied.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use kvarena::{Attend, Capacity, Extend, KvDtype, KvShape, Namespace, PoolConfig, TokenId};
//! use kvarena_candle::KvArena;
//!
//! let device = Device::Cpu;
//! let shape = KvShape::heads(2, 64);
//! let capacity = Capacity::Pages(16);
//! let config = PoolConfig { layers: 1, shape, dtype: KvDtype::F32, capacity, ..PoolConfig::default() };
//! let mut arena = KvArena::new(config, &device)?;
//! let prompt: Vec<TokenId> = (0..20).map(TokenId::new).collect();
//! let seq = arena.engine.admit(Namespace::default(), &prompt, 0)?;
//!
//! let step = arena.step(&[Extend { seq, len: 20 }])?;
//! // The model computes these from `step.inputs.tokens` and rotates them by `step.inputs.positions`.
//! let q = Tensor::ones((20, 8, 64), DType::F32, &device)?;
//! let k = Tensor::ones((20, 2, 64), DType::F32, &device)?;
//! let out = step.attend(0, &Attend::new(8, 64), &q, &k, &k)?;
//! assert_eq!(out.dims(), [20, 8, 64]);
//! let logits_of = out.index_select(&step.inputs.last_rows, 0)?; // one row for each sequence
//! assert_eq!(logits_of.dims(), [1, 8, 64]);
//!
//! let id = step.launched(); // a step that is dropped instead is undone
//! arena.engine.append(seq, &[TokenId::new(20)])?;
//! arena.close(id)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! This crate has no models, sampling, tokenizers or scheduling. The crate in `models/` patches candle's own models.

mod arena;
mod attend;
mod error;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod graphs;
mod operation;
mod step;

pub use arena::{KvArena, Pool};
pub use error::Error;
#[cfg(feature = "cuda")]
pub use graphs::{Forward, Graphs};
pub use step::{Inputs, Step};
