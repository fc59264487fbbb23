//! Tenants: prompts that must not share K and V, and a change of the model's weights.
//!
//! The time to the first token reveals whether a prefix was cached. A host that must not reveal this admits the
//! tenants' prompts under different [`Namespace`](crate::Namespace)s, because equal tokens match only within one
//! namespace. The same applies if equal tokens have different K and V, as with adapters or images behind placeholder
//! tokens.
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
//! // For each tenant and adapter, a number that clients can neither choose nor guess.
//! let secret = RandomState::new();
//! let namespace = |tenant: &str, adapter: &str| Namespace::new(secret.hash_one((tenant, adapter)));
//! let (red, blue) = (namespace("red", "none"), namespace("blue", "none"));
//! assert_eq!([serve(&mut engine, red)?, serve(&mut engine, red)?], [0, 12]);
//! assert_eq!(serve(&mut engine, blue)?, 0); // equal tokens, a different tenant
//! assert_eq!(serve(&mut engine, namespace("red", "sql"))?, 0); // a different adapter
//!
//! // The weights change, so the cached K and V are stale. Running sequences keep their pages to the end.
//! engine.reset();
//! assert_eq!(serve(&mut engine, red)?, 0);
//! # Ok(())
//! # }
//! ```
//!
//! With hashing ([`EngineConfig::hashing`](crate::EngineConfig::hashing)), routers identify a namespace by its adapter
//! and its salt. The host sets these names with [`Engine::name_namespace`](crate::Engine::name_namespace) before the
//! namespace's first prompt.
//! If each request has its own salt, call [`Engine::forget_namespace`](crate::Engine::forget_namespace) after the
//! request. The engine then drops the names together with the namespace's last cached page, so names do not accumulate.
//!
//! All namespaces share one pool and one eviction order. The scheduler limits a tenant's share by the number of its
//! running sequences and their promises ([`scheduling`](super::scheduling)). Alternatively, each tenant has its own
//! engine. With `PrefixMode::None`, only forks share pages.
