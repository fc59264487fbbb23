//! Publishes the cache contents of an engine in the wire format of vLLM and SGLang. The crate contains a publisher over
//! ZeroMQ, a subscriber that recovers lost messages, a router that indexes the events, and a simulated fleet.
//!
//! ```text
//! engine --drain_events--> [encode] --payload--> [publisher] ==PUB==> [subscriber] --payload--> [router]
//!                                                     ^==ROUTER==replay, dump==|
//! ```
//!
//! Without feature `router` the crate omits the modules `fleet`, `host`, `plot`, `router` and `trace`.

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
mod zmtp;
