//! Overlapped scheduling: the host plans step n + 1 while the device computes step n, so the device never waits.
//!
//! A plan may extend a sequence by a token that step n has not sampled yet. `plan.tokens` contains
//! [`TokenId::PENDING`](crate::TokenId::PENDING) in its place. On the device, step n + 1 reads the token from the
//! output of step n. The host appends the token when it arrives, after the plan.
//!
//! If the token ends the request, the host has planned one step more than necessary. The host finishes the sequence,
//! and the commit of that step skips it. The sequence's pages wait in the fence until that step is complete.
//!
//! ```
//! use std::collections::VecDeque;
//!
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! const STOP: TokenId = TokenId::new(0);
//! let mut engine = Engine::new(PoolConfig { page_size: 4, ..Default::default() }, Null)?;
//! let prompt: Vec<TokenId> = (1..11).map(TokenId::new).collect();
//! let seq = engine.admit(Namespace::default(), &prompt, 0)?;
//!
//! // Two steps are in flight. The host reuses a scratch once its plan is launched.
//! let mut scratch = StepScratch::new();
//! let mut in_flight = VecDeque::new();
//! let mut sampled = [5, 6, 7, 0].map(TokenId::new).into_iter(); // the device's samples
//! loop {
//!     while in_flight.len() < 2 {
//!         let len = engine.extend_max(seq)?;
//!         let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }])?;
//!         // launch(&plan) here, without waiting for it.
//!         let decodes = len == 1;
//!         assert_eq!(plan.tokens[0] == TokenId::PENDING, decodes);
//!         in_flight.push_back(plan.step());
//!     }
//!     // Wait for the older step only, then append its sampled token.
//!     let step = in_flight.pop_front().expect("two are in flight");
//!     let token = sampled.next().expect("the last sample ends the loop");
//!     engine.append(seq, &[token])?;
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//!     if token == STOP {
//!         break;
//!     }
//! }
//! assert_eq!(engine.token_count(seq)?, 14);
//! engine.finish(seq)?; // a step with this sequence is still in flight
//! assert_eq!(engine.stats().fenced_pages, 1); // the device may still write to it
//! for step in in_flight {
//!     engine.commit(step)?; // skips the sequence
//!     engine.complete(step)?;
//! }
//! assert_eq!(engine.stats().fenced_pages, 0);
//! engine.verify()?;
//! # Ok(())
//! # }
//! ```
//!
//! `EngineConfig::max_steps` limits the number of steps in flight.
//!
//! [`gpu`](super::gpu) describes the events that signal the end of a step.
