//! Sparse reads: attention to the tokens with the largest logits of a long context.
//!
//! A pool may store *labels*: a copy of a few channels of K for each token and head. The backend uses labels to find
//! the tokens with the largest logits (Double Sparsity). The host measures the channels of each layer and head offline.
//! It passes these [`LabelChannels`](crate::layout::LabelChannels) when it opens the backend. `store_cache` writes
//! labels with K and V. With `--sparse`, `crates/server` measures the channels. With `--recall`, it also reports the
//! share of the attention weights that falls on the selected positions.
//!
//! A sparse read takes two calls for each layer. [`select`](crate::backend::SparseBackend::select) returns positions,
//! and [`attend_selected`](crate::backend::SparseBackend::attend_selected) reads them. Positions are plain numbers,
//! `[rows, kv_heads, top]`, so a host may also choose them itself. Rows with several new tokens read all visible
//! positions, so a step may mix decodes with prefills.
//!
//! ```
//! use kvarena::*;
//! use kvarena::backend::{Queries, Select, Selection, SparseBackend};
//! use kvarena::layout::LabelChannels;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let shape = KvShape::heads(1, 4);
//! let pool = PoolConfig { shape, label_channels: 2, ..Default::default() };
//! let channels = LabelChannels::new(1, 1, 2, vec![0, 3])?; // of the whole model; a rank takes `local(&pool)`
//! let options = CpuOptions { labels: Some(channels), ..CpuOptions::default() };
//! let mut engine = Engine::new(pool, options)?;
//! let layer = LayerId::new(0);
//!
//! // Four tokens with K and V; the query will select the third. Then one more token.
//! let prompt = [1, 2, 3, 4, 5].map(TokenId::new);
//! let seq = engine.admit(Namespace::default(), &prompt, 0)?;
//! let mut scratch = StepScratch::new();
//! let k: Vec<f32> = (0..16).map(|i| if i == 11 { 9.0 } else { 0.1 }).collect();
//! let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 4 }])?;
//! engine.backend_mut().store_cache(&plan, layer, k[..].into(), k[..].into())?;
//!
//! let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 1 }])?;
//! let q = [0.0_f32, 0.0, 0.0, 1.0];
//! engine.backend_mut().store_cache(&plan, layer, k[..4].into(), k[..4].into())?;
//! let (mut positions, mut out) = ([0; 2], [0.0_f32; 4]);
//! let select = Select { q_heads: 1, top: 2, window: None };
//! engine.backend_mut().select(&plan, layer, &select, q[..].into(), &mut positions)?;
//! assert_eq!(positions, [2, 4]); // the best position and the row's own
//!
//! let selection = Selection { positions: &positions[..], top: 2 };
//! let queries = Queries { rows: q[..].into(), sinks: None };
//! let attend = Attend::new(1, 4);
//! let backend = engine.backend_mut();
//! backend.attend_selected(&plan, layer, &attend, selection, queries, out[..].as_mut().into(), None)?;
//! assert!(out[3] > 8.0);
//! # Ok(())
//! # }
//! ```
//!
//! On a GPU, the host allocates the position lists in device memory. `CudaOptions::labels` takes the channels.
//! `Prepare::lists` lets `Cuda::prepare` allocate memory before a capture. Kernels exist for pools of bf16 and f16,
//! with up to 16 query heads for each kv head.
//!
//! The score buffer has space for `CudaOptions::select_tokens` tokens of all rows together. By default this is the
//! pool's number of slots. Tokens of a shared prefix count once for each row.
//!
//! Labels take `kv_heads * label_channels` numbers for each token and layer. Like static scales, the label channels are
//! part of [`page_fingerprint`](crate::layout::PoolLayout::page_fingerprint).
