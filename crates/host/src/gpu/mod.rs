//! The whole model on a GPU: weights, products, small kernels, sampling. `kvarena` stores K and V and computes
//! attention.
//!
//! ```text
//! error, libs          errors; the search for NVIDIA's libraries
//! device, kernels      the GPU and its stream; the kernels of ptx/ and their parameters
//! weights              weights in device memory: from a source of tensors, or random from a seed
//! products             matrix products by cublasLt or a kernel of ptx/, chosen by measurement
//! gemm                 Hopper's kernels for products of up to 256 rows: how they split the work
//! image, kept          upload of a step's tokens and sampling parameters, download of the sampled tokens; kept logits
//! edits                upload of the requests' changes to logits, and of min-p
//! delta                launches of the kernels of Gated DeltaNet
//! shape, forward       checks of models; the launches of one step
//! sparse               sparse reads: the positions and the channels that select them
//! nccl, peers, sums    sums over several GPUs, by NCCL or peer memory
//! ranks                a model spread over several GPUs, all with the plans of one engine
//! runner               the `Runner` on a GPU: graphs, steps in flight, times
//! ```
//!
//! Each GPU's launches go to one stream, so they run in the order of submission. A function without a section about
//! errors fails only if the driver or a library fails, or if memory is short.
#![allow(unsafe_code)]

pub mod delta;
pub mod device;
mod edits;
pub mod error;
pub mod forward;
pub mod gemm;
mod image;
mod kept;
pub mod kernels;
mod libs;
pub mod nccl;
pub mod peers;
pub mod products;
pub mod ranks;
pub mod runner;
pub mod shape;
pub mod sparse;
pub mod sums;
pub mod weights;

pub use error::GpuError;
