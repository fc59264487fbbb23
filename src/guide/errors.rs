//! What to do after each error.
//!
//! An error leaves the engine as it was before the call, unless the method says more. So the host may do something
//! else and go on; nothing has to be cleaned up.
//!
//! An [`EngineError`](crate::EngineError) says who refused:
//!
//! * `Config`: the numbers make no pool, or the host does not give so much memory. Change the value that it names.
//! * `Core`, where `is_shortage()` holds: pages, rows, tokens or steps are taken. Wait for a step, preempt somebody, or
//!   put the request back.
//! * `Core`, else: a request that never fits is refused; all others are mistakes of the host.
//! * `Backend`, from `Engine::new`: the device has no memory for the pool. A smaller `Capacity`, or another backend.
//! * `Backend`, from `plan_batch`: the device refused the plan; the step is aborted already. Plan again, or as below.
//!
//! A backend's own calls fail in two ways:
//!
//! * `store_cache`, `attend`: the step failed halfway. `abort` it, and with it all that were planned after; plan again.
//! * `synchronize`, or an event: a launch that was accepted failed later, and as a rule the device with it. What ran is
//!   finished with `finish_with(seq, Keep::Drop)`, so that nobody finds it in the cache; then a new backend.
//!
//! Of [`Error`](enum@crate::Error), one by one:
//!
//! | error | do |
//! |---|---|
//! | `OutOfPages { after: Some(step), .. }` | complete that step, then try again |
//! | `OutOfPages { after: None, .. }` | preempt or finish a sequence; if there is no other, the pool is too small |
//! | `OutOfSequences`, `OutOfTokens` | wait until a sequence ends; preempted ones keep row and tokens |
//! | `OutOfSteps` | commit and complete what is in flight |
//! | `EmptyPrompt`, `PendingToken`, `TooLong` | refuse the request: it will never fit |
//! | `UnnamedNamespace` | `name_namespace` it first: hashes tell namespaces apart by names |
//! | `NamespaceNamed`, `NamesTaken` | namespaces share no names: forget one, and wait until its pages are evicted |
//! | `ExtendLen { max: 0, .. }` | the sequence has nothing to compute: append first |
//! | `RollbackLen` | fork before drafting so far, or finish and admit again |
//! | `StepTokens`, `PackedLimit` | a smaller batch |
//! | `PackedRows` | give the plan of these items, and all of them |
//! | `PackedTree` | drafts in a chain, or the backend's own attention |
//! | `UnknownStep`, `StepOrder`, `StepOpen` | commit in the order of plans, and complete after it |
//! | `NotAccepted` | accept a branch of the drafts, or abort the step; then do it again |
//! | `DraftLen`, `DraftParent`, `DraftOrder`, `DraftArrays`, `DraftMask`, `DraftPosition` | mend the drafter |
//! | `NotDrafted`, `NotABranch` | mend the verifier: keep a root, then what follows it |
//! | `UnknownSequence`, `Preempted`, `NotPreempted` | mend the scheduler: it has lost track of a request |
//! | `EmptyBatch`, `RepeatedSequence`, `NotPlanned` | mend the scheduler: its batch is wrong, or out of order |
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
//! // Both together need 6 pages of 4. Nothing has changed, so the first may go on alone.
//! let both = [Extend { seq: first, len: 12 }, Extend { seq: second, len: 12 }];
//! let error = engine.plan_batch(&mut scratch, &both).expect_err("they do not fit");
//! assert!(matches!(&error, EngineError::Core(error) if error.is_shortage()));
//! let text = "the engine rejected the call: 6 pages needed, 4 available";
//! assert_eq!(format!("{error:#}"), text);
//! let step = engine.plan_batch(&mut scratch, &both[..1])?.step();
//!
//! // The device fails halfway: the step is undone, and planned again.
//! engine.abort(step)?;
//! engine.complete(step)?; // once the device touches its pages no more
//! assert_eq!(engine.planned_len(first)?, 0);
//! let again = engine.plan_batch(&mut scratch, &both[..1])?.step();
//! engine.commit(again)?;
//! engine.complete(again)?;
//!
//! // A request that never fits is refused by name.
//! let long = vec![TokenId::new(1); 17];
//! let refused = engine.admit(Namespace::default(), &long, 0);
//! assert_eq!(refused, Err(Error::TooLong { len: 17, max: 16 }));
//! engine.verify()?;
//! # Ok(())
//! # }
//! ```
//!
//! A panic is a broken invariant of this crate, never a host's mistake that a call could answer.
//!
//! Not here: the errors of one backend ([`CpuError`](crate::backend::CpuError), `CudaError`).
