//! The loop of a server: the calls of one step, and the prefix that stays for the next request.
//!
//! A pool consists of *pages*. A page stores K and V of `page_size` tokens in all layers. A request is a *sequence* of
//! tokens. For each step the host chooses the sequences to extend and the number of tokens for each. The plan contains
//! the slot in which each token's K and V are stored.
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Two layers of one head of 8 numbers, 4 tokens a page. `Engine::new` allocates all memory.
//! let shape = KvShape::heads(1, 8);
//! let config = PoolConfig { layers: 2, shape, page_size: 4, ..Default::default() };
//! let mut engine = Engine::new(config, CpuOptions::default())?;
//! let mut scratch = StepScratch::new(); // stores the plan; reused by each step
//! let attend = Attend::new(2, 8); // two query heads share the kv head
//!
//! // The cache is empty, so the model computes the whole prompt, here in chunks of 6 tokens.
//! let prompt: Vec<TokenId> = (0..10).map(TokenId::new).collect();
//! let seq = engine.admit(Namespace::default(), &prompt, 0)?;
//! let mut output = Vec::new();
//! while output.len() < 5 {
//!     let len = engine.extend_max(seq)?.min(6); // 6, 4, then 1 at a time
//!     let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }])?;
//!
//!     // The model embeds plan.tokens and rotates by plan.positions. Each layer stores its K and V and attends.
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
//!         // The last row of `out` belongs to the last token: its logits predict the next one.
//!         let sampled = TokenId::new(100 + output.len() as u32);
//!         engine.append(seq, &[sampled])?;
//!         output.push(sampled);
//!     }
//!     engine.commit(step)?; // the tokens have K and V: cached_len advances, whole pages are shared
//!     engine.complete(step)?; // the device is done: the fence returns pages and locks that waited for this step
//! }
//! assert_eq!(engine.cached_len(seq)?, 14); // the last sampled token was not computed
//! engine.finish(seq)?; // whole pages stay in the cache until eviction
//!
//! // The next turn of the conversation matches the whole pages of the earlier turn.
//! let next: Vec<TokenId> = prompt.into_iter().chain(output).chain([TokenId::new(7)]).collect();
//! let seq = engine.admit(Namespace::default(), &next, 0)?;
//! assert_eq!(engine.cached_len(seq)?, 12);
//! engine.finish(seq)?;
//! engine.verify()?; // audits the whole state; for tests
//! # Ok(())
//! # }
//! ```
//!
//! [`scheduling`](super::scheduling) describes how to choose the sequences of a step.
