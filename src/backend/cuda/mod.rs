//! The GPU backend: K and V and the page tables in device memory, and kernels as PTX that the driver compiles.
//!
//! [`Cuda`] launches on the host's raw stream, takes the host's device addresses, and shares the device's primary
//! context with other users in the process. Any thread may call it; each call binds the context first. A call waits for
//! the device only if its documentation states so. A graph can capture launches: see [`Cuda::stage`].
//!
//! ```text
//! options, prepare, calls_prepare, opened  opening and preparation
//!   calls, calls_sparse, calls_states      the calls of `Backend`, sparse reads, states
//!   check, error                           checks of arguments, errors
//!   store                                  the pool, stores of K and V
//!   attention                              splits and launches of each variant
//!   moves                                  copies of pages, swap memory, compaction of slots
//!   plan                                   the staged plan and the page tables
//!     kernels                              PTX, the table of kernels, selection
//!     driver                               devices, memory, streams, launches
//! ```
//!
//! The `unsafe` calls have conditions that only the host can guarantee: its raw stream is alive
//! ([`CudaStream::from_raw`]), its addresses are rows ([`DeviceRows::from_raw`], [`DeviceRowsMut::from_raw`]), memory
//! that it gives to a pool stays allocated and is not written ([`DeviceRegion::from_raw`]), a graph's memory still
//! exists ([`CudaGraph::launch`]), two streams are ordered ([`Cuda::set_stream`]), and the host's own kernel fits its
//! launch ([`Function::launch`]).
//!
//! A program with this backend starts on any machine, because the first call opens the driver.
//! The README describes a build without a CUDA toolkit.
//!
//! * C1. The host rewrites a pinned upload slot only after the device has read it.
//! * C2. The staged plan matches the launch: the same step, numbers of tokens and rows, and slot width.
//! * C3. No kernel parameter points outside checked memory. Slots and pages are in the pool; in a pool that the host
//!   allocated, planes are in their regions. Rows, lengths and table words are in the tables; the host's rows are long
//!   enough. Kernels read a plan only from the staged image. Memory is freed after the work that may use it.
//! * C4. Counters of split attention are zero between launches.
//!
//! Only this module uses `cust`, for the types of the driver's calls.

// C1 is in `plan/ring.rs`, C2 in `plan/stage.rs`, C4 in `attention/variant.rs` and `attention/shared.rs`. C3 is in
// `store/given.rs`, `backend/check.rs`, `check.rs` and `driver/work.rs`. `driver/forward.rs` opens the driver, and
// `driver/sys.rs` uses `cust`.
#![allow(unsafe_code)]

mod attention;
mod calls;
mod calls_prepare;
mod calls_sparse;
mod calls_states;
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
pub use calls_states::StateSlots;
pub use driver::gpu::Gpu;
pub use driver::launch::Launch;
pub use driver::memory::{DeviceBuffer, DeviceRows, DeviceRowsMut, PinnedBuffer};
pub use driver::raw::RawStream;
pub use driver::region::DeviceRegion;
pub use driver::stream::{CudaEvent, CudaGraph, CudaStream};
pub use error::{CudaError, GivenError, Limit};
pub use kernels::{Archive, Function, Kernel};
pub use moves::region::{CudaRead, CudaWrite};
pub use opened::{Cuda, StagedPlan};
pub use options::CudaOptions;
pub use prepare::Prepare;
pub use store::given::{GivenPlane, GivenPool};
