//! Publishes the cache contents of an engine in the wire format of vLLM and SGLang. The crate contains a publisher over
//! ZeroMQ, and a subscriber that recovers lost messages. `examples/fleet` adds a router that indexes the events.
//!
//! ```text
//! engine --drain_events--> [encode] --payload--> [publisher] ==PUB==> [subscriber] --payload--> a router
//!                                                     ^==ROUTER==replay, dump==|
//! ```

pub mod clock;
pub mod decode;
pub mod encode;
pub mod msgpack;
pub mod publisher;
pub mod subscriber;
mod zmtp;
