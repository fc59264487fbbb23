//! Admission and preemption: two policies, and the calls that they use.
//!
//! The host sets the policy; the engine computes what fits. [`admission`](crate::Engine::admission) returns the cost
//! of a prompt before the host admits it. [`available`](crate::Engine::available) returns the number of pages that any
//! call can take, and [`available_after`](crate::Engine::available_after) that number after a step is complete.
//!
//! Check each request when it arrives: its prompt and its maximum output together have at most
//! [`engine.shape()`](crate::Engine::shape)`.max_sequence_len` tokens. Otherwise [`append`](crate::Engine::append) may
//! return `TooLong` in the middle of the output.
//!
//! In the repository, `examples/adopt` has a scheduler with preemption and chunked prefill, for a block manager in
//! vLLM's form: `cargo run --release --example adopt`.
//!
//! # With promises: each admitted sequence runs to its end
//!
//! The host passes `admit` the maximum number of tokens of the sequence. `admit` reserves the pages for them, so no
//! running sequence is preempted. The cost is that reserved pages stay unused if outputs end early.
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
//! // Six prompts of 12 tokens with at most 8 output tokens: 5 pages each. The pool has 10 pages.
//! let prompt = |i: u32| (0..12).map(|t| TokenId::new(100 * i + t)).collect::<Vec<_>>();
//! let mut waiting: VecDeque<Vec<TokenId>> = (0..6).map(prompt).collect();
//! waiting.retain(|prompt| prompt.len() as u32 + 8 <= engine.shape().max_sequence_len); // reject the others
//! let mut running = Vec::new();
//! let mut most = 0;
//! while !(waiting.is_empty() && running.is_empty()) {
//!     // First come, first served. If the first does not fit, `after` names the step to wait for.
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
//! # Without promises: more sequences run, and the youngest is preempted
//!
//! With a promise of 0, a sequence takes pages only when its plans need them. If the engine rejects a plan for lack of
//! pages, the host preempts the youngest sequence. That sequence releases its pages and keeps its tokens. A resume
//! matches the part of its prefix that is still in the cache.
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
//!     // A preempted sequence resumes when it fits, before any new one.
//!     while let Some(&seq) = preempted.last() {
//!         match engine.resume(seq, 0) {
//!             Ok(()) => running.push(preempted.pop().expect("one is left")),
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
//!             // If `after` named a step in flight, waiting for it would also help. Here none is in flight.
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
//! A third policy promises the likely length, and lets a longer sequence take further pages on demand. The engine
//! rejects a plan that takes only promised pages if too many of these pages still wait in the fence. `after` of
//! [`Error::OutOfPages`](crate::Error::OutOfPages) names a step; the host completes this step and retries the plan.
//! Beyond its promise, a sequence takes pages that no other sequence has reserved.
//!
//! # A budget of tokens for each step
//!
//! A long prompt in one step delays the sequences that decode. So a scheduler limits the tokens of a step, and computes
//! a prompt in chunks. A chunk that does not end its prompt has no sample.
//! [`max_step_tokens`](crate::EngineConfig::max_step_tokens) is the engine's own limit.
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut engine = Engine::new(PoolConfig { page_size: 4, ..Default::default() }, Null)?;
//! let mut scratch = StepScratch::new();
//! let mut running = Vec::new();
//! for i in 0..2 {
//!     let prompt: Vec<_> = (0..12).map(|t| TokenId::new(100 * i + t)).collect();
//!     running.push(engine.admit(Namespace::default(), &prompt, 12)?);
//! }
//! let mut steps = Vec::new();
//! for _ in 0..4 {
//!     let (mut items, mut budget) = (Vec::new(), 8);
//!     // The oldest first: these decode already.
//!     for &seq in &running {
//!         let len = engine.extend_max(seq)?.min(budget);
//!         if len > 0 {
//!             items.push(Extend { seq, len });
//!             budget -= len;
//!         }
//!     }
//!     let step = engine.plan_batch(&mut scratch, &items)?.step();
//!     for &Extend { seq, .. } in &items {
//!         if engine.has_sample(seq)? {
//!             engine.append(seq, &[TokenId::new(9)])?;
//!         }
//!     }
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//!     steps.push(items.iter().map(|item| item.len).collect::<Vec<_>>());
//! }
//! assert_eq!(steps, [vec![8], vec![4, 4], vec![1, 7], vec![1, 1]]);
//! # Ok(())
//! # }
//! ```
//!
//! # Leaders: one computation for equal prompts
//!
//! Without leaders, prompts that share an uncached prefix would each compute this prefix. An
//! [`Admission`](crate::plan::Admission) names the leader: the running sequence that computes these tokens already. The
//! prompt waits while [`is_leading`](crate::Engine::is_leading) returns true. Then the host calls `admission` again.
//! The new admission counts the pages that the leader published, even if the leader was cancelled or preempted. If it
//! names no new leader, the host admits the prompt. The sequence computes the rest, and may lead other prompts.
//!
//! ```
//! use kvarena::*;
//! use kvarena::plan::Leader;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = PoolConfig { page_size: 4, capacity: Capacity::Pages(100), ..Default::default() };
//! let mut engine = Engine::new(config, Null)?;
//! let mut scratch = StepScratch::new();
//! let prompt: Vec<_> = (0..30).map(TokenId::new).collect();
//! let mut waiting: Vec<Option<Leader>> = vec![None; 8]; // eight requests with the same prompt
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
//!         engine.finish(seq)?; // the request needs only one token
//!     }
//! }
//! let stats = engine.stats();
//! assert_eq!(stats.hit_tokens, 7 * 28); // whole pages, and never the last token
//! assert_eq!(stats.computed_tokens, 30 + 7 * 2);
//! # Ok(())
//! # }
//! ```
//!
//! # Leaders in a batch, and at a resume
//!
//! [`admit_batch`](crate::Engine::admit_batch) admits several prompts and names leaders within the batch. The host
//! preempts each follower before its first plan. The follower has computed nothing, and keeps its row and its tokens.
//! [`Stats`](crate::stats::Stats) counts the follower once, as a prompt, at its first commit after the resume. A
//! preemption cancels the promise, so the host passes it to `resume` again.
//!
//! Before a resume, [`admission`](crate::Engine::admission) of the sequence's tokens names a leader as it does for a
//! prompt. If the leader is cancelled, one follower computes the prefix and the others wait. `admission` also checks
//! that the tables have space for one more sequence, which a resume does not need. If it returns `OutOfSequences` or
//! `OutOfTokens`, the host resumes without an admission.
//!
//! ```
//! use kvarena::*;
//! use kvarena::plan::Admitted;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = PoolConfig { page_size: 4, capacity: Capacity::Pages(100), ..Default::default() };
//! let mut engine = Engine::new(config, Null)?;
//! let mut scratch = StepScratch::new();
//! let prompt: Vec<_> = (0..30).map(TokenId::new).collect();
//! let prompts = [Prompt { namespace: Namespace::default(), tokens: &prompt, admit: 0.into() }; 8];
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
//! engine.finish(running.remove(0))?; // the host cancels the leader before it computes anything
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
//! assert_eq!((stats.prompts, stats.hit_tokens), (7, 6 * 28)); // the cancelled prompt does not count
//! assert_eq!(stats.computed_tokens, 30 + 6 * 2);
//! # Ok(())
//! # }
//! ```
//!
//! # Swap memory
//!
//! With [`PoolConfig::swap_pages`](crate::PoolConfig::swap_pages), evicted pages move to swap memory. `admit` uses
//! cached pages in both memories. [`load`](crate::Engine::load), the next plan or a fork copies swap pages to the
//! device; [`is_loading`](crate::Engine::is_loading) returns whether the device is still copying.
//! [`save_ahead`](crate::Engine::save_ahead) keeps the oldest pages saved, so evicting them needs no copy.
//! With groups of layers, the cached pages of a window or a chunk move to swap memory and back as well.
//!
//! [`puts`](crate::Engine::puts) and [`fetch`](crate::Engine::fetch) exchange [records](crate::moves) of swap pages
//! with a store of the host, by page hashes. A thread of the store asks it for the records that a
//! [`lookup`](crate::Engine::lookup) names:
//!
//! ```
//! # use std::collections::HashSet;
//! # use kvarena::hash::{Hashing, PageHash};
//! # use kvarena::*;
//! # fn serve(engine: &mut Engine<Null>, prompt: &[TokenId], store: &mut HashSet<(u32, PageHash)>)
//! # -> Result<(), EngineError<std::convert::Infallible>> {
//! if let Some(lookup) = engine.lookup(Namespace::default(), prompt)? {
//!     let keys = lookup.keys(prompt);
//!     let to = lookup.target(|group, place| store.contains(&(group, keys[place as usize])));
//!     if let Some(fetch) = engine.fetch(Namespace::default(), prompt, to)? {
//!         let (id, count) = (fetch.id, fetch.len());
//!         // For each of fetch.records(), the store writes record.pages.
//!         engine.fetched(id, count);
//!     }
//! }
//! let mut ids = Vec::new();
//! engine.puts(16, |put| {
//!     store.insert((put.group, put.key)); // The store reads put.pages.
//!     ids.push(put.id);
//! })?;
//! for id in ids {
//!     engine.put_done(id, true);
//! }
//! # Ok(())
//! # }
//! # let pool = PoolConfig { page_size: 4, swap_pages: 8, stage_pages: 4, ..PoolConfig::default() };
//! # let config = EngineConfig { hashing: Hashing::ALL.first().copied(), ..pool.into() };
//! # let mut store = HashSet::new();
//! # let prompt: Vec<_> = (0..9).map(TokenId::new).collect();
//! # for hit in [0, 8] {
//! #     let mut engine = Engine::new(config, Null)?;
//! #     serve(&mut engine, &prompt, &mut store)?;
//! #     let seq = engine.admit(Namespace::default(), &prompt, 0)?;
//! #     assert!(Hashing::ALL.is_empty() || engine.cached_len(seq)? == hit);
//! #     let mut scratch = StepScratch::new();
//! #     let step = engine.plan_batch(&mut scratch, &[Extend { seq, len: 9 - engine.cached_len(seq)? }])?.step();
//! #     engine.commit(step)?;
//! #     engine.complete(step)?;
//! #     serve(&mut engine, &prompt, &mut store)?;
//! # }
//! # Ok::<(), EngineError<std::convert::Infallible>>(())
//! ```
//!
//! [`tenants`](super::tenants) describes how to limit the shares of tenants.
