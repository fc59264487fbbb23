//! The bridge's overhead on a GPU: decode steps through the bridge, and by direct calls of the engine
//! and the backend. Both alternate while the host is timed; the device is timed for one after the other.

use std::time::Instant;

use candle::{DType, Device, Tensor};
use kvarena::backend::Either;
use kvarena::backend::cuda::{CudaEvent, DeviceRows, DeviceRowsMut};
use kvarena::{Attend, Backend, Dtype, Extend, LayerId, Namespace, Queries, StepScratch, TokenId};
use kvarena_candle::KvArena;

use crate::shape::{Outcome, median};
use crate::{QWEN3, device};

const BATCH: usize = 16;
const CONTEXT: u32 = 512;
const TURNS: usize = 100;
const LAYERS: usize = QWEN3.layers;
const Q_HEADS: usize = QWEN3.q_heads;
const KV_HEADS: usize = QWEN3.kv_heads;
const HEAD_DIM: usize = QWEN3.head_dim;

pub fn run() -> Outcome {
    println!("us, medians over decode steps of {BATCH} sequences of {CONTEXT} tokens, {LAYERS} layers");
    println!("| candle's events | | bridge | direct calls | difference |");
    println!("|---|---|---|---|---|");
    for tracking in [true, false] {
        let device = if tracking { Device::new_cuda_with_stream(0)? } else { device()? };
        let mut cost = Cost::new(&device)?;
        let kind = if tracking { "tracked" } else { "not tracked" };
        for (name, [bridge, direct]) in cost.host()? {
            println!("| {kind} | {name} | {bridge:.1} | {direct:.1} | {:.1} |", bridge - direct);
        }
        println!("| {kind} | candle's allocation, part of layer | {:.1} | | |", cost.allocation()?);
        let (bridge, direct) = (cost.device_times(true)?, cost.device_times(false)?);
        for (at, name) in ["device, layer, launches queued", "device, layer, device idle"].iter().enumerate() {
            let (bridge, direct) = (bridge[at], direct[at]);
            println!("| {kind} | {name} | {bridge:.1} | {direct:.1} | {:.1} |", bridge - direct);
        }
    }
    Ok(())
}

/// Sequences that decode, and the tensors of a layer.
struct Cost {
    device: Device,
    arena: KvArena,
    items: Vec<Extend>,
    scratch: StepScratch,
    qkv: [Tensor; 3],
    out: Tensor,
    attend: Attend,
}

impl Cost {
    fn new(device: &Device) -> Outcome<Self> {
        let most = CONTEXT + 5 * TURNS as u32 + 64;
        let mut arena = QWEN3.arena(device, BATCH as u32 * most, BATCH as u32 * CONTEXT)?;
        let mut items = Vec::new();
        for first in 0..BATCH as u32 {
            let prompt: Vec<TokenId> = (0..CONTEXT).map(|at| TokenId::new(first * 1000 + at)).collect();
            let seq = arena.engine.admit(Namespace::default(), &prompt, 0)?;
            items.push(Extend { seq, len: CONTEXT });
        }
        // Times do not depend on the contents of the cache.
        let id = arena.step(&items)?.launched();
        arena.close(id)?;
        items.iter_mut().for_each(|item| item.len = 1);
        let tensor = |heads| Tensor::randn(0f32, 1.0, (BATCH, heads, HEAD_DIM), device)?.to_dtype(DType::BF16);
        let qkv = [tensor(Q_HEADS)?, tensor(KV_HEADS)?, tensor(KV_HEADS)?];
        Ok(Self {
            device: device.clone(),
            arena,
            items,
            scratch: StepScratch::new(),
            out: qkv[0].zeros_like()?,
            qkv,
            attend: Attend::new(Q_HEADS as u32, HEAD_DIM as u32),
        })
    }

    fn append(&mut self) -> Outcome {
        for item in &self.items {
            self.arena.engine.append(item.seq, &[TokenId::new(1)])?;
        }
        Ok(self.device.synchronize()?)
    }

