//! The host's action after each error.
//!
//! An error leaves the state unchanged, unless the method documents otherwise. The host continues without cleanup.
//!
//! The variant of an [`EngineError`](crate::EngineError) names its source:
//!
//! * `Config`: the config is invalid, or the host lacks the memory. Change the value that the error names, or reduce
//!   the limits.
//! * `Core`, if [`is_shortage()`](crate::EngineError::is_shortage) returns true: pages, rows, tokens or steps are in
//!   use. Wait for a step, preempt a sequence, or requeue the request.
//! * Any other `Core`: the request is invalid or never fits, so reject it; or the host made a mistake (table below).
//! * `Backend`, from `Engine::new`: the backend does not support the pool, or the device lacks memory for it. Use a
//!   smaller `Capacity` or another backend.
//! * `Backend`, from `plan_batch`: the backend rejected the plan, and the engine has aborted the step. If a load of
//!   swap pages failed instead, there is no step. Plan again, or treat the error as a failed call (below).
//!
//! A backend's own calls fail in two ways:
//!
//! * `store_cache`, `attend`: the step failed partway. `abort` undoes it and all later steps. Then plan again.
//! * `synchronize`, or an event: an accepted launch failed later, and usually the device with it. End the running
//!   sequences with `finish_with(seq, Keep::Drop)`, so no prompt matches their pages. Then open a new backend.
//!
//! The action for each [`Error`](enum@crate::Error), and for a forgotten drain of an [`Outbox`](crate::Outbox):
//!
//! | error | action |
//! |---|---|
//! | `OutOfPages { after: Some(step), .. }` | complete that step, then try again |
//! | `OutOfPages { after: None, .. }` | preempt or finish a sequence; if no other runs, the pool is too small |
//! | `OutOfSequences`, `OutOfTokens` | wait until a sequence ends; preempted sequences keep rows and tokens |
//! | `OutOfSteps` | commit and complete the steps in flight |
//! | `EmptyPrompt`, `PendingToken` | reject the request: it is invalid |
//! | `TooLong` | reject the request: it never fits; from `append`, finish it at its present length |
//! | `UnnamedNamespace` | call `name_namespace` first: hashes include the names of a namespace |
//! | `NamespaceNamed`, `NamesTaken` | names belong to one namespace: forget it, and wait until its pages are evicted |
//! | `ExtendLen { max: 0, .. }` | the sequence has nothing to compute: append first |
//! | other `ExtendLen` | plan 1 to `max` tokens of the sequence |
//! | `RollbackLen` | fork before drafting that far, or finish and admit again |
//! | `MarkLen` | mark a prompt before it is published that far |
//! | `OutOfMarks` | mark again once the sequence has reached one of its marks |
//! | `CrossesMark` | take the length from `next_len` |
//! | `StateLost` | preempt and resume the sequence |
//! | `StateAhead` | commit the parent's steps and append their tokens, then fork; or admit the tokens as a prompt |
//! | `StateDraft` | plan without drafts: layers keep a state |
//! | `StepTokens`, `PackedLimit` | plan a smaller batch; a pool above 2^31 pages cannot be packed |
//! | `PackedRows` | pass the whole plan of these items |
//! | `PackedTree` | draft in chains, or use the backend's own attention |
//! | `UnknownStep`, `StepOrder`, `StepOpen` | commit in the order of plans, and complete a step after its commit |
//! | `NotAccepted` | accept a branch of the drafts or abort the step, then repeat the call |
//! | `DraftLen`, `DraftParent`, `DraftOrder`, `DraftArrays`, `DraftMask`, `DraftPosition` | fix the drafter |
//! | `NotDrafted`, `NotABranch` | fix the verifier: a branch is a root and tokens that follow it |
//! | `UnknownSequence`, `Preempted`, `NotPreempted` | fix the scheduler: it has lost track of a request |
//! | `EmptyBatch`, `RepeatedSequence`, `NotPlanned` | fix the scheduler: its batch is wrong or out of order |
//! | `PlanSize` | choose a size that holds the batch and a token for each row of padding |
//! | `Undrained` | `drain`, do the work, plan again; the aborted step counts until a `complete` |
//!
//! To avoid `TooLong` in the middle of an output, check a request when it arrives: its prompt and its maximum output
//! together have at most `engine.shape().max_sequence_len` tokens.
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = PoolConfig { page_size: 4, capacity: Capacity::Pages(4), ..Default::default() };
//! let mut engine = Engine::new(config, Null)?;
//! let mut scratch = StepScratch::new();
//! let prompt: Vec<TokenId> = (0..12).map(TokenId::new).collect();
//! let first = engine.admit(Namespace::default(), &prompt, 0)?;
//! let other: Vec<TokenId> = (100..112).map(TokenId::new).collect();
//! let second = engine.admit(Namespace::default(), &other, 0)?;
//!
//! // Both together need 6 pages of 4. The rejected call changed nothing, so the first may continue alone.
//! let both = [Extend { seq: first, len: 12 }, Extend { seq: second, len: 12 }];
//! let error = engine.plan_batch(&mut scratch, &both).expect_err("they do not fit");
//! assert!(error.is_shortage());
//! let text = "the engine rejected the call: 6 pages needed, 4 available";
//! assert_eq!(error.to_string(), text);
//! let step = engine.plan_batch(&mut scratch, &both[..1])?.step();
//!
//! // The device fails partway: the host undoes the step and plans again.
//! engine.abort(step)?;
//! engine.complete(step)?; // once the device no longer accesses its pages
//! assert_eq!(engine.planned_len(first)?, 0);
//! let again = engine.plan_batch(&mut scratch, &both[..1])?.step();
//! engine.commit(again)?;
//! engine.complete(again)?;
//!
//! // The error names the limit that the request exceeds.
//! let long = vec![TokenId::new(1); 17];
//! let refused = engine.admit(Namespace::default(), &long, 0);
//! assert_eq!(refused, Err(Error::TooLong { len: 17, max: 16 }));
//! engine.verify()?;
//! # Ok(())
//! # }
//! ```
//!
//! A panic means that the crate broke an invariant, or that the host broke a condition in the method's section
//! `# Panics`.
//!
//! `CpuError`, `CudaError` and [`OutboxError`](crate::backend::OutboxError) document the errors of each backend.
