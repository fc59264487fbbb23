//! What an engine holds, said to others on the wire of vLLM and SGLang: a publisher over ZeroMQ, a subscriber that
//! finds what it lost, a router that believes both, and a fleet of engines behind it.
//!
//! ```text
//! engine --drain_events--> [encode] --payload--> [publisher] ==PUB==> [subscriber] --payload--> [router]
//!                                                     ^==ROUTER==replay, dump==|
//! ```

pub mod clock;
pub mod decode;
pub mod encode;
pub mod fleet;
pub mod host;
pub mod msgpack;
pub mod plot;
pub mod publisher;
pub mod router;
pub mod subscriber;
pub mod trace;