    /// Measures the host thread's times of a step, a layer and a close: through the bridge, and by
    /// direct calls.
    fn host(&mut self) -> Outcome<[(&'static str, [f64; 2]); 3]> {
        let mut times = [const { [const { Vec::new() }; 2] }; 3];
        for turn in 0..TURNS + 10 {
            for way in [turn % 2, 1 - turn % 2] {
                self.append()?;
                let now = if way == 0 { self.bridge()? } else { self.direct()? };
                if turn >= 10 {
                    times.iter_mut().zip(now).for_each(|(times, now)| times[way].push(now));
                }
            }
        }
        let [step, layers, close] = times.map(|ways| ways.map(median));
        Ok([("step", step), ("layer", layers.map(|us| us / LAYERS as f64)), ("close", close)])
    }

    /// Runs a step through the bridge. Returns the microseconds of step, layers and close.
    fn bridge(&mut self) -> Outcome<[f64; 3]> {
        let [q, k, v] = &self.qkv;
        let start = Instant::now();
        let step = self.arena.step(&self.items)?;
        let planned = Instant::now();
        for layer in 0..LAYERS {
            step.attend(layer, &self.attend, q, k, v)?;
        }
        let launched = Instant::now();
        let id = step.launched();
        let closing = Instant::now();
        self.arena.close(id)?;
        Ok(between(&[start, planned, launched, closing]))
    }

    /// Runs a step by direct calls of the engine and its backend. Returns the microseconds of step, layers and close.
    fn direct(&mut self) -> Outcome<[f64; 3]> {
        let [q, k, v] = [address(&self.qkv[0])?, address(&self.qkv[1])?, address(&self.qkv[2])?];
        let out = address(&self.out)?;
        let engine = &mut self.arena.engine;
        let start = Instant::now();
        let plan = engine.plan_batch(&mut self.scratch, &self.items)?;
        let planned = Instant::now();
        for layer in 0..LAYERS {
            let layer = LayerId::new(layer as u32);
            layer_direct(engine.backend_mut(), &plan, layer, &self.attend, ([q, k, v], out))?;
        }
        let launched = Instant::now();
        let id = plan.step();
        let closing = Instant::now();
        engine.commit(id)?;
        engine.complete(id)?;
        Ok(between(&[start, planned, launched, closing]))
    }

    /// Returns the microseconds in which candle allocates and frees a layer's result.
    fn allocation(&mut self) -> Outcome<f64> {
        let (device, len) = (self.device.as_cuda_device()?, self.out.elem_count());
        let mut times = Vec::new();
        for _ in 0..TURNS {
            let start = Instant::now();
            for _ in 0..LAYERS {
                // SAFETY: nothing reads the memory.
                drop(unsafe { device.alloc::<half::bf16>(len) }?);
            }
            times.push(start.elapsed().as_secs_f64() * 1e6 / LAYERS as f64);
            self.device.synchronize()?;
        }
        Ok(median(times))
    }

    /// Returns the device's microseconds of a layer, measured twice: with all launches queued behind
    /// slow work, and on an idle device, which waits for each launch.
    fn device_times(&mut self, bridge: bool) -> Outcome<[f64; 2]> {
        let (gpu, stream) = match self.arena.engine.backend() {
            Either::Right(cuda) => (cuda.gpu().clone(), cuda.stream().clone()),
            Either::Left(_) => return Err("no GPU".into()),
        };
        let slow = Tensor::ones((8192, 8192), DType::BF16, &self.device)?;
        let mut times = [const { Vec::new() }; 2];
        for turn in 0..40 {
            self.append()?;
            let mut events = (0..=LAYERS).map(|_| CudaEvent::new(&gpu, true)).collect::<Result<Vec<_>, _>>()?;
            let [q, k, v] = &self.qkv;
            let raw = [address(q)?, address(k)?, address(v)?];
            let out = address(&self.out)?;
            if turn % 2 == 0 {
                for _ in 0..8 {
                    slow.matmul(&slow)?;
                }
            }
            let id = if bridge {
                let step = self.arena.step(&self.items)?;
                events[0].record(&stream)?;
                for layer in 0..LAYERS {
                    step.attend(layer, &self.attend, q, k, v)?;
                    events[layer + 1].record(&stream)?;
                }
                step.launched()
            } else {
                let engine = &mut self.arena.engine;
                let plan = engine.plan_batch(&mut self.scratch, &self.items)?;
                events[0].record(&stream)?;
                for layer in 0..LAYERS {
                    let id = LayerId::new(layer as u32);
                    layer_direct(engine.backend_mut(), &plan, id, &self.attend, (raw, out))?;
                    events[layer + 1].record(&stream)?;
                }
                plan.step()
            };
            self.arena.close(id)?;
            self.device.synchronize()?;
            if turn >= 4 {
                let ms = events[LAYERS].elapsed_ms(&events[0])?;
                times[turn % 2].push(f64::from(ms) * 1e3 / LAYERS as f64);
            }
        }
        Ok(times.map(median))
    }
}

fn between(at: &[Instant; 4]) -> [f64; 3] {
    let us = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e6;
    [us(at[0], at[1]), us(at[1], at[2]), at[3].elapsed().as_secs_f64() * 1e6]
}

/// Calls the backend's store and attention of a layer. Each argument is an address of contiguous rows.
fn layer_direct(
    pool: &mut kvarena_candle::Pool,
    plan: &kvarena::BatchPlan<'_>,
    layer: LayerId,
    attend: &Attend,
    (qkv, out): ([u64; 3], u64),
) -> Outcome {
    let rows = |at, heads: usize| {
        // SAFETY: the tensors live until the device is synchronised.
        unsafe { DeviceRows::from_raw(at, Dtype::Bf16, BATCH * heads * HEAD_DIM, None) }
    };
    let [q, k, v] = [rows(qkv[0], Q_HEADS), rows(qkv[1], KV_HEADS), rows(qkv[2], KV_HEADS)];
    // SAFETY: the result's tensor also lives until then, and nothing else accesses it.
    let out = unsafe { DeviceRowsMut::from_raw(out, Dtype::Bf16, BATCH * Q_HEADS * HEAD_DIM, None) };
    pool.store_cache(plan, layer, Either::Right(k), Either::Right(v))?;
    let queries = Queries { rows: Either::Right(q), sinks: None };
    pool.attend_queries(plan, layer, attend, queries, Either::Right(out), None)?;
    Ok(())
}

/// Returns the address of a contiguous tensor in bf16.
fn address(x: &Tensor) -> Outcome<u64> {
    use candle::cuda_backend::cudarc::driver::DevicePtr;
    let (storage, _) = x.storage_and_layout();
    let candle::Storage::Cuda(storage) = &*storage else { return Err("not on a GPU".into()) };
    let stream = storage.device.cuda_stream();
    Ok(storage.as_cuda_slice::<half::bf16>()?.device_ptr(&stream).0)
}
