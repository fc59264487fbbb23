//! The driver layer: devices, memory, streams and launches; independent of plans and pools.
//!
//! ```text
//! gpu       a device and its context, with the kernels compiled through it
//! stream    streams, events, graphs
//! memory    device memory, pinned memory, rows by address
//! region    device memory that the host allocated
//! mapping   swap memory that is pinned piece by piece
//! work      unfinished work of a context, and memory that waits for it
//! launch    launches, in order or as programmatic dependent launches
//! raw, sys  handles as integers; the driver's functions and types
//! forward   libcuda.so.1, opened at the first call
//! ```
//!
//! A host uses [`Gpu`](gpu::Gpu), [`RawStream`](raw::RawStream), the types of `stream` and `memory`, and
//! [`Launch`](launch::Launch) for its own kernels; the rest is internal.

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod forward;
pub(super) mod gpu;
pub(super) mod launch;
pub(super) mod mapping;
pub(super) mod memory;
pub(super) mod raw;
pub(super) mod region;
pub(super) mod stream;
pub(super) mod sys;
pub(super) mod work;
