//! The GPU backend: K and V in device memory, page tables beside them, kernels as PTX that the driver compiles.
//!
//! [`Cuda`] launches on the host's raw stream, takes the host's device addresses, and shares the device's primary
//! context with other users in the process. Any thread may call; each call binds the context first. Nothing waits for
//! the device except where a doc says so. Launches can be captured in a graph: see [`Cuda::stage`].
//!
//! The host answers, by `unsafe` calls, for what nobody else can know: that its raw stream lives
//! ([`CudaStream::from_raw`]), that its addresses are rows ([`DeviceRows::from_raw`], [`DeviceRowsMut::from_raw`]),
//! that a graph's memory is still there ([`CudaGraph::launch`]), that two streams are in order ([`Cuda::set_stream`]).
//!
//! A program with it starts on any machine: the driver is opened when it is first called (`driver.rs`). The README says
//! what the build wants where there is no CUDA toolkit.
//!
//! * C1. A pinned upload slot is written again only after the device has read it (`ring.rs`).
//! * C2. The staged plan is the plan of the launch: of the same step, as many tokens and rows, slots as wide
//!   (`stage.rs`).
//! * C3. Nothing that a kernel is given points outside what was checked: slots and pages are below the pool's, rows,
//!   lengths and table words within the tables, the host's rows long enough (`backend/check.rs`, `check.rs`). Of a plan
//!   it is given the staged image alone. Memory is freed after the work that may use it (`work.rs`).
//! * C4. Counters of split attention are zero between launches (`attend.rs`).
//!
//! The only place in the crate that names `cust`, which has the types of the driver's calls (`sys.rs`); all other
//! `unsafe` code is in `src/memory.rs`. Not here: the kernels (`ptx/`).
#![allow(unsafe_code)]

mod attend;
mod attend_latent;
mod attend_shared;
mod calls;
mod calls_sparse;
mod check;
mod compact;
mod copy;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod driver;
mod error;
mod gpu;
mod graph_key;
mod host_pages;
mod image;
mod kernels;
mod labels;
mod launch;
mod memory;
mod opened;
mod options;
mod page_moves;
mod params;
mod pool;
mod raw;
mod ring;
mod row_boxes;
mod scales;
mod split;
mod stage;
mod store;
mod store_fp8;
mod stream;
mod sys;
mod tables;
mod work;

pub use error::CudaError;
pub use gpu::Gpu;
pub use graph_key::GraphKey;
pub use host_pages::HostPages;
pub use kernels::{Archive, Function, Kernel};
pub use launch::KeptTexts;
pub use memory::{DeviceBuffer, DeviceRows, DeviceRowsMut, PinnedBuffer};
pub use opened::{Cuda, StagedPlan};
pub use options::CudaOptions;
pub use raw::RawStream;
#[doc(hidden)]
pub use split::{SpanCosts, SpanWork};
pub use stream::{CudaEvent, CudaGraph, CudaStream};
