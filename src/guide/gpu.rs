//! A step on a GPU, together with cudarc, libtorch or any other user of the device.
//!
//! The backend launches on the host's stream, takes device addresses and shares the device's primary context, which
//! cudarc and libtorch also use. The stream orders the model's kernels and the backend's, so the host neither copies
//! rows nor waits. A host with its own CUDA binding passes raw handles. It passes the stream with a value that keeps
//! the stream alive, and device addresses with the type and the number of elements. With cudarc, `stream.cu_stream()`
//! is the handle, an `Arc<cudarc::driver::CudaStream>` keeps it alive, and `device_ptr` returns the addresses.
//!
//! The crate contains its kernels as compressed PTX of ISA 8.0. The driver compiles a kernel when it is first used. If
//! the GPU or the driver is missing or too old, the host receives a typed error and can fall back to `Cpu`.
//! `ptx/README.md` describes the kernels and lists which kernel serves which GPU. `ptx/NOTES.md`, in the repository,
//! compares their times with FlashInfer's; `cargo bench --features cuda --bench gpu` measures the kernels again.
//!
//! ```
//! # #[cfg(feature = "cuda")]
//! use std::sync::Arc;
//! # #[cfg(feature = "cuda")]
//! use kvarena::backend::cuda::{CudaError, CudaStream, DeviceRows, Gpu, RawStream};
//! # #[cfg(feature = "cuda")]
//! use kvarena::layout::Dtype;
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
//! If one stream orders all work on the pool, the host may complete a step as soon as it has launched it.
//!
//! # Memory that the host allocated
//!
//! `CudaOptions::pool` takes K and V in allocations of the host, such as its tensors. A `DeviceRegion` is an address, a
//! length and an owner, so any binding can provide it; a `GivenPool` places each layer's K and V in regions, with one
//! stride for pages, one for slots and one for heads. Three constructors cover the usual forms:
//!
//! | constructor | memory |
//! |---|---|
//! | `GivenPool::page_layer_plane` | one allocation, `[pages, layers, K and V, page_size, kv_heads, head_dim]` |
//! | `GivenPool::nhd` | tensors of K and of V for each layer, `[pages, page_size, kv_heads, head_dim]` |
//! | `GivenPool::hnd` | the same, `[pages, kv_heads, page_size, head_dim]` |
//!
//! ```
//! # #[cfg(feature = "cuda")]
//! use std::sync::Arc;
//! # #[cfg(feature = "cuda")]
//! use kvarena::backend::cuda::{CudaError, CudaOptions, DeviceRegion, GivenPool, Gpu};
//! # #[cfg(feature = "cuda")]
//! use kvarena::layout::PoolLayout;
//!
//! # #[cfg(feature = "cuda")]
//! # struct Tensor { address: u64, bytes: u64 }
//! # #[cfg(feature = "cuda")]
//! fn over_tensors(gpu: &Gpu, layout: &PoolLayout, layers: &[[Arc<Tensor>; 2]]) -> Result<CudaOptions, CudaError> {
//!     // SAFETY: the `Arc` keeps the tensor allocated. The host writes no page that the engine uses.
//!     let region = |x: &Arc<Tensor>| unsafe { DeviceRegion::from_raw(gpu, x.address, x.bytes, x.clone()) };
//!     let layers = layers.iter().map(|[k, v]| Ok([region(k)?, region(v)?])).collect::<Result<_, CudaError>>()?;
//!     Ok(CudaOptions { pool: Some(GivenPool::nhd(layout, layers)), ..CudaOptions::new(gpu) })
//! }
//! ```
//!
//! `open` checks that planes end in their regions, that heads do not overlap, that addresses and strides are multiples
//! of 16 bytes, and that the regions are allocated on the backend's device; a `GivenError` names the wrong value. The
//! pool has planes K and V alone: no latent rows, labels or scales by token, and no groups with their own shapes. Pages
//! in swap memory, which the backend allocates, have the same bytes in all forms, so they move between all pools.
//!
//! The engine owns the pages, and the backend writes them on its stream and, for loads, on a stream of its own. The
//! host may read K and V of finished steps in the order of the backend's stream. It may write a page only if no
//! sequence and no cached prefix uses the page, and only after the page's saves and loads. The backend drops the owners
//! of regions when it is dropped, after the work that may use them.
//!
//! # Conditions
//!
//! The crate cannot check five conditions, which the host guarantees through `unsafe` calls. The stream is alive and
//! all addresses point to rows. Given memory stays allocated, and the host writes none of its pages in use. The memory
//! of a launched graph still exists, and a plan of its key is staged. Two streams are ordered. A launch fits the host's
//! own kernel. The crate ensures all other conditions.
//!
//! # Graphs
//!
//! A decode step can be captured once in a CUDA graph and replayed with padded plans
//! ([`plan_padded`](crate::Engine::plan_padded)). `Cuda::stage` documents the order of calls and returns the key of the
//! graphs that a plan may replay. From compute capability 9.0 and drivers of CUDA 12.3 on, kernels start while their
//! predecessor ends (programmatic dependent launch), also in graphs. A host that reads back the edges of such a graph
//! needs the driver calls with edge data. If a host launches its own kernel this way, that kernel must wait for its
//! predecessor before it ends.
//!
//! # Linking
//!
//! A program does not link the driver: it opens `libcuda.so.1` at the first call, and starts on any machine. On systems
//! other than Linux on x86-64 or AArch64 the program links the driver. The build script of `cust` needs a CUDA toolkit,
//! or a folder with an empty library (README). A host that keeps that folder in its repository sets the variable in
//! `.cargo/config.toml` instead: under `[env]`, `CUDA_LIBRARY_PATH = { value = "cuda", relative = true }`.
//!
//! [`ranks`](super::ranks) describes several devices.
