//! Several tenants: prompts that must not share, and a model whose weights change.
//!
//! A cached prefix can be told by how soon a prompt is answered. Where that must not be, or where K and V of equal
//! tokens differ (adapters, images behind placeholder tokens), prompts are admitted under another
//! [`Namespace`](crate::Namespace): equal tokens match only within one.
//!
//! ```
//! use std::hash::{BuildHasher, RandomState};
//!
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut engine = Engine::new(PoolConfig { page_size: 4, ..Default::default() }, Null)?;
//! let mut scratch = StepScratch::new();
//! let mut serve = |engine: &mut Engine<Null>, namespace| -> Result<u32, Box<dyn std::error::Error>> {
//!     let prompt: Vec<TokenId> = (0..13).map(TokenId::new).collect();
//!     let seq = engine.admit(namespace, &prompt, 0)?;
//!     let hit = engine.cached_len(seq)?;
//!     let len = engine.extend_max(seq)?;
//!     let step = engine.plan_batch(&mut scratch, &[Extend { seq, len }])?.step();
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//!     engine.finish(seq)?;
//!     Ok(hit)
//! };
//!
//! // A number for each tenant and adapter, which clients can neither choose nor guess.
//! let secret = RandomState::new();
//! let namespace = |tenant: &str, adapter: &str| Namespace::new(secret.hash_one((tenant, adapter)));
//! let (red, blue) = (namespace("red", "none"), namespace("blue", "none"));
//! assert_eq!([serve(&mut engine, red)?, serve(&mut engine, red)?], [0, 12]);
//! assert_eq!(serve(&mut engine, blue)?, 0); // equal tokens, another tenant
//! assert_eq!(serve(&mut engine, namespace("red", "sql"))?, 0); // another adapter
//!
//! // The weights change: what is cached is of the old ones. Sequences that run keep theirs to the end.
//! engine.reset();
//! assert_eq!(serve(&mut engine, red)?, 0);
//! # Ok(())
//! # }
//! ```
//!
//! Where pages are hashed ([`EngineConfig::hashing`](crate::EngineConfig::hashing)), others know a namespace by its
//! adapter and its salt: [`Engine::name_namespace`](crate::Engine::name_namespace) says them before its first prompt.
//! Where each request has a salt of its own, [`Engine::forget_namespace`](crate::Engine::forget_namespace) after it
//! keeps the names from growing without end: they go with the namespace's last cached page.
//!
//! All namespaces have one pool and one order of eviction. A tenant's share is the scheduler's to keep: by how many of
//! its sequences run and how much they are promised ([`scheduling`](super::scheduling)), or with an engine for each
//! tenant. A host that must never share has `PrefixMode::None`: only forks share then.
//!
//! Not here: how two tenants' requests are ordered.
