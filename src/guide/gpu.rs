//! A step on a GPU, together with cudarc, libtorch or any other user of the device.
//!
//! The backend launches on the host's stream, takes device addresses and shares the device's primary context, which
//! cudarc and libtorch also use. The stream orders the model's kernels and the backend's, so the host neither copies
//! rows nor waits. A host with its own CUDA binding passes raw handles. It passes the stream with a value that keeps
//! the stream alive, and device addresses with the type and the number of elements. With cudarc, `stream.cu_stream()`
//! is the handle, an `Arc<cudarc::driver::CudaStream>` keeps it alive, and `device_ptr` returns the addresses.
//!
//! ```
//! # #[cfg(feature = "cuda")]
//! use std::sync::Arc;
//! # #[cfg(feature = "cuda")]
//! use kvarena::{Dtype, backend::cuda::{CudaError, CudaStream, DeviceRows, Gpu, RawStream}};
//!
//! # #[cfg(feature = "cuda")]
//! # struct ModelStream(RawStream);
//! # #[cfg(feature = "cuda")]
//! fn rows_of_model(gpu: &Gpu, stream: Arc<ModelStream>, k: u64) -> Result<(), CudaError> {
//!     // SAFETY: the stream belongs to the device's primary context. Its `Arc` keeps the stream alive.
//!     let stream = unsafe { CudaStream::from_raw(gpu, stream.0, stream.clone()) }?;
//!     // SAFETY: the model wrote 3 rows of 2 heads of 128 at `k`, and frees them in the stream's order.
//!     let rows = unsafe { DeviceRows::from_raw(k, Dtype::Bf16, 3 * 2 * 128, None) };
//! #   let _ = (stream, rows);
//!     Ok(())
//! }
//! ```
//!
//! A host that runs with or without a GPU chooses at run time: an [`Either`](crate::backend::Either) of a `Cpu` and a
//! `Cuda` is also a backend.
//!
//! This program computes some steps on a GPU. It needs the feature `cuda`. Without a GPU it prints the error and ends.
//!
//! ```
//! # #[cfg(feature = "cuda")]
//! use kvarena::backend::cuda::{CudaOptions, CudaStream, DeviceBuffer, Gpu};
//! use kvarena::*;
//!
//! # #[cfg(not(feature = "cuda"))]
//! # fn main() {}
//! # #[cfg(feature = "cuda")]
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let gpu = match Gpu::new(0) {
//!         Ok(gpu) => gpu,
//!         Err(error) => {
//!             println!("{error}: a host would use the CPU now"); // no driver, no device, or one that is too old
//!             return Ok(());
//!         }
//!     };
//!     let stream = CudaStream::new(&gpu)?; // a server passes the model's stream with `from_raw`
//!     let shape = KvShape::heads(2, 128);
//!     let capacity = Capacity::Bytes(gpu.free_memory()?.min(64 << 20)); // a server leaves a reserve
//!     let config = PoolConfig { shape, dtype: KvDtype::Bf16, capacity, ..Default::default() };
//!     let options = CudaOptions { stream: Some(stream.clone()), ..CudaOptions::new(&gpu) };
//!     let mut engine = Engine::new(config, options)?;
//!     let mut scratch = StepScratch::new();
//!
//!     let prompt: Vec<TokenId> = (0..10).map(TokenId::new).collect();
//!     let seq = engine.admit(Namespace::default(), &prompt, 0)?;
//!     for token in 10..13 {
//!         let len = engine.extend_max(seq)?;
//!         let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }])?;
//!         // The model's buffers in bf16: 2 heads of K and V, 8 heads of q and of the output.
//!         let rows = plan.token_count();
//!         let k = DeviceBuffer::of(&gpu, &vec![half::bf16::ONE; rows * 2 * 128])?;
//!         let q = DeviceBuffer::of(&gpu, &vec![half::bf16::ONE; rows * 8 * 128])?;
//!         let mut out = DeviceBuffer::new(&gpu, q.bytes())?;
//!         let attend = Attend::new(8, 128);
//!         for layer in (0..1).map(LayerId::new) {
//!             let backend = engine.backend_mut();
//!             backend.store_cache(&plan, layer, k.rows(0, None), k.rows(0, None))?;
//!             backend.attend(&plan, layer, &attend, q.rows(0, None), out.rows_mut(0, None), None)?;
//!         }
//!         let step = plan.step();
//!         let done = engine.backend().record()?; // an event after all launches
//!         engine.append(seq, &[TokenId::new(token)])?;
//!         engine.commit(step)?;
//!         done.synchronize()?; // or poll `is_done` and plan the next step meanwhile
//!         engine.complete(step)?;
//!     }
//!     engine.finish(seq)?;
//!     engine.verify()?;
//!     Ok(())
//! }
//! ```
//!
//! A step that needs a kernel for the first time loads it, and the driver may have to compile it. A server calls
//! `Cuda::prepare` with the attention of its layers and the kinds of its steps, before it reports ready. Then
//! `Cuda::modules_after_prepare` stays 0.
//!
//! If one stream orders all work on the pool, the host may complete a step as soon as it has launched it. A graph can
//! capture a decode step. `Cuda::stage` documents the order of calls and returns the key of the graphs that the host
//! may replay.
//!
//! [`ranks`](super::ranks) describes several devices.
