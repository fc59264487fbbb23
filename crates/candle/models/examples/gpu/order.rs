//! Work in flight: the arena or the tensors are dropped first, and a second stream runs a slow
//! kernel.

use candle::op::BackpropOp;
use candle::{CudaStorage, DType, Device, Storage, Tensor};
use kvarena::backend::Either;
use kvarena::backend::cuda::{CudaEvent, CudaStream};
use kvarena::{Attend, Backend, Extend, Namespace, TokenId};
use kvarena_candle::{Error, KvArena};

use crate::QWEN3;
use crate::shape::Outcome;

const ROWS: usize = 64;
const Q_HEADS: usize = QWEN3.q_heads;
const KV_HEADS: usize = QWEN3.kv_heads;
const HEAD_DIM: usize = QWEN3.head_dim;

/// Returns constant rows of q, k and v.
fn qkv(device: &Device) -> Outcome<[Tensor; 3]> {
    let tensor = |heads: usize, step: f64| -> candle::Result<Tensor> {
        let numbers = Tensor::arange(0u32, (ROWS * heads * HEAD_DIM) as u32, device)?;
        let numbers = (numbers.to_dtype(DType::F32)? * step)?.sin()?;
        numbers.to_dtype(DType::BF16)?.reshape((ROWS, heads, HEAD_DIM))
    };
    Ok([tensor(Q_HEADS, 0.37)?, tensor(KV_HEADS, 0.61)?, tensor(KV_HEADS, 0.83)?])
}

/// Launches about ten milliseconds of work.
fn slow(device: &Device) -> Outcome<Tensor> {
    let x = Tensor::ones((8192, 8192), DType::BF16, device)?;
    let mut sum = x.matmul(&x)?;
    for _ in 0..7 {
        sum = x.matmul(&x)?;
    }
    Ok(sum)
}

/// Launches one layer over these rows. The result may still be computed on return.
fn attend(arena: &mut KvArena, [q, k, v]: [&Tensor; 3]) -> Outcome<Tensor> {
    arena.engine.reset();
    let prompt: Vec<TokenId> = (0..ROWS as u32).map(TokenId::new).collect();
    let seq = arena.engine.admit(Namespace::default(), &prompt, 0)?;
    let len = ROWS as u32 - arena.engine.planned_len(seq)?;
    let step = arena.step(&[Extend { seq, len }])?;
    let out = step.attend(0, &Attend::new(Q_HEADS as u32, HEAD_DIM as u32), q, k, v)?;
    let id = step.launched();
    arena.close(id)?;
    Ok(out)
}

