//! Tensor-parallel ranks: one engine plans, and each worker has a backend with its share of the heads.
//!
//! Page numbers, slots and page tables are the same on every rank; only the bytes differ. A rank therefore needs no
//! engine. It opens its backend with the engine's limits, [`EngineShape`](crate::config::EngineShape), which every rank
//! shares. Then it receives these messages, in the engine's order:
//!
//! * each plan ([`OwnedPlan`](crate::plan::OwnedPlan)),
//! * each end of steps ([`StepEnd`](crate::plan::StepEnd)),
//! * the copies of a fork ([`PageCopy`](crate::plan::PageCopy)),
//! * the compactions of an accept ([`Compaction`](crate::plan::Compaction)).
//!
//! Each message has a byte form whose first 8 bytes identify it.
//!
//! If the pool has swap pages, each rank also needs the engine's saves and loads. They have a byte form only as
//! [`Work`](crate::Work::to_bytes), from an [`Outbox`](crate::Outbox). `crates/host` implements one
//! [`Backend`](crate::Backend) over all ranks, which forwards them. Its leases of
//! [`SwapMemory`](crate::backend::SwapMemory) are lists: a swap page has a part on each rank. `crates/tiers` stores
//! each part as a record of its own.
//!
//! ```
//! use std::sync::mpsc;
//! use std::thread;
//!
//! use kvarena::*;
//! use kvarena::backend::OpenBackend;
//! use kvarena::config::EngineShape;
//! use kvarena::plan::{OwnedPlan, PageCopy, StepEnd};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The model has two heads of K and V; each of two ranks holds one.
//! let pool = PoolConfig { shape: KvShape::heads(2, 4), tp_size: 2, ..Default::default() };
//! let mut engine = Engine::new(pool, Null)?; // the scheduler's engine, for one rank's share, without bytes
//!
//! // A worker: after the shape, each message is a plan, an end of steps, or the copies of a fork.
//! let worker = |rank: u32, messages: mpsc::Receiver<Vec<u8>>| {
//!     let shape = messages.recv().expect("the scheduler sends its shape first");
//!     let shape = EngineShape::from_bytes(&shape).expect("the bytes are a shape");
//!     let (layout, table, bounds) = (&shape.layout, &shape.table, shape.step_bounds());
//!     let mut backend = CpuOptions::default().open(layout, table, bounds).expect("enough memory");
//!     let mut sum = 0.0;
//!     for bytes in messages {
//!         if let Ok(end) = StepEnd::from_bytes(&bytes) {
//!             backend.end(end);
//!             continue;
//!         }
//!         if let Ok(copies) = PageCopy::list_from_bytes(&bytes) {
//!             backend.copy_pages(&copies).expect("the pages exist");
//!             continue;
//!         }
//!         let plan = OwnedPlan::from_bytes(&bytes).expect("everything else is a plan");
//!         let plan = plan.plan();
//!         backend.begin(&plan).expect("plans come in order");
//!         // The rank's part of the model: K, V and queries of its own heads.
//!         let rows = vec![1.0 + rank as f32; plan.token_count() * 4];
//!         let mut out = vec![0.0; plan.token_count() * 4];
//!         let (layer, attend) = (LayerId::new(0), Attend::new(1, 4));
//!         backend.store_cache(&plan, layer, rows[..].into(), rows[..].into()).expect("rows fit");
//!         backend.attend(&plan, layer, &attend, rows[..].into(), (&mut out[..]).into(), None).expect("rows fit");
//!         sum += out.iter().sum::<f32>();
//!     }
//!     sum
//! };
//! let (senders, workers): (Vec<_>, Vec<_>) = (0..2)
//!     .map(|rank| {
//!         let (send, receive) = mpsc::channel();
//!         (send, thread::spawn(move || worker(rank, receive)))
//!     })
//!     .unzip();
//! let broadcast = |bytes: &[u8]| senders.iter().for_each(|send| send.send(bytes.to_vec()).expect("workers live"));
//!
//! broadcast(&engine.shape().to_bytes());
//! let prompt: Vec<TokenId> = (0..5).map(TokenId::new).collect();
//! let seq = engine.admit(Namespace::default(), &prompt, 0)?;
//! let (mut scratch, mut owned) = (StepScratch::new(), OwnedPlan::new());
//! let mut compute = |engine: &mut Engine<Null>, seq, token| -> Result<(), Box<dyn std::error::Error>> {
//!     let len = engine.extend_max(seq)?;
//!     owned.copy_from(&engine.plan_batch(&mut scratch, &[Extend { seq, len }])?);
//!     broadcast(owned.as_bytes());
//!     let step = owned.plan().step();
//!     engine.append(seq, &[TokenId::new(token)])?; // from the rank that samples
//!     engine.commit(step)?;
//!     // Call `complete` once every rank is done. Here each channel orders the ends of steps.
//!     engine.complete(step)?;
//!     broadcast(&StepEnd::Complete(step).to_bytes());
//!     Ok(())
//! };
//! for token in 5..8 {
//!     compute(&mut engine, seq, token)?;
//! }
//! let forked = engine.fork(seq, 1, 0)?;
//! broadcast(&PageCopy::list_to_bytes(forked.copies));
//! let (child, copied) = (forked.children[0], forked.step.expect("the first page is copied"));
//! engine.complete(copied)?;
//! broadcast(&StepEnd::Complete(copied).to_bytes());
//! compute(&mut engine, child, 8)?;
//! drop(senders);
//! let sums: Vec<f32> = workers.into_iter().map(|worker| worker.join().expect("no panic")).collect();
//! assert_eq!(sums, [8.0 * 4.0, 8.0 * 4.0 * 2.0]); // 8 rows of 4 numbers; each is a mean of equal values
//! # Ok(())
//! # }
//! ```
//!
//! # The byte form of a plan
//!
//! All numbers are little-endian. `u` is unsigned, `i` is two's complement. The header has 72 bytes:
//!
//! | bytes | type | field |
//! |---|---|---|
//! | 0 to 7 | | the ASCII letters `kvplan03`; the digits are the version |
//! | 8 to 15 | u64 | `step`, from 1 on, rising |
//! | 16 to 23 | u64 | `rows`: sequences, padding included |
//! | 24 to 31 | u64 | `tokens`: new tokens of all sequences, padding included |
//! | 32 to 39 | u64 | `table_writes`: changed words of the page tables |
//! | 40 to 47 | u64 | `slot_bytes`: 4, or 8 for pools of more than 2^31 slots, plus 2^32 * (tracks - 1) |
//! | 48 to 55 | u64 | `spans`: spans of positions that several rows read from the same pages |
//! | 56 to 63 | u64 | `members`: rows that are in spans |
//! | 64 to 71 | u64 | `masks`: 0, or `tokens` if some row is a tree of drafts |
//!
//! Nine arrays follow in this order. Zeros pad each to a multiple of 8 bytes, and nothing follows the last one:
//!
//! | array | element | meaning |
//! |---|---|---|
//! | rows | 4 x u32 | [`BatchRow`](crate::plan::BatchRow): `row`, `qo_start`, `extend_len`, `kv_len` |
//! | tokens | u32 | token; 2^32 - 1 if it is not sampled yet |
//! | positions | u32 | position in its sequence |
//! | slot_mapping | i32 or i64 | slot of K and V: `page * page_size + offset`; negative: write nothing |
//! | table_writes | 2 x u32 | [`TableWrite`](crate::plan::TableWrite): `index`, `value`: `words[index] = value` |
//! | spans | 4 x u32 | [`SharedSpan`](crate::plan::SharedSpan): `member_start`, `member_count`, `begin`, `end` |
//! | members | u32 | index of a row in the batch |
//! | masks | u64 | bit `i`: a tree's token sees slot `last - i` ([more](crate::BatchPlan::masks)); 0: no tree |
//! | track_slots | i32 or i64 | `[tracks - 1, tokens]`: like slot_mapping, for the layers of each further track |
//!
//! The `qo_start` of a row is the sum of `extend_len` of the rows before it. All `extend_len` add up to `tokens`.
//!
//! A worker in another language also needs [`StepEnd::to_bytes`](crate::plan::StepEnd::to_bytes),
//! [`EngineShape::to_bytes`](crate::config::EngineShape::to_bytes),
//! [`PageCopy::list_to_bytes`](crate::plan::PageCopy::list_to_bytes),
//! [`Compaction::list_to_bytes`](crate::plan::Compaction::list_to_bytes) and [`TableShape`](crate::layout::TableShape).
//! This script reads plans; a test compares its output with the plans:
//!
//! ```python
#![doc = include_str!("read_plan.py")]
//! ```
//!
//! The host transports the bytes between its processes.
