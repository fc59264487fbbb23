//! Groups of layers: models with layers that read only a window or a chunk, and the layers of a drafter.
//!
//! Many models mix layers that read all tokens with layers that read only the last 128 or 1,024. The latter need no
//! older tokens. [`Groups`](crate::layout::Groups) assigns each layer to a group; `PoolConfig::from_hf` (feature
//! `serde`) reads the groups from a model's `config.json`. A sequence then gives pages back as it grows:
//!
//! | 8,192 tokens in bf16 | all layers keep everything | with groups |
//! |---|---|---|
//! | gpt-oss-20b: 12 layers, 12 with a window of 128 | 403 MB | 204 MB |
//! | Gemma 3 27B: 10 layers, 52 with a window of 1,024 | 4,161 MB | 1,174 MB |
//! | Llama 4 Scout: 12 layers, 36 with chunks of 8,192 | 1,611 MB | 403 MB |
//!
//! A page holds as many layers as group 0 has, so all groups share one pool. A group with more layers has several page
//! tables, its *tracks*. The host passes the window or the chunk of each layer to `attend`, as without groups. The
//! backend rejects a window or chunk that differs from the group's.
//!
//! Layers of a group may store other heads or another dtype than the pool's
//! ([`Groups::with_shape`](crate::layout::Groups::with_shape)). A page then holds as many of these layers as fit, and
//! [`PoolLayout::unused_bytes`](crate::layout::PoolLayout::unused_bytes) returns the number of bytes left over.
//! [`PoolLayout::of_group`](crate::layout::PoolLayout::of_group) returns the heads and head_dim of a group's layers.
//!
//! # Layers of a drafter
//!
//! A second group with [`Reach::All`](crate::layout::Reach::All) shares the pages of group 0: its layers may have other
//! heads, and their K and V come and go with the model's. That serves the layers of a drafter such as EAGLE or MTP. K
//! and V of such a layer at position `p` come from token `p + 1` and the model's hidden state at `p`. Store them one
//! place later, at `p + 1`, with the row's other tokens, and attend with [`Attend::first`](crate::Attend::first) 1. A
//! page then depends on its own tokens alone, so a hit drops nothing. The first place after a hit needs the hidden
//! state before it: keep that of each page's last token in [`PoolConfig::extra_bytes`](crate::PoolConfig::extra_bytes),
//! which move with the page. `tests/core/drafter.rs` is such a host.
//!
//! # Swap memory
//!
//! With [`PoolConfig::swap_pages`](crate::PoolConfig::swap_pages), evicted pages of all groups move to swap memory.
//! [`Engine::load`](crate::Engine::load) loads the pages that prompts hit. [`Engine::puts`](crate::Engine::puts) and
//! [`Engine::fetch`](crate::Engine::fetch) reject models with groups.
//!
//! ```
//! use kvarena::*;
//! use kvarena::layout::{Groups, LayerPlace, Reach};
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
//! assert_eq!((layout.lanes(), layout.tracks()), (1, 3)); // a page holds one layer
//! assert_eq!(layout.place(LayerId::new(2)), LayerPlace { group: 1, track: 2, lane: 0 });
//! assert_eq!(engine.shape().most_pages(40), 10 + 2 * 6); // the maximum for 40 tokens
//!
//! let prompt: Vec<_> = (0..40).map(TokenId::new).collect();
//! let seq = engine.admit(Namespace::default(), &prompt, 0)?;
//! // Other prompts will share the first 16 tokens, so they must match there.
//! engine.mark(seq, 16)?;
//! let mut scratch = StepScratch::new();
//! for _ in 0..5 {
//!     let step = engine.plan_batch(&mut scratch, &[Extend { seq, len: 8 }])?.step();
//!     // Here the model runs. A layer's tokens go to `plan.slots_of(layout.place(layer).track)`.
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//! }
//! // Layer 1 keeps all ten pages; each other layer keeps the pages that the next token reads.
//! assert_eq!(engine.page_table(seq)?.count(), 10);
//! assert_eq!(engine.page_runs(seq, 2)?.flatten().count(), 2);
//! engine.finish(seq)?;
//!
//! // A match ends where all layers have the pages that the next token reads: at the mark or at the prompt's end.
//! let matches = |len: usize| {
//!     let other = (100..104).map(TokenId::new);
//!     let prompt: Vec<_> = prompt[..len].iter().copied().chain(other).collect();
//!     let found = engine.match_prefix(Namespace::default(), &prompt);
//!     (found.pages(), found.full_pages())
//! };
//! assert_eq!(matches(16), (4, 4));
//! assert_eq!(matches(28), (4, 7)); // layer 1 has three more pages, which no match uses
//! assert_eq!(matches(40), (10, 10));
//! # Ok(())
//! # }
//! ```
//!
//! Prompts can match a sequence at the end of its prompt, at its end, and where its prompt diverges from a cached one.
//! [`Engine::mark`](crate::Engine::mark) adds places, such as the end of a system prompt, or the
//! [`cached_len`](crate::plan::Leader::cached_len) of a leader from which a waiting prompt diverges.
//! [`Stats::lost_hit_tokens`](crate::stats::Stats::lost_hit_tokens) counts the tokens that only group 0 had. Other
//! counters give the reasons: evicted cells, states evicted for later ones, and hits beside which a sequence did not
//! fit. The rest had [no mark](crate::stats::Stats::unmarked_hit_tokens): a host may add one.
//!
//! A promise covers the maximum number of pages that a sequence holds. This number depends on
//! [`promise_ahead`](crate::EngineConfig::promise_ahead): plans may be that many tokens ahead of the published tokens.
//! Set `promise_ahead` to `page_size - 1` plus a sequence's tokens of one step, or of two steps if steps overlap.
//!
//! [Events](super::events) and `match_hashes` report the pages of group 0 alone. A router therefore expects
//! [`PrefixMatch::full_pages`](crate::engine::PrefixMatch::full_pages), and a prompt may match less. The engine emits
//! no events for other groups, because a router that ignores groups would take their removed pages for a removed
//! prefix.
//!
//! `Cuda` supports chunks that are multiples of the page size, except over latent rows. It does not support latent rows
//! together with another shape. Draft trees and sparse reads work only in layers that read all tokens.
