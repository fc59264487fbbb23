//! Cache events: routers and stores that track cached pages by chained hashes.
//!
//! A router sends a prompt to the engine that has cached most of it. Events report the contents of each cache. Two
//! fields of the config enable them. [`hashing`](crate::EngineConfig::hashing) selects the hash function (features
//! `xxhash` and `sha256`). [`event_pages`](crate::EngineConfig::event_pages) limits the pages that wait for a drain.
//!
//! ```
//! # #[cfg(feature = "xxhash")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::collections::HashMap;
//!
//! use kvarena::*;
//! use kvarena::event::Event;
//! use kvarena::hash::{Hashing, NamespaceNames};
//!
//! let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(8), ..Default::default() };
//! let hashing = Hashing::Dynamo;
//! let config = EngineConfig { hashing: Some(hashing), event_pages: 64, ..pool.into() };
//! let mut engine = Engine::new(config, Null)?;
//! let mut scratch = StepScratch::new();
//! type Done = Result<(), Box<dyn std::error::Error>>;
//! let mut serve = |engine: &mut Engine<Null>, namespace, prompt: &[TokenId]| -> Done {
//!     let seq = engine.admit(namespace, prompt, 0)?;
//!     let len = engine.extend_max(seq)?;
//!     let step = engine.plan_batch(&mut scratch, &[Extend { seq, len }])?.step();
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//!     Ok(engine.finish(seq)?)
//! };
//!
//! // A namespace is a number in the engine. Routers identify it by its adapter and its salt.
//! let red = Namespace::new(7);
//! let names = NamespaceNames { salt: Some("red".to_owned()), ..Default::default() };
//! engine.name_namespace(red, names.clone())?;
//!
//! // A router's index of the pages of group 0, built from events alone. The host drains them at any time, for example
//! // each step.
//! let mut index = HashMap::new();
//! let mut listen = |engine: &mut Engine<Null>, index: &mut HashMap<u64, Vec<TokenId>>| {
//!     engine.drain_events(|event| match event {
//!         Event::Stored(stored) if stored.group == 0 => {
//!             let pages = stored.tokens.chunks(4).map(<[_]>::to_vec);
//!             index.extend(stored.hashes.event_ids().zip(pages));
//!         }
//!         Event::Removed { group: 0, hashes, .. } => hashes.event_ids().for_each(|id| _ = index.remove(&id)),
//!         Event::Cleared => index.clear(),
//!         _ => {} // cells, or an event of a later version
//!     });
//! };
//! let prompt: Vec<TokenId> = (0..13).map(TokenId::new).collect();
//! serve(&mut engine, red, &prompt)?;
//! listen(&mut engine, &mut index);
//! assert_eq!(index.len(), 3); // whole pages
//!
//! // A match by hashes returns the same pages as a match by tokens.
//! let chain = hashing.chain(&names, &prompt, 4);
//! assert!(chain.iter().all(|&hash| index.contains_key(&hashing.event_id(hash))));
//! assert_eq!(engine.match_hashes(&chain).pages(), 3);
//! assert_eq!(engine.match_prefix(red, &prompt).pages(), 3);
//!
//! // The pool has 8 pages. A long prompt evicts pages, and events remove them from the index.
//! let other: Vec<TokenId> = (100..129).map(TokenId::new).collect();
//! serve(&mut engine, Namespace::default(), &other)?;
//! listen(&mut engine, &mut index);
//! assert_eq!(index.len(), engine.stats().cached_pages as usize);
//!
//! // A new receiver has missed the first events, so the engine restates the contents.
//! let mut late = HashMap::new();
//! engine.restate_events();
//! listen(&mut engine, &mut late);
//! assert_eq!(late, index);
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "xxhash"))]
//! # fn main() {}
//! ```
//!
//! A stored page matches at once, but the device may still be writing its bytes. A reader outside the order of the
//! backend's stream waits until [`step`](crate::event::Stored::step) is complete. A [`reset`](crate::Engine::reset)
//! emits one `Cleared`. Sequences that continue with the old weights emit nothing.
//!
//! Events report the pages of group 0. A router that ignores groups of layers needs no more, and skips events of other
//! groups. With [`event_cells`](crate::EngineConfig::event_cells), events with another
//! [`group`](crate::event::Stored::group) report cells: the cached pages of windows and chunks, and states. A prompt
//! hits the longest prefix whose tails have all their cells. An event about a cell has the hash and the tokens of its
//! page in group 0.
//!
//! Hashes of 64 bits are hints, because a chosen prompt can collide with an xxHash. A store can use SHA-256 digests as
//! keys. The engine itself compares tokens.
//!
//! `crates/events` in the repository sends events in the wire format of vLLM and SGLang, replays lost ones, and feeds
//! the router of NVIDIA Dynamo. A host without that crate chooses its own wire format.
