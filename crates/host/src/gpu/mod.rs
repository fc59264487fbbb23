//! The whole model on a GPU: weights, products, small kernels, sampling. `kvarena` keeps K and V there and attends.
//!
//! ```text
//! error, libs          what can be missing, where NVIDIA's libraries are
//! device, kernels      the GPU, its stream; the kernels of ptx/ and what they are given
//! files, weights       from safetensors, or a seed, to device memory
//! products             matrix products: by cublasLt, or by a kernel of ptx/; which is fastest is measured once
//! gemm                 the ways in which Hopper's kernel for a few dozen rows can spread its work
//! image, kept          a step's tokens and draws, on their way to the device and back; logits that are kept
//! shapes               edits of logits and min-p, on their way to the device
//! shape, forward       which models are served; one step: everything that is launched for it
//! sparse               which positions streams read, and which channels find them
//! nccl, peers, sums    what connects several GPUs: NCCL, memory that each writes to, sums over one or the other
//! ranks                a model spread over them: one engine's plans on all
//! runner               the seam to the serving loop: graphs, steps in flight, time
//! twin                 the kernels' specification, on the CPU
//! ```
//!
//! Everything is asked for on one stream, so that work is done in the order in which it is asked for.
#![allow(unsafe_code)]

pub mod device;
pub mod error;
mod files;
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
mod shapes;
pub mod sparse;
pub mod sums;
pub mod twin;
pub mod weights;

pub use error::GpuError;
