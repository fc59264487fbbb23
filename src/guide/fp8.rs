//! Fp8: K and V in half the bytes of bf16, for a cache of twice the tokens.
//!
//! A number of a pool of [`KvDtype::Fp8E4M3`](crate::KvDtype::Fp8E4M3) is a byte times a scale. Rows are handed in as
//! ever, in f32, f16 or bf16, and are rounded when they are stored; attention reads what the bytes stand for. Where the
//! scales come from is the pool's [`Scaling`](crate::Scaling):
//!
//! * `Static`: one for each layer, head, and K and V, that a host has measured: the largest number that it saw there,
//!   divided by 448. What is larger later becomes the largest. They are given when the backend is opened.
//! * `ByToken`: made at the store, for each token and head, and stored beside it: 4 bytes more for each, nothing to
//!   measure, and nothing is too large.
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let shape = KvShape::heads(2, 4);
//! let fp8 = PoolConfig { layers: 2, shape, dtype: KvDtype::Fp8E4M3, ..Default::default() };
//! let by_token = PoolConfig { scaling: Scaling::ByToken, ..fp8 };
//! assert_eq!((fp8.bytes_per_token()?, by_token.bytes_per_token()?), (32, 64));
//!
//! // Of the whole model, `[layers, kv_heads, K and V]`; a rank takes what its heads need.
//! let measured = vec![3.0, 9.5, 2.5, 7.0, 4.0, 8.0, 3.5, 6.0];
//! let model = KvScales::new(2, 2, measured.iter().map(|largest| largest / 448.0).collect())?;
//! let options = CpuOptions { scales: Some(model.local(&fp8)?), ..CpuOptions::default() };
//! let mut engine = Engine::new(fp8, options)?;
//!
//! let seq = engine.admit(Namespace::default(), &[TokenId::new(7)], 0)?;
//! let mut scratch = StepScratch::new();
//! let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 1 }])?;
//! let k = [0.1_f32, -1.0, 3.0, 5.0, 0.0, 0.2, 2.5, -0.3];
//! engine.backend_mut().store_cache(&plan, LayerId::new(0), k[..].into(), k[..].into())?;
//! let slot = plan.slot_mapping.get(0).expect("not padding");
//! let read = engine.backend().read_slot(PlaneName::K, LayerId::new(0), slot)?;
//! for (x, y) in k.iter().zip(read) {
//!     // Three bits of mantissa; and 5 was more than was ever measured.
//!     assert!((x.min(3.0) - y).abs() <= x.abs() / 15.0, "{x} {y}");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Pages move between pools where their bytes mean the same: where
//! [`page_fingerprint`](crate::PoolLayout::page_fingerprint) is equal, of which given scales are a part.
//!
//! On a GPU `CudaOptions` has the same `scales`, uploaded once, and `rows`: the type of the rows that the host hands in
//! and is given, bf16 unless it says f16 or f32. The bytes and scales that the store makes are the CPU's, bit by bit.
//! Attention has an error of the rows' type over what the bytes stand for; where scales are by token, prefill rounds a
//! number times its scale to the rows' type first. Spans that rows share are read once as over 16 bits, where that is
//! cheaper; there V by token is rounded so, too.
