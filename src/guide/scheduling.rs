//! Who is admitted, and who gives way: two policies, and what they are made of.
//!
//! The engine decides nothing. It answers what fits: [`admission`](crate::Engine::admission) says beforehand what a
//! prompt would take, [`available`](crate::Engine::available) how many pages anybody could take now,
//! [`available_after`](crate::Engine::available_after) how many when a step is complete.
//!
//! # With promises: whoever is admitted ends
//!
//! `admit` is told how many tokens the sequence may come to, and promises the pages for them. Nobody else takes those,
//! so no running sequence has to be preempted. The price is that pages lie idle for outputs that end early.
//!
//! ```
//! use std::collections::VecDeque;
//!
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = PoolConfig { page_size: 4, capacity: Capacity::Pages(10), ..Default::default() };
//! let mut engine = Engine::new(config, Null)?;
//! let mut scratch = StepScratch::new();
//! // Six prompts of 12 tokens, of which at most 8 more may come: 5 pages each, and the pool has 10.
//! let prompt = |i: u32| (0..12).map(|t| TokenId::new(100 * i + t)).collect::<Vec<_>>();
//! let mut waiting: VecDeque<Vec<TokenId>> = (0..6).map(prompt).collect();
//! let mut running = Vec::new();
//! let mut most = 0;
//! while !(waiting.is_empty() && running.is_empty()) {
//!     // First come, first served. Where the first does not fit, `after` names the step to wait for.
//!     while let Some(prompt) = waiting.front() {
//!         if !engine.admission(Namespace::default(), prompt, 20)?.fits() {
//!             break;
//!         }
//!         running.push(engine.admit(Namespace::default(), prompt, 20)?);
//!         waiting.pop_front();
//!     }
//!     most = most.max(running.len());
//!     let mut items = Vec::new();
//!     for &seq in &running {
//!         items.push(Extend { seq, len: engine.extend_max(seq)? });
//!     }
//!     let step = engine.plan_batch(&mut scratch, &items)?.step(); // never out of pages
//!     for &seq in &running {
//!         engine.append(seq, &[TokenId::new(9)])?;
//!     }
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//!     for i in (0..running.len()).rev() {
//!         if engine.token_count(running[i])? == 20 {
//!             engine.finish(running.remove(i))?;
//!         }
//!     }
//! }
//! assert_eq!((most, engine.stats().preemptions), (2, 0));
//! # Ok(())
//! # }
//! ```
//!
//! # Without: more run, and the youngest gives way
//!
//! A promise of 0 takes pages only as they are needed. When a plan finds none, the youngest sequence is preempted: it
//! gives its pages up, keeps its tokens, and finds what is left of its prefix in the cache when it is resumed.
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = PoolConfig { page_size: 4, capacity: Capacity::Pages(10), ..Default::default() };
//! let mut engine = Engine::new(config, Null)?;
//! let mut scratch = StepScratch::new();
//! let mut running = Vec::new();
//! for i in 0..3 {
//!     let prompt: Vec<_> = (0..12).map(|t| TokenId::new(100 * i + t)).collect();
//!     running.push(engine.admit(Namespace::default(), &prompt, 0)?);
//! }
//! let mut preempted: Vec<SeqKey> = Vec::new(); // the last one is the oldest
//! while !(running.is_empty() && preempted.is_empty()) {
//!     // Whoever waits comes back when it fits, before anyone new.
//!     while let Some(&seq) = preempted.last() {
//!         match engine.resume(seq, 0) {
//!             Ok(()) => running.push(preempted.pop().expect("it was there")),
//!             Err(Error::OutOfPages { .. }) => break,
//!             Err(error) => return Err(error.into()),
//!         }
//!     }
//!     let step = loop {
//!         let mut items = Vec::new();
//!         for &seq in &running {
//!             items.push(Extend { seq, len: engine.extend_max(seq)? });
//!         }
//!         match engine.plan_batch(&mut scratch, &items) {
//!             Ok(plan) => break plan.step(),
//!             // `after` may name a step in flight: then waiting for it would do, too. Here none is.
//!             Err(EngineError::Core(Error::OutOfPages { .. })) if running.len() > 1 => {
//!                 let youngest = running.pop().expect("there are two");
//!                 engine.preempt(youngest, Keep::Publish)?;
//!                 preempted.push(youngest);
//!             }
//!             Err(error) => return Err(error.into()),
//!         }
//!     };
//!     for &seq in &running {
//!         engine.append(seq, &[TokenId::new(9)])?;
//!     }
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//!     for i in (0..running.len()).rev() {
//!         if engine.token_count(running[i])? == 20 {
//!             engine.finish(running.remove(i))?;
//!         }
//!     }
//! }
//! assert!(engine.stats().preemptions > 0);
//! # Ok(())
//! # }
//! ```
//!
//! Between the two: a promise of what is likely, and the rest as it comes. A promised plan is refused at most until the
//! step that [`Error::OutOfPages`](crate::Error::OutOfPages) names in `after`; beyond the promise a sequence takes what
//! nobody is promised.
//!
//! # Equal prompts at a time: one computes, the others wait
//!
//! When many prompts begin alike and nothing of them is cached yet, each would compute the same. An
//! [`Admission`](crate::Admission) names the running sequence that is computing it already, its leader. Who waits until
//! that [leads no more](crate::Engine::is_leading) finds the pages, whether the leader was done, cancelled or
//! preempted: then it is asked again, and may lead in its turn.
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = PoolConfig { page_size: 4, capacity: Capacity::Pages(100), ..Default::default() };
//! let mut engine = Engine::new(config, Null)?;
//! let mut scratch = StepScratch::new();
//! let prompt: Vec<_> = (0..30).map(TokenId::new).collect();
//! let mut waiting: Vec<Option<Leader>> = vec![None; 8]; // eight times the same prompt
//! let mut running = Vec::new();
//! while !(waiting.is_empty() && running.is_empty()) {
//!     let mut still = Vec::new();
//!     for leader in waiting.drain(..) {
//!         if leader.is_some_and(|leader| engine.is_leading(&leader)) {
//!             still.push(leader);
//!             continue;
//!         }
//!         match engine.admission(Namespace::default(), &prompt, 0)?.leader {
//!             None => running.push(engine.admit(Namespace::default(), &prompt, 0)?),
//!             leader => still.push(leader),
//!         }
//!     }
//!     waiting = still;
//!     let mut items = Vec::new();
//!     for &seq in &running {
//!         items.push(Extend { seq, len: engine.extend_max(seq)? });
//!     }
//!     let step = engine.plan_batch(&mut scratch, &items)?.step();
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//!     for seq in running.drain(..) {
//!         engine.finish(seq)?; // one token is all that is asked for
//!     }
//! }
//! let stats = engine.stats();
//! assert_eq!(stats.hit_tokens, 7 * 28); // whole pages, and never the last token
//! assert_eq!(stats.computed_tokens, 30 + 7 * 2);
//! # Ok(())
//! # }
//! ```
//!
//! # In a batch, and at a resume
//!
//! [`admit_batch`](crate::Engine::admit_batch) admits such prompts together and names leaders within the batch. The
//! host preempts each follower before its first plan. The follower has computed nothing, and keeps its row and its
//! tokens. [`Stats`](crate::Stats) counts it as one prompt when it computes after its resume. A preemption takes the
//! promise back, so the host passes it to `resume` again.
//!
//! Before a resume, [`admission`](crate::Engine::admission) of the sequence's tokens names a leader as it does for a
//! prompt. So of followers whose leader is cancelled, one computes and the others wait again. `admission` also checks
//! for a row and tokens of one more sequence; where it reports `OutOfSequences` or `OutOfTokens`, resume without it.
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = PoolConfig { page_size: 4, capacity: Capacity::Pages(100), ..Default::default() };
//! let mut engine = Engine::new(config, Null)?;
//! let mut scratch = StepScratch::new();
//! let prompt: Vec<_> = (0..30).map(TokenId::new).collect();
//! let prompts = [Prompt { namespace: Namespace::default(), tokens: &prompt, promise: 0 }; 8];
//! let (mut running, mut waiting) = (Vec::new(), Vec::new());
//! for Admitted { seq, leader, .. } in engine.admit_batch(&prompts)?.to_vec() {
//!     match leader {
//!         None => running.push(seq),
//!         Some(leader) => waiting.push((seq, leader)),
//!     }
//! }
//! for &(seq, _) in &waiting {
//!     engine.preempt(seq, Keep::Drop)?;
//! }
//! assert_eq!((running.len(), waiting.len()), (1, 7));
//! engine.finish(running.remove(0))?; // the leader is cancelled before it has computed anything
//! while !(waiting.is_empty() && running.is_empty()) {
//!     let mut still = Vec::new();
//!     for (seq, leader) in waiting.drain(..) {
//!         if engine.is_leading(&leader) {
//!             still.push((seq, leader));
//!             continue;
//!         }
//!         let tokens: Vec<_> = engine.tokens(seq)?.collect();
//!         match engine.admission(Namespace::default(), &tokens, 0)?.leader {
//!             Some(leader) => still.push((seq, leader)),
//!             None => {
//!                 engine.resume(seq, 0)?;
//!                 running.push(seq);
//!             }
//!         }
//!     }
//!     waiting = still;
//!     let mut items = Vec::new();
//!     for &seq in &running {
//!         items.push(Extend { seq, len: engine.extend_max(seq)? });
//!     }
//!     let step = engine.plan_batch(&mut scratch, &items)?.step();
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//!     for seq in running.drain(..) {
//!         engine.finish(seq)?;
//!     }
//! }
//! let stats = engine.stats();
//! assert_eq!((stats.prompts, stats.hit_tokens), (7, 6 * 28)); // as above, less the one that was cancelled
//! assert_eq!(stats.computed_tokens, 30 + 6 * 2);
//! # Ok(())
//! # }
//! ```
//!
//! Not here: fairness between tenants ([`tenants`](super::tenants)).
