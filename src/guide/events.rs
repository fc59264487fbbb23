//! Others that follow the cache: routers and stores that know pages by chained hashes.
//!
//! A router sends a prompt to the engine that has most of it, and learns who has what from events. Both are off unless
//! the config asks for them: [`hashing`](crate::EngineConfig::hashing), whose hashes the engine speaks (features
//! `xxhash` and `sha256`), and [`event_pages`](crate::EngineConfig::event_pages), how many pages may wait to be told
//! of.
//!
//! ```
//! # #[cfg(feature = "xxhash")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::collections::HashMap;
//!
//! use kvarena::*;
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
//! // A namespace is a number here; its adapter and its salt are what others know it by.
//! let red = Namespace::new(7);
//! let names = NamespaceNames { salt: Some("red".to_owned()), ..Default::default() };
//! engine.name_namespace(red, names.clone())?;
//!
//! // Somebody's index, made of events alone: drained when the host likes, such as once a step.
//! let mut index = HashMap::new();
//! let mut listen = |engine: &mut Engine<Null>, index: &mut HashMap<u64, Vec<TokenId>>| {
//!     engine.drain_events(|event| match event {
//!         Event::Stored(stored) => {
//!             let pages = stored.tokens.chunks(4).map(<[_]>::to_vec);
//!             index.extend(stored.hashes.event_ids().zip(pages));
//!         }
//!         Event::Removed { hashes } => hashes.event_ids().for_each(|id| _ = index.remove(&id)),
//!         Event::Cleared => index.clear(),
//!         _ => unreachable!("an event of a later version"),
//!     });
//! };
//! let prompt: Vec<TokenId> = (0..13).map(TokenId::new).collect();
//! serve(&mut engine, red, &prompt)?;
//! listen(&mut engine, &mut index);
//! assert_eq!(index.len(), 3); // whole pages
//!
//! // Who has only hashes asks by them: the same answer as by tokens.
//! let chain = hashing.chain(&names, &prompt, 4);
//! assert!(chain.iter().all(|&hash| index.contains_key(&hashing.event_id(hash))));
//! assert_eq!(engine.match_hashes(&chain).pages(), 3);
//! assert_eq!(engine.match_prefix(red, &prompt).pages(), 3);
//!
//! // The pool has 8 pages: a long prompt evicts, and the index hears of it.
//! let other: Vec<TokenId> = (100..129).map(TokenId::new).collect();
//! serve(&mut engine, Namespace::default(), &other)?;
//! listen(&mut engine, &mut index);
//! assert_eq!(index.len(), engine.stats().cached_pages as usize);
//!
//! // Somebody new has missed the beginning: everything is said again.
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
//! A page that is stored can be matched at once, but its bytes may still be under way: who reads them outside the order
//! of the backend's stream waits until [`step`](crate::Stored::step) is complete. After a
//! [`reset`](crate::Engine::reset) one `Cleared` is said, and what runs on with old weights says nothing more.
//!
//! Hashes of 64 bits are hints: whoever chooses prompts can make two of one xxHash. Digests of SHA-256 are what a store
//! can be keyed by. Inside, the engine compares tokens.
//!
//! `crates/events` in the repository sends events as vLLM and SGLang do, replays what was lost, and feeds the router
//! of NVIDIA Dynamo. Not here: what an event looks like on a wire.
