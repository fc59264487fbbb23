//! Fp8: K and V in half the bytes of bf16, so the cache holds up to twice the tokens.
//!
//! In a pool of [`KvDtype::Fp8E4M3`](crate::KvDtype::Fp8E4M3), a number is a byte times a scale. The host passes rows
//! in f32, f16 or bf16 as usual. The store rounds them, and attention reads the decoded values. The pool's
//! [`Scaling`](crate::layout::Scaling) sets the source of the scales:
//!
//! * `Static`: the host measures one scale for each layer, head, and K or V: the largest magnitude divided by 448. The
//!   store clamps numbers beyond 448 times the scale. The host passes the scales when it opens the backend.
//! * `ByToken`: the store computes a scale for each token, head, and K or V, and stores it in 4 bytes. It needs no
//!   measurement and clamps only infinities.
//!
//! ```
//! use kvarena::*;
//! use kvarena::layout::{KvScales, PlaneName, Scaling};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let shape = KvShape::heads(2, 4);
//! let fp8 = PoolConfig { layers: 2, shape, dtype: KvDtype::Fp8E4M3, ..Default::default() };
//! let by_token = PoolConfig { scaling: Scaling::ByToken, ..fp8 };
//! assert_eq!((fp8.bytes_per_token()?, by_token.bytes_per_token()?), (32, 64));
//!
//! // Scales of the whole model, `[layers, kv_heads, K and V]`; a rank takes those of its heads.
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
//!     // E4m3 has three bits of mantissa. The store clamps 5 to the measured maximum of 3.
//!     assert!((x.min(3.0) - y).abs() <= x.abs() / 15.0, "{x} {y}");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Pages can move between pools with equal [`page_fingerprint`](crate::layout::PoolLayout::page_fingerprint), because
//! their bytes mean the same. Static scales are part of the fingerprint.
//!
//! On a GPU, `CudaOptions` takes the same `scales` and uploads them once. Its `rows` is the type of the rows that the
//! host passes and receives: bf16 by default, or f16 or f32. The store produces the CPU's bytes and scales, bit for
//! bit. Attention has the rounding error of the rows' type, relative to the decoded values.
//!
//! With scales by token, the prefill kernels round each number of V, times its scale, to the rows' type. They apply the
//! scales of K to the logits. The kernel that reads shared spans once does the same; `Cuda` uses that kernel where it
//! is cheaper.
