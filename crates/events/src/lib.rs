//! What an engine holds, said to others on the wire of vLLM and SGLang: a publisher over ZeroMQ, a subscriber that
//! finds what it lost, a router that believes both, and a fleet of engines behind it.
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
