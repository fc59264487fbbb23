//! Several outputs from one prompt: the model computes the prompt once, and the host forks the sequence.
//!
//! Children share all whole computed pages with their parent. The backend copies a partly filled last page for each
//! child. All copies belong to one step, which the host completes like any other. Children are ordinary sequences and
//! may outlive their parent.
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
//! // Three more sequences with the same prompt, each promised pages for 14 tokens in total.
//! let forked = engine.fork(first, 3, 14)?;
//! assert_eq!(forked.copies.len(), 3); // of the third page, which contains 2 tokens
//! let mut answers = vec![first];
//! answers.extend(forked.children);
//! if let Some(copied) = forked.step {
//!     engine.complete(copied)?; // once the device has made the copies; at once if one stream orders all work
//! }
//!
//! // Each samples its own first token from the prompt's logits. One batch extends all of them.
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
//! assert_eq!(stats.protected_pages, 2 + 4); // 2 shared pages of the prompt, and one filled page of each sequence
//! assert_eq!(stats.private_pages, 4);
//! for seq in answers {
//!     engine.finish(seq)?;
//! }
//! engine.verify()?;
//! # Ok(())
//! # }
//! ```
//!
//! The same calls implement beam search: fork the beams that continue, and finish the rest. Send `Forked::copies` to
//! the backends of other ranks ([`ranks`](super::ranks)).
//!
//! # Promises, and a rejected fork
//!
//! `fork` promises each child the pages of `promise` tokens in total. A child has the shared pages and its copy of the
//! last page; the promise reserves the missing pages. The parent keeps its own promise. `fork` makes all children or
//! none. A rejected fork changes nothing, except that pages of swap memory for which the parent waited stay loaded:
//!
//! * `OutOfPages` with a step in `after`: complete that step, then fork.
//! * `OutOfPages` without a step: fork fewer children, or promise less. Admit the remaining outputs as prompts when
//!   they fit. They match the whole pages in the cache and compute the last page.
//! * `OutOfSteps`: the copies need a step. Complete an earlier step, then fork.
//! * `OutOfSequences`, `OutOfTokens`: wait until a sequence ends. Then fork if the parent has not continued; otherwise
//!   admit the remaining outputs as prompts.
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = PoolConfig { page_size: 4, capacity: Capacity::Pages(10), ..Default::default() };
//! let mut engine = Engine::new(config, Null)?;
//! let mut scratch = StepScratch::new();
//! let prompt: Vec<TokenId> = (0..10).map(TokenId::new).collect();
//! // Six outputs of at most 6 tokens: each sequence reaches 16 tokens, 4 pages.
//! let first = engine.admit(Namespace::default(), &prompt, 16)?;
//! let prefill = engine.plan_batch(&mut scratch, &[Extend { seq: first, len: 10 }])?.step();
//! engine.commit(prefill)?;
//! engine.complete(prefill)?;
//!
//! // Two pages are shared. Each child needs a copy of the third page, and a fourth page.
//! let mut lacking = 5;
//! let refused = engine.fork(first, lacking, 16).expect_err("5 children lack 10 pages");
//! let EngineError::Core(Error::OutOfPages { wanted, available, after: None }) = refused else {
//!     return Err(refused.into());
//! };
//! assert_eq!((wanted, available), (10, 6)); // the pool has 10 pages: the parent has 3 and is promised one more
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
//!             engine.append(seq, &[TokenId::new(9)])?; // sampled from the logits of its last token
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
//! [`scheduling`](super::scheduling) describes the promises of prompts.
