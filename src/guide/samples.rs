//! Many answers to one prompt: the prompt is computed once, then forked.
//!
//! A fork shares all whole pages with its parent. The last page, if it is partly filled, is copied for each child, all
//! in one step that is completed like any other. Children are sequences like their parent, which need not outlive it.
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut engine = Engine::new(PoolConfig { page_size: 4, ..Default::default() }, CpuOptions::default())?;
//! let mut scratch = StepScratch::new();
//! let prompt: Vec<TokenId> = (0..10).map(TokenId::new).collect();
//! let first = engine.admit(Namespace::default(), &prompt, 0)?;
//! let prefill = engine.plan_batch(&mut scratch, &[Extend { seq: first, len: 10 }])?.step();
//! // The model runs here.
//! engine.commit(prefill)?;
//! engine.complete(prefill)?;
//!
//! // Three more sequences with the same past, each promised room for 14 tokens in all.
//! let forked = engine.fork(first, 3, 14)?;
//! assert_eq!(forked.copies.len(), 3); // of the third page, which holds 2 tokens
//! let mut answers = vec![first];
//! answers.extend(forked.children);
//! if let Some(copied) = forked.step {
//!     engine.complete(copied)?; // once the device has made the copies, or at once where one stream orders all
//! }
//!
//! // Each draws its own first token from the prompt's logits, and goes its own way in one batch.
//! for i in 0..3 {
//!     for (answer, &seq) in answers.iter().enumerate() {
//!         engine.append(seq, &[TokenId::new(100 * answer as u32 + i)])?;
//!     }
//!     let items: Vec<_> = answers.iter().map(|&seq| Extend { seq, len: 1 }).collect();
//!     let step = engine.plan_batch(&mut scratch, &items)?.step();
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//! }
//! let stats = engine.stats();
//! assert_eq!(stats.protected_pages, 2 + 4); // 2 pages of the prompt for all, then each has filled one of its own
//! assert_eq!(stats.private_pages, 4);
//! for seq in answers {
//!     engine.finish(seq)?;
//! }
//! engine.verify()?;
//! # Ok(())
//! # }
//! ```
//!
//! The same serves beam search: fork those that go on, finish those that do not. Other ranks' backends are handed
//! `Forked::copies` ([`ranks`](super::ranks)).
//!
//! Not here: promises ([`scheduling`](super::scheduling)).
