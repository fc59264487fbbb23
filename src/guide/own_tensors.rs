//! An engine over the host's own tensors and kernels: everything except the bytes.
//!
//! An [`Engine<Outbox>`](crate::Outbox) admits, allocates, plans, shares, evicts, forks and preempts. The host stores K
//! and V and computes attention in its own memory. It reads each step's slots and page tables from the plan and the
//! engine, and does the few copies itself that the engine orders: they wait in the outbox as data.
//!
//! Two fields of the config matter without bytes: [`page_size`](crate::PoolConfig::page_size) and
//! [`capacity`](crate::PoolConfig::capacity) in pages. `layers`, `shape` and `dtype` size only the bytes, except that a
//! model with windows or chunks also needs [`groups`](crate::PoolConfig::groups).
//!
//! ```
//! use kvarena::backend::Moved;
//! use kvarena::plan::SlotMapping;
//! use kvarena::*;
//!
//! /// The host's memory. Here K and V of a token are the token itself.
//! struct Tensors {
//!     pool: Vec<u32>,
//!     swap: Vec<u32>,
//! }
//!
//! impl Tensors {
//!     /// Does the work that waits in the outbox.
//!     fn work(&mut self, outbox: &mut Outbox) {
//!         let Self { pool, swap } = self;
//!         let page = |page: usize| 4 * page..4 * page + 4;
//!         let mut moved = Moved::default();
//!         outbox.drain(|work| match work {
//!             // From `fork`: the partly filled last page.
//!             Work::Copy(copies) => for copy in copies {
//!                 pool.copy_within(page(copy.source.index()), 4 * copy.target.index());
//!             },
//!             // From `accept`: one branch of a draft tree becomes contiguous.
//!             Work::Slots(_track, slots) => for slot in slots {
//!                 pool[slot.target.index()] = pool[slot.source.index()];
//!             },
//!             Work::Save(id, moves) => {
//!                 for of in moves {
//!                     swap[page(of.swap.index())].copy_from_slice(&pool[page(of.device.index())]);
//!                 }
//!                 moved.saved = id;
//!             }
//!             Work::Load(id, moves) => {
//!                 for of in moves {
//!                     pool[page(of.device.index())].copy_from_slice(&swap[page(of.swap.index())]);
//!                 }
//!                 moved.loaded = id;
//!             }
//!         });
//!         // These copies are done. A host with a GPU reports them once an event after them has fired.
//!         outbox.saved(moved.saved);
//!         outbox.loaded(moved.loaded);
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(6), swap_pages: 8, ..Default::default() };
//! // Page 0 is the null block of padded tables. The kernels read slots of 64 bits.
//! let config = EngineConfig { reserved_pages: 1, wide_slots: true, ..pool.into() };
//! let mut engine = Engine::new(config, OutboxOptions)?;
//! let mut scratch = StepScratch::new();
//! let mut tensors = Tensors { pool: vec![0; 6 * 4], swap: vec![0; 8 * 4] };
//!
//! for first in [100, 200, 100] {
//!     let prompt: Vec<u32> = (first..first + 10).collect();
//!     // Promise the prompt, so that admissions count the pages that its plans will take.
//!     let promise = prompt.len() as u32;
//!     let seq = engine.admit(Namespace::default(), TokenId::from_raw(&prompt), promise)?;
//!     let mut running = vec![seq];
//!     for round in 0..6 {
//!         let mut items = Vec::new();
//!         for &seq in &running {
//!             items.push(Extend { seq, len: engine.extend_max(seq)? });
//!         }
//!         let plan = engine.plan_batch(&mut scratch, &items)?;
//!         let (step, longest) = (plan.step(), plan.rows.iter().map(|row| row.kv_len).max());
//!         let SlotMapping::I64(slots) = plan.slot_mapping else { panic!("the config asks for 64 bits") };
//!         tensors.work(engine.backend_mut()); // before the step
//!         // The model's step: store K and V, then read them through a dense table.
//!         slots.iter().zip(plan.tokens).for_each(|(&slot, token)| tensors.pool[slot as usize] = token.raw());
//!         let width = longest.map_or(0, |len| len.div_ceil(4) as usize);
//!         let mut tables = vec![0; running.len() * width];
//!         engine.write_tables(&running, 0, width, 0, &mut tables)?;
//!         for (&seq, table) in running.iter().zip(tables.chunks_exact(width)) {
//!             for (position, token) in engine.tokens(seq)?.enumerate() {
//!                 assert_eq!(tensors.pool[4 * table[position / 4] as usize + position % 4], token.raw());
//!             }
//!         }
//!         for (i, &seq) in running.iter().enumerate() {
//!             // Every row here ends its prompt: see `has_sample`.
//!             engine.append(seq, &[TokenId::new(10 * round + i as u32)])?;
//!         }
//!         engine.commit(step)?; // whole pages may be shared from now on
//!         engine.complete(step)?; // once the device is done
//!         if round == 1 {
//!             let forked = engine.fork(seq, 1, 0)?;
//!             running.extend(forked.children);
//!             if let Some(step) = forked.step {
//!                 engine.complete(step)?; // its copies wait in the outbox, before all later steps
//!             }
//!         }
//!     }
//!     running.into_iter().try_for_each(|seq| engine.finish(seq))?;
//! }
//! // The second prompt evicted the first one, and the third loaded it again.
//! assert_eq!((engine.stats().forks, engine.stats().loaded_pages), (3, 2));
//! # Ok(())
//! # }
//! ```
//!
//! In the repository, `examples/adopt` has a block manager in vLLM's form over this engine, with a scheduler that
//! serves chats. It also has a prefix cache in SGLang's form over a [`Tree`](crate::tree::Tree). Run it by
//! `cargo run --release --example adopt`.
//!
//! # The outbox
//!
//! [`drain`](crate::Outbox::drain) passes all waiting [`Work`](crate::Work) in order. Do it before the launch of the
//! last plan's step, on the same stream. A plan fails with [`Undrained`](crate::backend::OutboxError::Undrained) while
//! work of an earlier plan waits, so a forgotten drain is an error, not wrong bytes. Each piece has a byte form
//! ([`to_bytes`](crate::Work::to_bytes)) for workers in other processes.
//!
//! The outbox keeps the order, so its work counts as enqueued. The host may therefore complete the step of a fork's
//! copies at once, before the drain.
//!
//! # Reports of saves and loads
//!
//! By [`saved`](crate::Outbox::saved) and [`loaded`](crate::Outbox::loaded) the host reports that the device has done
//! all saves or all loads up to an id. On a stream, this is the case once an event after the copy has fired. Reports
//! have no deadline, because plans never wait for them. Three calls use them:
//!
//! * [`is_loading`](crate::Engine::is_loading) returns true for a sequence until its last load is reported.
//! * [`puts`](crate::Engine::puts) passes a page to a store only after the save to its swap page is reported.
//! * [`fetch`](crate::Engine::fetch) takes only swap pages whose saves and loads are all reported.
//!
//! # A stream for saves and loads
//!
//! A host may do saves and loads on a second stream, in the order of the outbox. The two streams then wait for each
//! other by rules B12 and B13 of [`Backend`](crate::Backend):
//!
//! * A save waits for all earlier steps, copies and slot moves. It reads what they wrote. All later ones wait for the
//!   save, because they may overwrite its source.
//! * A load follows all earlier saves. It waits for earlier copies and slot moves, and for the steps that are complete.
//!   It may overlap steps that are still open, which never use its targets. All later steps, copies and slot moves wait
//!   for the load.
//!
//! # Without an outbox
//!
//! A host that has no copies to make, because it neither forks nor drafts nor swaps, may use
//! [`Null`](crate::Null). `Null` drops work silently.
//!
//! # From other engines
//!
//! | vLLM v1, mistral.rs | here |
//! |---|---|
//! | `get_computed_blocks(request)` | [`admit`](crate::Engine::admit) uses the hit; [`match_prefix`](crate::Engine::match_prefix) only looks |
//! | `allocate_slots(request, n)` of a new request | `admit` with a promise of n tokens: it reserves pages, and plans take them |
//! | `allocate_slots(request, n)` of a running one | [`plan_batch`](crate::Engine::plan_batch) takes what lacks; [`promise`](crate::Engine::promise) reserves more |
//! | `None`, then preempt | [`OutOfPages`](crate::Error::OutOfPages), then [`preempt`](crate::Engine::preempt) and [`resume`](crate::Engine::resume) |
//! | one `allocate_slots` for each request | a plan takes the pages of all its items or of none; after an error, plan fewer |
//! | `num_lookahead_tokens` | [`append`](crate::Engine::append) the drafts; [`plan_drafts`](crate::Engine::plan_drafts) takes their pages |
//! | `get_num_common_prefix_blocks` | the plan's [`shared`](crate::BatchPlan::shared) spans |
//! | `get_block_ids`, `append_row` | [`write_tables`](crate::Engine::write_tables), [`page_runs`](crate::Engine::page_runs) |
//! | `cache_blocks` | [`commit`](crate::Engine::commit) |
//! | `free(request)` | [`finish`](crate::Engine::finish) |
//! | `touch(blocks)`, `ref_cnt` | nothing to call: admitted sequences lock their prefix |
//! | `get_num_free_blocks` | [`available`](crate::Engine::available): free, or cached and not in use |
//! | `usage` | [`stats`](crate::Engine::stats): free, private and cached pages |
//! | `take_events` | [`drain_events`](crate::Engine::drain_events) |
//! | KV connector | [`puts`](crate::Engine::puts) and [`fetch`](crate::Engine::fetch) |
//! | `reset_prefix_cache` | [`reset`](crate::Engine::reset), at any time |
//! | block 0, the null block | [`reserved_pages`](crate::EngineConfig::reserved_pages) |
//! | `max_cache_hit_length` | [`Admit::at_most`](crate::Admit::at_most) |
//! | `lora_request`, `cache_salt` | [`Namespace`](crate::Namespace) |
//!
//! | SGLang, mini-sglang | here, on the engine | on a [`Tree`](crate::tree::Tree) |
//! |---|---|---|
//! | `match_prefix(key)` | part of `admit` | [`match_prefix`](crate::tree::Tree::match_prefix) |
//! | `insert_prefix`, `cache_finished_req` | `commit`, `finish` | [`insert`](crate::tree::Tree::insert), [`extend`](crate::tree::Tree::extend) |
//! | `inc_lock_ref`, `lock_handle` | part of `admit` | [`lock`](crate::tree::Tree::lock) |
//! | `dec_lock_ref` | part of `finish` | [`unlock`](crate::tree::Tree::unlock) |
//! | `evict(n)` | part of `plan_batch` | [`evict`](crate::tree::Tree::evict) |
//! | `evictable_size`, `size_info` | [`stats`](crate::Engine::stats) | [`size`](crate::tree::Tree::size) |
//! | `req_to_token_pool` | `write_tables` | the host's |
//! | `retract_decode` | `preempt` | the host's |
//!
//! | nano-vllm | here |
//! |---|---|
//! | `BlockManager.can_allocate`, `allocate` | [`admission`](crate::Engine::admission), `admit` |
//! | `can_append`, `may_append`, `append` | `plan_batch` |
//! | `deallocate` | `finish`, or `preempt` |
//! | `block_table`, `slot_mapping` | `write_tables`, the plan's [`slot_mapping`](crate::BatchPlan::slot_mapping) |
//!
//! Rules of these engines that have no call here: nothing evicts ahead of need, no watermark is kept free, and a page
//! is published only after the step that computes it.