fn numbers(x: &Tensor) -> Outcome<Vec<f32>> {
    Ok(x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

pub fn run() -> Outcome {
    let device = Device::new_cuda_with_stream(0)?;
    let arena = || QWEN3.arena(&device, 1024, 256);
    let [q, k, v] = qkv(&device)?;
    let wanted = numbers(&attend(&mut arena()?, [&q, &k, &v])?)?;
    let mean = wanted.iter().map(|x| x.abs()).sum::<f32>() / wanted.len() as f32;
    println!("the result's mean absolute value: {mean:.4}");

    // The arena is dropped while its kernels wait for slow ones; the result survives.
    let mut first = arena()?;
    slow(&device)?;
    let out = attend(&mut first, [&q, &k, &v])?;
    drop(first);
    println!("arena dropped before tensors: {}", verdict(&numbers(&out)?, &wanted));

    // The tensors and all handles of candle's device are dropped first; the arena keeps the stream
    // alive.
    let other = Device::new_cuda_with_stream(0)?;
    let mut last = QWEN3.arena(&other, 1024, 256)?;
    let tensors = qkv(&other)?;
    slow(&other)?;
    let out = attend(&mut last, [&tensors[0], &tensors[1], &tensors[2]])?;
    drop((out, tensors, other));
    last.engine.backend_mut().synchronize()?;
    last.engine.verify().map_err(|broken| format!("{broken:?}"))?;
    drop(last);
    println!("tensors and device dropped before the arena: fine");
    streams(&device)
}

/// Checks steps whose k comes from a second stream, after a slow kernel.
fn streams(device: &Device) -> Outcome {
    let second = Device::new_cuda_with_stream(0)?;
    let [q, _, v] = qkv(device)?;
    let mut arena = QWEN3.arena(device, 1024, 256)?;
    let [_, k, _] = qkv(&second)?;
    let refused = attend(&mut arena, [&q, &k, &v]).expect_err("another stream");
    let is_device = matches!(refused.downcast_ref::<Error>(), Some(Error::Device { .. }));
    println!("a tensor of another stream: {}", if is_device { "rejected" } else { "not rejected" });
    arena.engine.verify().map_err(|broken| format!("{broken:?}"))?;
    drop(arena);

    // The second stream writes K. Its order is ensured by candle's events, by an event of the host,
    // or by nothing.
    let tracked = || Device::new_cuda_with_stream(0).map_err(Into::into);
    in_order("candle's events", tracked, false, 2.0)?;
    in_order("an event of the host", crate::device, true, 3.0)?;
    in_order("nothing, so it should differ", crate::device, false, 4.0)
}

/// Computes attention over K times a factor that a second stream computes after slow kernels.
fn in_order(
    what: &str,
    device: impl Fn() -> Outcome<Device>,
    by_event: bool,
    factor: f64,
) -> Outcome {
    let [device, second] = [device()?, device()?];
    let ([q, k, v], [_, second_k, _]) = (qkv(&device)?, qkv(&second)?);
    let wanted =
        numbers(&attend(&mut QWEN3.arena(&device, 1024, 256)?, [&q, &(k * factor)?, &v])?)?;
    second.synchronize()?;
    // An arena's first step allocates memory and loads kernels, and both may wait for all streams.
    let mut arena = QWEN3.arena(&device, 1024, 256)?;
    attend(&mut arena, [&q, &v, &v])?;
    device.synchronize()?;
    let sum = slow(&second)?.narrow(0, 0, 1)?.narrow(1, 0, 1)?.to_dtype(DType::F32)?;
    let k = of_device(&(after(&second_k, &sum)? * factor)?, &device)?;
    let Either::Right(cuda) = arena.engine.backend() else { return Err("no GPU".into()) };
    let raw = second.as_cuda_device()?.cuda_stream();
    // SAFETY: this is candle's stream of the primary context, and its `Arc` keeps it alive.
    let from = unsafe { CudaStream::from_raw(cuda.gpu(), raw.cu_stream() as usize as u64, raw) }?;
    if by_event {
        let mut event = CudaEvent::new(cuda.gpu(), false)?;
        event.record(&from)?;
        event.block(cuda.stream())?;
    }
    let out = numbers(&attend(&mut arena, [&q, &k, &v])?)?;
    println!("K of a second stream, ordered by {what}: {}", verdict(&out, &wanted));
    Ok(second.synchronize()?)
}

/// Copies a tensor in its own stream, and returns the copy as a tensor of another device.
fn of_device(x: &Tensor, device: &Device) -> Outcome<Tensor> {
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { return Err("not on a GPU".into()) };
    let slice = storage.as_cuda_slice::<half::bf16>()?.clone();
    let storage = CudaStorage::wrap_cuda_slice(slice, device.as_cuda_device()?.clone());
    let storage = Storage::Cuda(storage);
    Ok(Tensor::from_storage(storage, layout.shape().clone(), BackpropOp::none(), false))
}

/// Returns k. The result depends on the sum.
fn after(k: &Tensor, sum: &Tensor) -> candle::Result<Tensor> {
    let zero = (sum * 0.0)?.to_dtype(DType::BF16)?.reshape((1, 1, 1))?;
    k.broadcast_add(&zero)
}

fn verdict(x: &[f32], wanted: &[f32]) -> String {
    let differ = x.iter().zip(wanted).filter(|(x, wanted)| x != wanted).count();
    if differ == 0 { "equal".into() } else { format!("{differ} of {} differ", x.len()) }
}
