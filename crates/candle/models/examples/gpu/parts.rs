//! Measures a step's time on the device by operation. The program queues many launches of an operation behind slow
//! work, so the device never waits for a launch.

use candle::{DType, Device, Tensor};
use candle_nn::ops::{rms_norm, silu};
use candle_nn::rotary_emb::rope_thd;
use kvarena::backend::Either;
use kvarena::backend::cuda::{CudaEvent, CudaStream, Gpu};
use kvarena::{Attend, Extend, Namespace, TokenId};

use crate::shape::Outcome;
use crate::{QWEN3, device};

const BATCH: usize = 16;
const CONTEXT: usize = 512;
const REPEATS: usize = 20;

/// Operations of a layer. The last entry names the operations after the last layer.
const NAMES: [&str; 9] = [
    "products",
    "norms of rows",
    "norms of heads",
    "rotations",
    "store and attend",
    "silu",
    "product of gate and up",
    "sums of the residual",
    "logits and the likeliest token, once a step",
];

pub fn run() -> Outcome {
    let device = device()?;
    let (decode, prefill) = (Parts::new(&device, 1)?, Parts::new(&device, CONTEXT)?);
    let (decode, prefill) = (decode.times()?, prefill.times()?);
    println!("{BATCH} sequences of {CONTEXT} tokens; device time of one of {} layers, in us", QWEN3.layers);
    println!("| | decode | prefill |");
    println!("|---|---|---|");
    for (name, (decode, prefill)) in NAMES.iter().zip(decode.iter().zip(&prefill)) {
        println!("| {name} | {decode:.1} | {prefill:.1} |");
    }
    let total = |times: &[f64]| {
        let (once, layers) = times.split_last().expect("there are operations");
        (layers.iter().sum::<f64>() * QWEN3.layers as f64 + once) / 1e3
    };
    println!("| a step, ms | {:.2} | {:.1} |", total(&decode), total(&prefill));
    Ok(())
}

/// Sequences with `len` new tokens each: one token after `CONTEXT` cached tokens, or the whole context.
struct Parts {
    device: Device,
    len: usize,
    gpu: Gpu,
    stream: CudaStream,
    arena: kvarena_candle::KvArena,
    items: Vec<Extend>,
}

impl Parts {
    fn new(device: &Device, len: usize) -> Outcome<Self> {
        let tokens = (BATCH * (CONTEXT + 16)) as u32;
        let mut arena = QWEN3.arena(device, tokens, tokens)?;
        let Either::Right(cuda) = arena.engine.backend() else { return Err("no GPU".into()) };
        let (gpu, stream) = (cuda.gpu().clone(), cuda.stream().clone());
        let mut items = Vec::new();
        for first in 0..BATCH as u32 {
            let prompt = (0..CONTEXT as u32).map(|at| TokenId::new(first * 1000 + at));
            let prompt: Vec<TokenId> = prompt.collect();
            let seq = arena.engine.admit(Namespace::default(), &prompt, 0)?;
            items.push(Extend { seq, len: CONTEXT as u32 });
        }
        if len < CONTEXT {
            // This step runs no layer, because the times do not depend on the values of K and V.
            let id = arena.step(&items)?.launched();
            for item in &mut items {
                arena.engine.append(item.seq, &[TokenId::new(1)])?;
                item.len = len as u32;
            }
            arena.close(id)?;
        }
        Ok(Self { device: device.clone(), len, gpu, stream, arena, items })
    }

    fn random(&self, dims: &[usize]) -> candle::Result<Tensor> {
        Tensor::randn(0f32, 0.02, dims, &self.device)?.to_dtype(DType::BF16)
    }

    /// Returns the microseconds of each operation, in the order of `NAMES`.
    fn times(mut self) -> Outcome<Vec<f64>> {
        let (shape, rows) = (QWEN3, BATCH * self.len);
        let [heads, kv_heads] = [shape.q_heads, shape.kv_heads];
        let weight = |out, of| self.random(&[out, of])?.t();
        let x = self.random(&[rows, shape.hidden])?;
        let wide = self.random(&[rows, shape.intermediate])?;
        let q = self.random(&[rows, heads, shape.head_dim])?;
        let k = self.random(&[rows, kv_heads, shape.head_dim])?;
        let all = q.reshape((rows, heads * shape.head_dim))?;
        let [to_q, to_kv] =
            [weight(heads * shape.head_dim, shape.hidden)?, weight(kv_heads * shape.head_dim, shape.hidden)?];
        let [from_q, up, down] = [
            weight(shape.hidden, heads * shape.head_dim)?,
            weight(shape.intermediate, shape.hidden)?,
            weight(shape.hidden, shape.intermediate)?,
        ];
        let [of_rows, of_heads] = [self.random(&[shape.hidden])?, self.random(&[shape.head_dim])?];
        let turns = self.random(&[rows, shape.head_dim / 2])?;
        let rope = |x: &Tensor| rope_thd(&x.unsqueeze(0)?, &turns, &turns);
        let last = self.random(&[BATCH, shape.hidden])?;
        let head = weight(shape.vocab as usize, shape.hidden)?;
        let products = || {
            for (x, weight) in [(&x, &to_q), (&x, &to_kv), (&x, &to_kv), (&all, &from_q)] {
                x.matmul(weight)?;
            }
            x.matmul(&up)?;
            x.matmul(&up)?;
            wide.matmul(&down)
        };
        let mut times = vec![
            self.time(products)?,
            2.0 * self.time(|| rms_norm(&x, &of_rows, 1e-6))?,
            self.time(|| rms_norm(&q, &of_heads, 1e-6).and(rms_norm(&k, &of_heads, 1e-6)))?,
            self.time(|| rope(&q).and(rope(&k)))?,
        ];
        let after = [
            self.time(|| silu(&wide))?,
            self.time(|| &wide * &wide)?,
            2.0 * self.time(|| &x + &x)?,
            self.time(|| last.matmul(&head)?.argmax(candle::D::Minus1))?,
        ];
        let attend = Attend::new(heads as u32, shape.head_dim as u32);
        let (arena, items) = (&mut self.arena, &self.items);
        let step = arena.step(items)?;
        let timer = (&self.gpu, &self.stream, &self.device);
        times.push(time(timer, || Ok(step.attend(0, &attend, &q, &k, &k)?))?);
        times.extend(after);
        Ok(times)
    }

    fn time(&self, call: impl Fn() -> candle::Result<Tensor>) -> Outcome<f64> {
        time((&self.gpu, &self.stream, &self.device), call)
    }
}

/// Returns the microseconds of a call on the device.
fn time(
    (gpu, stream, device): (&Gpu, &CudaStream, &Device),
    call: impl Fn() -> candle::Result<Tensor>,
) -> Outcome<f64> {
    let slow = Tensor::ones((8192, 8192), DType::BF16, device)?;
    let (mut from, mut to) = (CudaEvent::new(gpu, true)?, CudaEvent::new(gpu, true)?);
    call()?;
    for _ in 0..8 {
        slow.matmul(&slow)?;
    }
    from.record(stream)?;
    for _ in 0..REPEATS {
        call()?;
    }
    to.record(stream)?;
    device.synchronize()?;
    Ok(f64::from(to.elapsed_ms(&from)?) * 1e3 / REPEATS as f64)
}
