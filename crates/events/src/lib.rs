//! Publishes an engine's cache contents on the wire of vLLM and SGLang: a publisher over ZeroMQ, a subscriber that
//! recovers lost messages, a router fed by it, and a fleet of engines behind the router.
//!
//! ```text
//! engine --drain_events--> [encode] --payload--> [publisher] ==PUB==> [subscriber] --payload--> [router]
//!                                                     ^==ROUTER==replay, dump==|
//! ```
//!
//! Without feature `router` the modules `fleet`, `host`, `plot`, `router` and `trace` are left out.

pub mod clock;
pub mod decode;
pub mod encode;
#[cfg(feature = "router")]
pub mod fleet;
#[cfg(feature = "router")]
pub mod host;
pub mod msgpack;
#[cfg(feature = "router")]
pub mod plot;
pub mod publisher;
#[cfg(feature = "router")]
pub mod router;
pub mod subscriber;
#[cfg(feature = "router")]
pub mod trace;
