//! Groups of layers: models with layers that read only a window or a chunk.
//!
//! Many models mix layers that read all tokens with layers that read the last 128 or 1,024. The pool need not keep more
//! than these tokens for them. [`Groups`](crate::Groups) assign each layer to a group, and
//! `PoolConfig::from_hf` (feature `serde`) reads them from a model's `config.json`. A sequence then gives
//! pages back as it grows:
//!
//! | 8,192 tokens in bf16 | all layers keep everything | with groups |
//! |---|---|---|
//! | gpt-oss-20b: 12 layers, 12 with a window of 128 | 403 MB | 204 MB |
//! | Gemma 3 27B: 10 layers, 52 with a window of 1,024 | 4,161 MB | 1,174 MB |
//! | Llama 4 Scout: 12 layers, 36 with chunks of 8,192 | 1,611 MB | 403 MB |
//!
//! A page holds as many layers as group 0 has, so all groups share one pool. A group with more layers has several page
//! tables, its *tracks*. The host passes the window or the chunk of each layer to
//! `attend` as before: the backend rejects any other.
//!
//! Layers of a group may store other heads or another dtype than the pool's
//! ([`Groups::with_shape`](crate::Groups::with_shape)). A page then holds as many of them as fit, and
//! [`PoolLayout::unused_bytes`](crate::PoolLayout::unused_bytes) returns the bytes left over.
//! [`PoolLayout::of_group`](crate::PoolLayout::of_group) returns the heads and head_dim of a group's layers.
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Layers 0 and 2 read 8 tokens, layer 1 reads all.
//! let groups = Groups::new(&[Reach::All, Reach::Window(8)], &[1, 0, 1])?;
//! let pool = PoolConfig {
//!     layers: 3,
//!     groups,
//!     page_size: 4,
//!     capacity: Capacity::Pages(64),
//!     ..PoolConfig::default()
//! };
//! // Steps of up to 8 tokens run at most 8 + 3 tokens ahead of the published pages.
//! let mut engine = Engine::new(EngineConfig { promise_ahead: 11, ..pool.into() }, Null)?;
//! let layout = engine.shape().layout;
//! assert_eq!((layout.lanes(), layout.tracks()), (1, 3)); // a page is of one layer
//! assert_eq!(layout.place(LayerId::new(2)), LayerPlace { group: 1, track: 2, lane: 0 });
//! assert_eq!(engine.shape().most_pages(40), 10 + 2 * 6); // what 40 tokens hold at most
//!
//! let prompt: Vec<_> = (0..40).map(TokenId::new).collect();
//! let seq = engine.admit(Namespace::default(), &prompt, 0)?;
//! // Others will begin like the first 16 tokens, so prompts must match there.
//! engine.mark(seq, 16)?;
//! let mut scratch = StepScratch::new();
//! for _ in 0..5 {
//!     let step = engine.plan_batch(&mut scratch, &[Extend { seq, len: 8 }])?.step();
//!     // Here the model runs. A layer's tokens go to `plan.slots_of(layout.place(layer).track)`.
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//! }
//! // All ten pages of layer 1; of the others those that the next token reads.
//! assert_eq!(engine.page_table(seq)?.count(), 10);
//! assert_eq!(engine.track_table(seq, 2)?.count(), 2);
//! engine.finish(seq)?;
//!
//! // A prompt matches where all layers have what its next token reads: at the mark, and at the end of the prompt.
//! let matches = |len: usize| {
//!     let other = (100..104).map(TokenId::new);
//!     let prompt: Vec<_> = prompt[..len].iter().copied().chain(other).collect();
//!     let found = engine.match_prefix(Namespace::default(), &prompt);
//!     (found.pages(), found.full_pages())
//! };
//! assert_eq!(matches(16), (4, 4));
//! assert_eq!(matches(28), (4, 7)); // three pages of layer 1 are of no use
//! assert_eq!(matches(40), (10, 10));
//! # Ok(())
//! # }
//! ```
//!
//! A sequence keeps what a match needs where an equal prompt or the next turn can match: at the end of its prompt and
//! of its output, and where its prompt parts from a cached one. [`Engine::mark`](crate::Engine::mark) adds places, such
//! as the end of a system prompt. A prompt that follows a leader finds its tokens only if the host marks the leader.
//! [`Stats::lost_hit_tokens`](crate::Stats::lost_hit_tokens) counts the tokens that only group 0 had.
//!
//! Promises count what a sequence holds at most while its plans are at most
//! [`promise_ahead`](crate::EngineConfig::promise_ahead) tokens ahead of its published ones. Set it to the tokens of a
//! step, times two if steps overlap, plus a page less one. Events report the pages of group 0 alone, so a router may
//! expect a longer match than a prompt finds.
//!
//! `Cuda` serves chunks that pages divide, except of latent rows, and no latent rows beside another shape. Drafts in
//! trees and sparse reads are for layers that read everything.
