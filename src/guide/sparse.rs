//! Sparse reads: attend to the tokens that matter, and leave the rest of a long context where it is.
//!
//! A pool may keep *labels*: for each token and head a few channels of K once more, by which queries find the tokens
//! that their logits would be greatest for (Double Sparsity). The channels are found offline, for each layer and head,
//! and given when the backend is opened: [`LabelChannels`](crate::LabelChannels). `store_cache` writes labels with K
//! and V. `examples/generate` measures them (`--sparse`), and how much of attention's weight they find (`--recall`).
//!
//! A step then asks twice a layer: [`select`](crate::SparseBackend::select) names positions, and
//! [`attend_selected`](crate::SparseBackend::attend_selected) reads those. What is between is plain numbers, `[rows,
//! kv_heads, top]`, which a host may as well make by itself. Rows of more than one new token read all that they see, so
//! a step may mix them with prefills.
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let shape = KvShape::heads(1, 4);
//! let pool = PoolConfig { shape, label_channels: 2, ..Default::default() };
//! let channels = LabelChannels::new(1, 1, 2, vec![0, 3])?; // of the whole model; a rank takes `local(&pool)`
//! let options = CpuOptions { labels: Some(channels), ..CpuOptions::default() };
//! let mut engine = Engine::new(pool, options)?;
//! let layer = LayerId::new(0);
//!
//! // Four tokens with K and V, the third of which the query will ask for, and then one more.
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
//! assert_eq!(positions, [2, 4]); // the best, and the row's own
//!
//! let selection = Selection { positions: &positions[..], top: 2 };
//! let asked = Queries { rows: q[..].into(), sinks: None };
//! let attend = Attend::new(1, 4);
//! let backend = engine.backend_mut();
//! backend.attend_selected(&plan, layer, &attend, selection, asked, out[..].as_mut().into(), None)?;
//! assert!(out[3] > 8.0);
//! # Ok(())
//! # }
//! ```
//!
//! On a GPU lists are in device memory, the backend's or the host's own; `CudaOptions::labels` takes the channels, and
//! `Prepare::lists` makes the memory before a capture. Pools of bf16 and f16 have kernels, for up to 16 query
//! heads of a kv head. Scores of all rows have room for `CudaOptions::select_tokens` tokens, by default as many as the
//! pool has slots: rows that share a prefix count it each.
//!
//! Labels cost `kv_heads * label_channels` numbers for each token and layer. Their channels count in
//! [`page_fingerprint`](crate::PoolLayout::page_fingerprint), as scales do.
