//! The GPU backend: K and V in device memory, page tables beside them, kernels as PTX that the driver compiles.
//!
//! [`Cuda`] launches on the host's raw stream, takes the host's device addresses, and shares the device's primary
//! context with other users in the process. Any thread may call; each call binds the context first. Nothing waits for
//! the device except where a doc says so. Launches can be captured in a graph: see [`Cuda::stage`].
//!
//! ```text
//! options, prepare, opened                 opening, and what is made ready
//!   calls, calls_sparse                    the calls of `Backend`
//!   check, error                           what they refuse, and why
//!   store                                  the pool, stores of K and V
//!   attention                              splits and launches of each variant
//!   moves                                  pages and slots moved
//!   plan                                   the staged plan and the page tables
//!     kernels                              PTX, the table of kernels, selection
//!     driver                               devices, memory, streams, launches
//! ```
//!
//! The host answers, by `unsafe` calls, for what nobody else can know: that its raw stream lives
//! ([`CudaStream::from_raw`]), that its addresses are rows ([`DeviceRows::from_raw`], [`DeviceRowsMut::from_raw`]),
//! that a graph's memory is still there ([`CudaGraph::launch`]), that two streams are in order ([`Cuda::set_stream`]).
//!
//! A program with it starts on any machine: the driver is opened when it is first called (`driver/forward.rs`). The
//! README says what the build wants where there is no CUDA toolkit.
//!
//! * C1. A pinned upload slot is written again only after the device has read it (`plan/ring.rs`).
//! * C2. The staged plan is the plan of the launch: of the same step, as many tokens and rows, slots as wide
//!   (`plan/stage.rs`).
//! * C3. Nothing that a kernel is given points outside what was checked: slots and pages are below the pool's, rows,
//!   lengths and table words within the tables, the host's rows long enough (`backend/check.rs`, `check.rs`). Of a plan
//!   it is given the staged image alone. Memory is freed after the work that may use it (`driver/work.rs`).
//! * C4. Counters of split attention are zero between launches (`attention/variants.rs`).
//!
//! The only place in the crate that names `cust`, which has the types of the driver's calls (`driver/sys.rs`); all
//! other `unsafe` code is in `src/memory.rs`. Not here: the kernels (`ptx/`).
#![allow(unsafe_code)]

mod attention;
mod calls;
mod calls_sparse;
mod check;
mod driver;
mod error;
mod kernels;
mod moves;
mod opened;
mod options;
mod plan;
mod prepare;
mod store;

pub use attention::graph_key::GraphKey;
#[doc(hidden)]
pub use attention::split::{SpanCosts, SpanWork};
pub use driver::gpu::Gpu;
pub use driver::memory::{DeviceBuffer, DeviceRows, DeviceRowsMut, PinnedBuffer};
pub use driver::raw::RawStream;
pub use driver::stream::{CudaEvent, CudaGraph, CudaStream};
pub use error::CudaError;
pub use kernels::{Archive, Function, Kernel};
pub use moves::host_pages::HostPages;
pub use opened::{Cuda, StagedPlan};
pub use options::CudaOptions;
pub use prepare::Prepare;
