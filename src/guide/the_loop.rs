//! The loop of a server: what happens in a step, and what is left for the next request.
//!
//! A pool is made of *pages*, each of which has room for K and V of `page_size` tokens in all layers. A request is a
//! *sequence* of tokens. For each step the host says which sequences are extended by how many tokens; the plan says
//! where their K and V go.
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Two layers of one head of 8 numbers, 4 tokens a page. All memory is taken by `Engine::new`.
//! let shape = KvShape::heads(1, 8);
//! let config = PoolConfig { layers: 2, shape, page_size: 4, ..Default::default() };
//! let mut engine = Engine::new(config, CpuOptions::default())?;
//! let mut scratch = StepScratch::new(); // plans live here; it is reused
//! let attend = Attend::new(2, 8); // two query heads share the head of K and V
//!
//! // Nothing is cached, so the prompt is computed in full, here in chunks of 6 tokens.
//! let prompt: Vec<TokenId> = (0..10).map(TokenId::new).collect();
//! let seq = engine.admit(Namespace::default(), &prompt, 0)?;
//! let mut output = Vec::new();
//! while output.len() < 5 {
//!     let len = engine.extend_max(seq)?.min(6); // 6, 4, then 1 at a time
//!     let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }])?;
//!
//!     // The model: embeds plan.tokens, rotates by plan.positions, and in each layer stores its K and V and attends.
//!     let rows = plan.token_count();
//!     let (k, v, q) = (vec![0.5; rows * 8], vec![0.25; rows * 8], vec![1.0; rows * 16]);
//!     let mut out = vec![0.0; rows * 16];
//!     for layer in (0..2).map(LayerId::new) {
//!         let backend = engine.backend_mut();
//!         backend.store_cache(&plan, layer, k.as_slice().into(), v.as_slice().into())?;
//!         backend.attend(&plan, layer, &attend, q.as_slice().into(), out.as_mut_slice().into(), None)?;
//!     }
//!
//!     let step = plan.step();
//!     if engine.planned_len(seq)? == engine.token_count(seq)? {
//!         // The last row of `out` belongs to the last token: its logits say what comes next.
//!         let sampled = TokenId::new(100 + output.len() as u32);
//!         engine.append(seq, &[sampled])?;
//!         output.push(sampled);
//!     }
//!     engine.commit(step)?; // the tokens have K and V: cached_len advances, whole pages may be shared
//!     engine.complete(step)?; // the device is done: what waited for it may be used again
//! }
//! assert_eq!(engine.cached_len(seq)?, 14); // the last token sampled was not computed
//! engine.finish(seq)?; // pages stay in the cache until they are evicted
//!
//! // The next turn of the conversation finds the whole pages of what came before.
//! let next: Vec<TokenId> = prompt.into_iter().chain(output).chain([TokenId::new(7)]).collect();
//! let seq = engine.admit(Namespace::default(), &next, 0)?;
//! assert_eq!(engine.cached_len(seq)?, 12);
//! engine.finish(seq)?;
//! engine.verify()?; // audits everything; for tests
//! # Ok(())
//! # }
//! ```
//!
//! Not here: which sequences to extend ([`scheduling`](super::scheduling)).
