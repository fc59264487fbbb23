//! Planning ahead: the host plans step n + 1 while the device computes step n, so that the device never waits.
//!
//! A plan may extend a sequence by a token that is not known yet: the one that its step before will sample. In
//! `plan.tokens` it is [`TokenId::PENDING`](crate::TokenId::PENDING); on the device the sampled token is in the output
//! of step n already, and step n + 1 takes it from there. The host appends it when it arrives, after the plan.
//!
//! Where the token ends the request, one step too many has been planned. Nothing is undone: the sequence is finished,
//! and that step's commit skips it. Its pages wait until that step is complete.
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
//! // Two steps are in flight. A scratch is free again when its plan was launched.
//! let mut scratch = StepScratch::new();
//! let mut in_flight = VecDeque::new();
//! let mut sampled = [5, 6, 7, 0].map(TokenId::new).into_iter(); // what the device will answer
//! loop {
//!     while in_flight.len() < 2 {
//!         let len = engine.extend_max(seq)?;
//!         let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }])?;
//!         // launch(&plan) here, without waiting for it.
//!         let decodes = len == 1;
//!         assert_eq!(plan.tokens[0] == TokenId::PENDING, decodes);
//!         in_flight.push_back(plan.step());
//!     }
//!     // Wait for the older step only, then tell the engine what it sampled.
//!     let step = in_flight.pop_front().expect("two are in flight");
//!     let token = sampled.next().expect("it stops before");
//!     engine.append(seq, &[token])?;
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//!     if token == STOP {
//!         break;
//!     }
//! }
//! assert_eq!(engine.token_count(seq)?, 14);
//! engine.finish(seq)?; // while a step with it is in flight
//! assert_eq!(engine.stats().fenced_pages, 1); // the device may still write there
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
//! `EngineConfig::max_steps` says how many steps may be in flight.
//!
//! Not here: events that tell when a step is done ([`gpu`](super::gpu)).
