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
//! # Promises, and a fork that is refused
//!
//! `fork` promises each child the pages of `promise` tokens in all. A child has the shared pages and its copy of the
//! tail page; the promise sets the others aside. The parent keeps its own promise. Either all children fit or none is
//! made, and a refused fork changes nothing:
//!
//! * `OutOfPages` with a step in `after`: complete that step, then fork.
//! * `OutOfPages` without one: fork as many as fit, or with a smaller promise. Admit the others as prompts when they
//!   fit: they find the whole pages in the cache and compute the tail.
//! * `OutOfSteps`: the copies need a step; complete one, then fork.
//! * `OutOfSequences`, `OutOfTokens`: wait until a sequence ends. Fork before the parent goes on, or admit the prompt.
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = PoolConfig { page_size: 4, capacity: Capacity::Pages(10), ..Default::default() };
//! let mut engine = Engine::new(config, Null)?;
//! let mut scratch = StepScratch::new();
//! let prompt: Vec<TokenId> = (0..10).map(TokenId::new).collect();
//! // Six answers of at most 6 tokens: each sequence comes to 16 tokens, 4 pages.
//! let first = engine.admit(Namespace::default(), &prompt, 16)?;
//! let prefill = engine.plan_batch(&mut scratch, &[Extend { seq: first, len: 10 }])?.step();
//! engine.commit(prefill)?;
//! engine.complete(prefill)?;
//!
//! // Two pages are shared. Each child lacks a copy of the third and the fourth.
//! let mut lacking = 5;
//! let refused = engine.fork(first, lacking, 16).expect_err("5 children lack 10 pages");
//! let EngineError::Core(Error::OutOfPages { wanted, available, after: None }) = refused else {
//!     return Err(refused.into());
//! };
//! assert_eq!((wanted, available), (10, 6)); // of 10 pages the parent has 3 and is promised one more
//! let fit = (available * u64::from(lacking) / wanted) as u32;
//! let forked = engine.fork(first, fit, 16)?;
//! let mut running = vec![first];
//! running.extend(forked.children);
//! if let Some(copied) = forked.step {
//!     engine.complete(copied)?;
//! }
//! lacking -= fit;
//!
//! while !running.is_empty() {
//!     while lacking > 0 && engine.admission(Namespace::default(), &prompt, 16)?.fits() {
//!         running.push(engine.admit(Namespace::default(), &prompt, 16)?);
//!         lacking -= 1;
//!     }
//!     let mut items = Vec::new();
//!     for &seq in &running {
//!         if engine.extend_max(seq)? == 0 {
//!             engine.append(seq, &[TokenId::new(9)])?; // drawn from the logits of its last token
//!         }
//!         items.push(Extend { seq, len: engine.extend_max(seq)? });
//!     }
//!     let step = engine.plan_batch(&mut scratch, &items)?.step(); // never out of pages
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//!     for i in (0..running.len()).rev() {
//!         if engine.token_count(running[i])? == 16 {
//!             engine.finish(running.remove(i))?;
//!         }
//!     }
//! }
//! let stats = engine.stats();
//! assert_eq!((stats.forks, stats.prompts, stats.hit_tokens), (3, 3, 2 * 8));
//! assert_eq!(stats.preemptions, 0);
//! engine.verify()?;
//! # Ok(())
//! # }
//! ```
//!
//! Not here: promises of prompts ([`scheduling`](super::scheduling)).
