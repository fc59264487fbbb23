//! Models whose layers keep a state: Qwen3-Next, Qwen3.5, Kimi Linear, Nemotron, Granite 4, Falcon-H1, Jamba, LFM2.
//!
//! Layers such as Gated DeltaNet, Mamba or short convolutions keep a state of fixed size instead of K and V. It stands
//! for all tokens so far. It cannot be cut, so a prompt can use a cached prefix only where a state was cached.
//!
//! # Layout
//!
//! A state lies in pages of the pool: a page holds the state of one layer or of several, and the states of all layers
//! of a sequence take `R` pages. So the least page size depends on the state. [`PoolConfig::state_page_size`] returns
//! it, and `PoolConfig::from_hf` (feature `serde`) reads states and page size from the `config.json` of these families.
//! The element types and the order within a part are the host's. f32 states, one rank, pages in multiples of 16 tokens:
//!
//! | model | layers: K, V + state | bytes of a layer's state | page size | R | a state in tokens of K, V |
//! |---|---|---|---|---|---|
//! | Qwen3-Next 80B | 12 + 36 | 2,146,304 | 96 | 36 | 3,144 |
//! | Qwen3.5 9B | 8 + 24 | 2,146,304 | 80 | 24 | 1,572 |
//! | Kimi Linear 48B | 7 (latent) + 20 | 2,170,880 | 272 | 20 | 5,384 |
//! | Nemotron 3 Nano | 6 + 23 | 2,134,016 | 352 | 23 | 7,989 |
//! | Granite 4 H-Small | 4 + 36 | 4,244,992 | 272 | 36 | 9,327 |
//! | Falcon-H1 34B | 72 + 72 | 4,225,024 | 32 | 72 | 2,063 |
//! | Jamba 1.5 Mini | 4 + 28 | 573,440 | 48 | 28 | 980 |
//! | LFM2 8B | 6 + 18 | 8,192 | 16 | 1 | 12 |
//!
//! Larger pages than the least waste less of each state only if another lane fits, and match prompts more coarsely. Two
//! ranks share the heads of a state as they share kv heads, so the page size falls. fp8 K and V double it.
//!
//! # Marks
//!
//! The engine caches a state at *marks*. A prompt has up to two: where it parts from cached prompts, and `state_margin`
//! tokens before its end. The next turn of a conversation often changes the last tokens of its prompt, so a state at
//! the very end would be lost. A prompt that caches a later state makes the one that it has read the first to be
//! evicted. A host adds marks for long outputs with [`Engine::mark`].
//!
//! No kernel extracts a state in the middle of an item, so items end at marks: [`Engine::next_len`] returns valid
//! lengths, and [`Error::CrossesMark`] rejects others. A request takes one or two steps more; a larger `state_gap`
//! saves some.
//!
//! ```
//! # use kvarena::*;
//! # use kvarena::layout::{Groups, Reach, StatePart};
//! // Qwen3-Next: every fourth layer computes attention.
//! let layers: Vec<u8> = (1..=48).map(|layer| u8::from(layer % 4 > 0)).collect();
//! let parts = [StatePart { heads: 32, head_bytes: 65_536 }, StatePart { heads: 16, head_bytes: 3_072 }];
//! let groups = Groups::new(&[Reach::All, Reach::State], &layers)?.with_state(1, &parts)?;
//! let (shape, dtype, capacity) = (KvShape::heads(2, 256), KvDtype::Bf16, Capacity::Pages(1000));
//! let pool = PoolConfig { layers: 48, groups, shape, dtype, capacity, ..PoolConfig::default() };
//! let pool = PoolConfig { page_size: pool.state_page_size(16)?, ..pool };
//! let mut engine = Engine::new(pool, Null)?;
//! let mut scratch = StepScratch::new();
//!
//! let mut turn = |prompt: &[TokenId]| -> Result<(u32, Vec<u32>), Box<dyn std::error::Error>> {
//!     let seq = engine.admit(Namespace::default(), prompt, prompt.len() as u32)?;
//!     let hit = engine.cached_len(seq)?;
//!     let mut lens = Vec::new();
//!     while engine.planned_len(seq)? < prompt.len() as u32 {
//!         let len = engine.next_len(seq, 2048)?;
//!         let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }])?;
//!         // For each layer: attention, or the kernel of its state. See `Engine::packed_states`, `Cpu::state`.
//!         let step = plan.step;
//!         engine.commit(step)?;
//!         engine.complete(step)?;
//!         lens.push(len);
//!     }
//!     engine.finish(seq)?;
//!     Ok((hit, lens))
//! };
//! let first: Vec<TokenId> = (0..1000).map(TokenId::new).collect();
//! // The state is cached behind 9 pages of 96 tokens, the last ones before 1000 - 1 - 128.
//! assert_eq!(turn(&first)?, (0, vec![864, 136]));
//! let second: Vec<TokenId> = (0..1300).map(TokenId::new).collect();
//! assert_eq!(turn(&second)?, (864, vec![288, 148]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Kernels
//!
//! [`Engine::packed_states`] gives the pages that each row reads and writes, which are the slots of FlashInfer's,
//! flash-linear-attention's and causal_conv1d's kernels. A row that reads and writes the same pages updates its state
//! in place. A row that reads others reads a cached state, which must not change: kernels with separate read and write
//! slots use both; before a kernel that works in place, [`StateBackend::copy_states`] copies. New sequences read page
//! 0, which no sequence gets and which stays zero.
//!
//! A host with the crate's backends takes the states from them, for any open step. `Cpu::state` returns the bytes of a
//! row. `Cuda::slots` returns the device addresses of a layer's states, of the pages to read and to write, and of the
//! rows' first tokens. Steps with the same graph key have the same addresses, so a graph may contain launches of such
//! kernels. `copy_states` is not for captures, because a replay would copy the same pages again.
//!
//! # Failures
//!
//! An abort of an item that updated a state in place loses the state, and so does a rollback of planned tokens
//! ([`Engine::is_state_lost`]). Plans then fail with [`Error::StateLost`]. Preempt and resume the sequence: it
//! computes the tokens after its last cached state again. After an abort, until it has computed as many new tokens as
//! it lost, its items read one state and write another, with pages that no promise covers. So an abort restores the
//! state of the last committed step, and a sequence advances however often steps fail, if a host plans at most one
//! step ahead and the pool has pages for two more states.
//!
//! Drafts are not supported with states ([`Error::StateDraft`]). A fork needs a parent whose planned tokens are
//! committed and known ([`Error::StateAhead`]); it copies a state that is no cell.
//!
//! [`PoolConfig::state_page_size`]: crate::PoolConfig::state_page_size
//! [`Engine::mark`]: crate::Engine::mark
//! [`Engine::next_len`]: crate::Engine::next_len
//! [`Engine::packed_states`]: crate::Engine::packed_states
//! [`Engine::is_state_lost`]: crate::Engine::is_state_lost
//! [`StateBackend::copy_states`]: crate::backend::StateBackend::copy_states
//! [`Error::CrossesMark`]: crate::Error::CrossesMark
//! [`Error::StateLost`]: crate::Error::StateLost
//! [`Error::StateDraft`]: crate::Error::StateDraft
//! [`Error::StateAhead`]: crate::Error::StateAhead
