//! If there is a GPU, compares the kernels of Gated DeltaNet and of gated attention with a naive computation in f64.
#![cfg(feature = "cuda")]

mod common;

use common::gpu::{EPS, Numbers, buffer, close, device, read};
use half::bf16;
use kvarena::backend::cuda::CudaEvent;
use kvarena_host::delta::{ConvDtype, DeltaConfig};
use kvarena_host::gpu::GpuError;
use kvarena_host::gpu::delta::{self, DeltaBuffers, DeltaRows, DeltaWeights};
use kvarena_host::gpu::device::Device;
use kvarena_host::gpu::kernels::GateParams;

/// One layer's weights, and the inputs of one step.
struct Layer {
    config: DeltaConfig,
    conv: Vec<bf16>,
    rate: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<bf16>,
    projected: Vec<bf16>,
}

/// One sequence's state in f64: the recurrent part, and the rows of the convolution's part.
#[derive(Clone)]
struct State {
    recurrent: Vec<f64>,
    inputs: Vec<Vec<f64>>,
}

fn wide(row: &[bf16]) -> Vec<f64> {
    row.iter().map(|x| x.to_f64()).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn unit(x: &[f64]) -> Vec<f64> {
    let len = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
    x.iter().map(|x| x / len).collect()
}

impl Layer {
    fn new(config: DeltaConfig, tokens: usize, numbers: &mut Numbers) -> Self {
        let mut floats = |len, size| numbers.vec(len, size).iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
        let rate = floats(config.value_heads, 1.0).iter().map(|x| -x.exp() / 8.0).collect();
        let dt_bias = floats(config.value_heads, 1.0);
        Self {
            conv: numbers.vec(4 * config.channels(), 0.5),
            rate,
            dt_bias,
            norm: numbers.vec(config.value_dim, 1.0),
            projected: numbers.vec(tokens * delta::projected_width(&config), 1.0),
            config,
        }
    }

    /// Advances a state by a token, and returns the gated output. All intermediate numbers are in f64, except that the
    /// outputs of the convolution and of the recurrence are rounded to bf16, as the kernels store them.
    fn advance(&self, state: &mut State, token: usize) -> Vec<f64> {
        let DeltaConfig { key_heads, value_heads, key_dim, value_dim, .. } = self.config;
        let (channels, width) = (self.config.channels(), delta::projected_width(&self.config));
        let row = wide(&self.projected[token * width..][..width]);
        state.inputs.push(row[..channels].to_vec());
        let convolved = |channel: usize| {
            let taps = wide(&self.conv[4 * channel..][..4]);
            let sum: f64 = taps.iter().zip(&state.inputs).map(|(tap, inputs)| tap * inputs[channel]).sum();
            bf16::from_f64(sum * sigmoid(sum)).to_f64()
        };
        let mixed: Vec<f64> = (0..channels).map(convolved).collect();
        state.inputs.remove(0);
        let (z, a) = (channels, channels + value_heads * value_dim);
        let mut out = Vec::new();
        for head in 0..value_heads {
            let key = head / (value_heads / key_heads) * key_dim;
            let (q, k) = (unit(&mixed[key..][..key_dim]), unit(&mixed[key_heads * key_dim + key..][..key_dim]));
            let v = &mixed[2 * key_heads * key_dim + head * value_dim..][..value_dim];
            let softplus = (1.0 + (row[a + head] + f64::from(self.dt_bias[head])).exp()).ln();
            let (decay, beta) = ((f64::from(self.rate[head]) * softplus).exp(), sigmoid(row[a + value_heads + head]));
            let s = &mut state.recurrent[head * key_dim * value_dim..][..key_dim * value_dim];
            s.iter_mut().for_each(|s| *s *= decay);
            let mut read = vec![0.0; value_dim];
            for (j, read) in read.iter_mut().enumerate() {
                let recalled: f64 = (0..key_dim).map(|i| s[i * value_dim + j] * k[i]).sum();
                (0..key_dim).for_each(|i| s[i * value_dim + j] += k[i] * beta * (v[j] - recalled));
                let sum: f64 = (0..key_dim).map(|i| s[i * value_dim + j] * q[i]).sum();
                *read = bf16::from_f64(sum / (key_dim as f64).sqrt()).to_f64();
            }
            let mean = read.iter().map(|x| x * x).sum::<f64>() / value_dim as f64;
            let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
            let gates = row[z + head * value_dim..].iter().zip(&self.norm);
            out.extend(read.iter().zip(gates).map(|(x, (z, w))| x * factor * w.to_f64() * z * sigmoid(*z)));
        }
        out
    }
}

/// The states of some slots: `stride` bytes each, of which `offset` precede the state.
struct Slots {
    bytes: Vec<u8>,
    offset: usize,
    stride: usize,
    recurrent_bytes: usize,
    channels: usize,
}

impl Slots {
    /// Returns slots of random states, except that slot 0 is zero.
    fn new(config: &DeltaConfig, count: usize, numbers: &mut Numbers) -> Self {
        let shape = config.state(ConvDtype::Bf16);
        let (offset, stride) = (32, (shape.bytes() + 32).next_multiple_of(16) + 48);
        let mut bytes = vec![0; count * stride];
        for slot in bytes.chunks_exact_mut(stride).skip(1) {
            let (recurrent, inputs) = slot[offset..][..shape.bytes()].split_at_mut(shape.recurrent_bytes);
            let floats: Vec<f32> = numbers.vec(recurrent.len() / 4, 0.3).iter().map(|x| x.to_f32()).collect();
            recurrent.copy_from_slice(bytemuck::cast_slice(&floats));
            inputs.copy_from_slice(bytemuck::cast_slice(&numbers.vec(inputs.len() / 2, 1.0)));
        }
        Self { bytes, offset, stride, recurrent_bytes: shape.recurrent_bytes, channels: config.channels() }
    }

    fn state(&self, slot: i32) -> State {
        let bytes = &self.bytes[slot as usize * self.stride + self.offset..];
        let (recurrent, rest) = bytes.split_at(self.recurrent_bytes);
        let recurrent = bytemuck::pod_collect_to_vec::<u8, f32>(recurrent).into_iter().map(f64::from).collect();
        let inputs = bytemuck::pod_collect_to_vec::<u8, bf16>(&rest[..6 * self.channels]);
        State { recurrent, inputs: inputs.chunks(self.channels).map(wide).collect() }
    }
}

/// The tokens of a row, and the slots that it reads and writes.
type Row = (usize, i32, i32);

fn check(config: DeltaConfig, rows: &[Row], numbers: &mut Numbers) {
    let Some(device) = device() else { return };
    let tokens: usize = rows.iter().map(|row| row.0).sum();
    let layer = Layer::new(config.clone(), tokens, numbers);
    let slots = Slots::new(&config, 1 + rows.iter().map(|row| row.1.max(row.2)).max().expect("rows") as usize, numbers);
    let starts: Vec<u32> = (0..=rows.len()).map(|n| rows[..n].iter().map(|row| row.0 as u32).sum()).collect();
    let (reads, writes): (Vec<i32>, Vec<i32>) = rows.iter().map(|row| (row.1, row.2)).unzip();
    let [d_starts, d_reads, d_writes] = [buffer(&device, &starts), buffer(&device, &reads), buffer(&device, &writes)];
    let (d_rate, d_dt_bias) = (buffer(&device, &layer.rate), buffer(&device, &layer.dt_bias));
    let [d_conv, d_norm, d_projected] = [&layer.conv, &layer.norm, &layer.projected].map(|x| buffer(&device, x));
    let d_states = buffer(&device, &slots.bytes);
    let out_width = config.value_width();
    let (mixed, out) =
        (device.zeros(2 * tokens * config.channels()).unwrap(), device.zeros(2 * tokens * out_width).unwrap());
    let weights = DeltaWeights {
        conv: d_conv.address(),
        rate: d_rate.address(),
        dt_bias: d_dt_bias.address(),
        norm: d_norm.address(),
    };
    let buffers = DeltaBuffers { projected: d_projected.address(), mixed: mixed.address(), out: out.address() };
    let device_rows = DeltaRows {
        rows: rows.len() as u32,
        tokens: tokens as u32,
        starts: d_starts.address(),
        reads: d_reads.address(),
        writes: d_writes.address(),
        states: d_states.address() + slots.offset as u64,
        stride: slots.stride as u64,
    };
    delta::check_sizes(&config).expect("the kernels support the sizes");
    // SAFETY: all buffers have the sizes in the kernels' source, and rows write slots of their own.
    unsafe { delta::launch(&device, &config, &device_rows, &weights, &buffers, EPS) }.unwrap();
    let out: Vec<bf16> = read(&out, tokens * out_width);
    let after = Slots { bytes: read(&d_states, slots.bytes.len()), ..slots };
    let what = format!("{rows:?} of {config:?}");
    let mut expected_slots = slots.bytes.clone();
    for (number, &(len, from, to)) in rows.iter().enumerate() {
        if to < 0 {
            continue;
        }
        let first = starts[number] as usize;
        let mut state = slots.state(from);
        let expected: Vec<f64> = (first..first + len).flat_map(|token| layer.advance(&mut state, token)).collect();
        let expected: Vec<bf16> = expected.into_iter().map(bf16::from_f64).collect();
        close(&out[first * out_width..][..len * out_width], &expected, &what);
        let written = after.state(to);
        assert_eq!(written.inputs, state.inputs, "row {number} of {what}");
        let largest = state.recurrent.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
        for (at, (actual, expected)) in written.recurrent.iter().zip(&state.recurrent).enumerate() {
            // Rounded outputs of the convolution may differ in the last bit.
            let bound = 2e-3 * largest;
            assert!((actual - expected).abs() <= bound, "row {number} of {what}, {at}: {actual} is not {expected}");
        }
        let place = to as usize * slots.stride + slots.offset;
        let bytes = config.state(ConvDtype::Bf16).bytes();
        expected_slots[place..place + bytes].copy_from_slice(&after.bytes[place..place + bytes]);
    }
    assert!(after.bytes == expected_slots, "{what}: other slots are unchanged");
}

fn sizes(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> DeltaConfig {
    DeltaConfig { layers: Vec::new(), key_heads, value_heads, key_dim, value_dim, kernel: 4 }
}

/// Rows in place, from another slot, without a state, and padding.
#[test]
fn states_advance_by_one_token() {
    let rows = [(1, 2, 2), (1, 4, 1), (1, 0, 3), (1, 0, -1), (1, 5, 5), (1, 0, -1)];
    // The projections of few heads have unused elements.
    let all = [sizes(2, 4, 32, 32), sizes(1, 4, 128, 128), sizes(1, 4, 32, 64), sizes(1, 2, 32, 32)];
    for (number, config) in all.into_iter().enumerate() {
        check(config, &rows, &mut Numbers(number as u64));
    }
}

/// Rows that begin and end at any place of a tile, with fewer tokens than the convolution reads, and with many.
#[test]
fn states_advance_by_many_tokens() {
    let rows = [(1, 2, 2), (2, 4, 1), (37, 0, 3), (2, 0, -1), (3, 5, 5), (4, 6, 7), (11, 8, 8), (16, 0, 9), (5, 0, -1)];
    let all = [sizes(2, 4, 32, 32), sizes(1, 4, 128, 128), sizes(1, 2, 32, 32)];
    for (number, config) in all.into_iter().enumerate() {
        check(config, &rows, &mut Numbers(100 + number as u64));
    }
}

#[test]
fn unsupported_sizes_are_rejected() {
    let supported = sizes(1, 4, 32, 32);
    assert!(delta::check_sizes(&supported).is_ok());
    for config in [sizes(1, 4, 64, 32), sizes(1, 4, 32, 48), DeltaConfig { kernel: 3, ..supported.clone() }] {
        assert!(delta::check_sizes(&config).is_err(), "{config:?}");
    }
}

#[test]
fn gates_of_attention() {
    let Some(device) = device() else { return };
    let mut numbers = Numbers(7);
    for (width, stride) in [(8, 24), (1024, 1032), (4096, 10_240)] {
        let rows = 3;
        let (x, gates) = (numbers.vec(rows * width, 1.0), numbers.vec(rows * stride, 2.0));
        let (d_x, d_gates) = (buffer(&device, &x), buffer(&device, &gates));
        let params =
            GateParams { x: d_x.address(), gates: d_gates.address(), width: width as u32, stride: stride as u32 };
        let grid = ((width / 8).div_ceil(128) as u32, rows as u32);
        // SAFETY: the buffers have the sizes in the kernel's source.
        unsafe { device.kernels.gate.launch(device.raw(), grid, 128, &params) }.unwrap();
        let pairs = x.chunks(width).zip(gates.chunks(stride)).flat_map(|(x, gates)| x.iter().zip(gates));
        let expected: Vec<bf16> = pairs.map(|(x, gate)| bf16::from_f64(x.to_f64() * sigmoid(gate.to_f64()))).collect();
        close(&read(&d_x, rows * width), &expected, "gate");
    }
}

/// Prints the time of one layer's kernels at the shape of Qwen3.5 9B: the best of ten graphs of ten launches. Rows
/// update their states in place, or write other slots.
#[test]
#[ignore = "measures a GPU"]
fn times_of_a_layer() {
    let Some(device) = device() else { return };
    let (config, mut numbers) = (sizes(16, 32, 128, 128), Numbers(1));
    let stride = config.state(ConvDtype::Bf16).bytes().next_multiple_of(256);
    for (rows, len, moves) in [(64, 1, false), (256, 1, false), (256, 1, true), (8, 2048, false), (1, 2048, false)] {
        let tokens = rows * len;
        let layer = Layer::new(config.clone(), tokens, &mut numbers);
        let states = device.zeros((1 + 2 * rows) * stride).unwrap();
        let starts: Vec<u32> = (0..=rows).map(|row| (row * len) as u32).collect();
        let reads: Vec<i32> = (1..=rows as i32).collect();
        let writes: Vec<i32> = reads.iter().map(|slot| slot + if moves { rows as i32 } else { 0 }).collect();
        let (d_starts, d_reads, d_writes) =
            (buffer(&device, &starts), buffer(&device, &reads), buffer(&device, &writes));
        let (d_rate, d_dt_bias) = (buffer(&device, &layer.rate), buffer(&device, &layer.dt_bias));
        let [d_conv, d_norm, d_projected] = [&layer.conv, &layer.norm, &layer.projected].map(|x| buffer(&device, x));
        let mixed = device.zeros(2 * tokens * config.channels()).unwrap();
        let out = device.zeros(2 * tokens * config.value_width()).unwrap();
        let weights = DeltaWeights {
            conv: d_conv.address(),
            rate: d_rate.address(),
            dt_bias: d_dt_bias.address(),
            norm: d_norm.address(),
        };
        let buffers = DeltaBuffers { projected: d_projected.address(), mixed: mixed.address(), out: out.address() };
        let device_rows = DeltaRows {
            rows: rows as u32,
            tokens: tokens as u32,
            starts: d_starts.address(),
            reads: d_reads.address(),
            writes: d_writes.address(),
            states: states.address(),
            stride: stride as u64,
        };
        // SAFETY: all buffers have the sizes in the kernel's source, and rows write slots of their own.
        let run = || unsafe { delta::launch(&device, &config, &device_rows, &weights, &buffers, EPS) };
        let ms = best_of(&device, 10, &run) / 10.0;
        let bytes = 2 * rows * config.state(ConvDtype::Bf16).bytes();
        println!(
            "{rows} rows of {len} tokens, other slots: {moves}: {:.1} us, {:.0} GB/s of states",
            ms * 1e3,
            bytes as f32 / ms / 1e6
        );
    }
}

/// Returns the least time in ms of ten launches of a graph of `count` runs.
fn best_of(device: &Device, count: usize, run: &dyn Fn() -> Result<(), GpuError>) -> f32 {
    run().unwrap();
    device.stream.synchronize().unwrap();
    let graph = device.stream.capture(|| (0..count).try_for_each(|_| run())).unwrap();
    let (mut begun, mut done) =
        (CudaEvent::new(&device.gpu, true).unwrap(), CudaEvent::new(&device.gpu, true).unwrap());
    let mut best = f32::INFINITY;
    for _ in 0..10 {
        begun.record(&device.stream).unwrap();
        // SAFETY: the graph's memory lives until the stream is waited for.
        unsafe { graph.launch(&device.stream) }.unwrap();
        done.record(&device.stream).unwrap();
        done.synchronize().unwrap();
        best = best.min(done.elapsed_ms(&begun).unwrap());
    }
    best
}
