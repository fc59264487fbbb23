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
//! use kvarena::plan::{PageCopy, SlotMapping};
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(33), ..Default::default() };
//! // Page 0 is the null block of padded tables. The kernels read slots of 64 bits.
//! let config = EngineConfig { reserved_pages: 1, wide_slots: true, ..pool.into() };
//! let mut engine = Engine::new(config, OutboxOptions)?;
//! let mut scratch = StepScratch::new();
//! let mut tensor = vec![0_u32; 33 * 4]; // the host's K and V: here the token that each slot belongs to
//!
//! let prompt: Vec<TokenId> = (100..110).map(TokenId::new).collect();
//! // Promise the prompt, so that admissions count the pages that its plans will take.
//! let admit = Admit { promise: prompt.len() as u32, ..Default::default() };
//! let seq = engine.admit(Namespace::default(), &prompt, admit)?;
//! let mut running = vec![seq];
//! for round in 0..6 {
//!     let mut items = Vec::new();
//!     for &seq in &running {
//!         items.push(Extend { seq, len: engine.extend_max(seq)? });
//!     }
//!     let plan = engine.plan_batch(&mut scratch, &items)?;
//!     let (step, longest) = (plan.step(), plan.rows.iter().map(|row| row.kv_len).max());
//!     let SlotMapping::I64(slots) = plan.slot_mapping else { panic!("the config asks for 64 bits") };
//!     // What the outbox holds comes before the step: copies of a fork, moves of accepted drafts, saves and loads.
//!     engine.backend_mut().drain(|work| match work {
//!         Work::Copy(copies) => for &PageCopy { source, target } in copies {
//!             let (source, target) = (4 * source.raw() as usize, 4 * target.raw() as usize);
//!             tensor.copy_within(source..source + 4, target);
//!         },
//!         other => panic!("drafts and swap memory are not used here: {other:?}"),
//!     });
//!     // The model's step: store K and V, then read them through a dense table.
//!     slots.iter().zip(plan.tokens).for_each(|(&slot, token)| tensor[slot as usize] = token.raw());
//!     let width = longest.map_or(0, |len| len.div_ceil(4) as usize);
//!     let mut tables = vec![0; items.len() * width];
//!     engine.write_tables(&running, 0, width, 0, &mut tables)?;
//!     for (&seq, table) in running.iter().zip(tables.chunks_exact(width)) {
//!         for (position, token) in engine.tokens(seq)?.enumerate() {
//!             assert_eq!(tensor[4 * table[position / 4] as usize + position % 4], token.raw());
//!         }
//!     }
//!     for (i, &seq) in running.iter().enumerate() {
//!         engine.append(seq, &[TokenId::new(10 * round + i as u32)])?; // every row here ends its prompt: `has_sample`
//!     }
//!     engine.commit(step)?; // whole pages may be shared from now on
//!     engine.complete(step)?; // once the device is done
//!     if round == 2 {
//!         let forked = engine.fork(seq, 1, 0)?; // the partly filled last page is copied
//!         running.extend(forked.children);
//!         if let Some(step) = forked.step {
//!             engine.complete(step)?;
//!         }
//!     }
//! }
//! running.into_iter().try_for_each(|seq| engine.finish(seq))?;
//! assert_eq!(engine.match_prefix(Namespace::default(), &prompt).pages(), 2);
//! # Ok(())
//! # }
//! ```
//!
//! # The outbox
//!
//! [`drain`](crate::Outbox::drain) passes all waiting [`Work`](crate::Work) in order. Do it before the launch of the
//! last plan's step, on the same stream. A plan fails with [`Undrained`](crate::backend::OutboxError::Undrained) while
//! work of an earlier plan waits, so a forgotten drain is an error, not wrong bytes. Each piece has a byte form
//! ([`to_bytes`](crate::Work::to_bytes)) for workers in other processes. With swap memory, report finished moves by
//! [`saved`](crate::Outbox::saved) and [`loaded`](crate::Outbox::loaded).
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
//! | `get_block_ids`, `append_row` | [`write_tables`](crate::Engine::write_tables), [`page_runs`](crate::Engine::page_runs) |
//! | `cache_blocks` | [`commit`](crate::Engine::commit) |
//! | `free(request)` | [`finish`](crate::Engine::finish) |
//! | `touch(blocks)`, `ref_cnt` | nothing to call: admitted sequences lock their prefix |
//! | `get_num_free_blocks` | [`available`](crate::Engine::available): free, or cached and not in use |
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
