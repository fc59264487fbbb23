//! Compares small kernels with their specification, if there is a GPU. `gpu_experts.rs` tests experts, biases and norms
//! of outputs; `gpu_products.rs` tests products.
#![cfg(feature = "cuda")]

mod common;

use common::gpu::{EPS, Numbers, buffer, close, device, read};
use common::twin;
use half::bf16;
use kvarena::backend::cuda::PinnedBuffer;
use kvarena_host::gpu::kernels::{
    DeviceDraw, DeviceShape, EmbedParams, FillParams, FoldParams, NormParams, SampleParams, ShapedParams, SiluMulParams,
};
use kvarena_host::ops;
use kvarena_host::sample::{Sampling, gumbel};
use kvarena_host::shaping::{self, Edit};
use kvarena_host::source::{Random, Source};

#[test]
fn embed_and_norm() {
    let Some(device) = device() else { return };
    let mut numbers = Numbers(1);
    for hidden in [8, 64, 264, 1024, 4096, 8192] {
        let (vocab, rows) = (50, 9);
        let (table, weight) = (numbers.vec(vocab * hidden, 1.0), numbers.vec(hidden, 1.0));
        let sampled: Vec<u32> = (0..4).map(|_| numbers.below(vocab) as u32).collect();
        let tokens: Vec<i32> =
            (0..rows).map(|i| if i % 3 == 1 { -1 - (i as i32 % 4) } else { numbers.below(vocab) as i32 }).collect();
        let (d_table, d_weight) = (buffer(&device, &table), buffer(&device, &weight));
        let (d_tokens, d_sampled) = (buffer(&device, &tokens), buffer(&device, &sampled));
        let (x, normed) = (device.zeros(2 * rows * hidden).unwrap(), device.zeros(2 * rows * hidden).unwrap());
        let params = EmbedParams {
            table: d_table.address(),
            tokens: d_tokens.address(),
            sampled: d_sampled.address(),
            x: x.address(),
            weight: d_weight.address(),
            normed: normed.address(),
            hidden: hidden as u32,
            eps: EPS,
            scale: if hidden % 3 == 0 { 1.5 } else { 1.0 },
            reserved: 0,
        };
        let block = (hidden / 8).next_multiple_of(32) as u32;
        // SAFETY: all buffers have the sizes in the kernel's source.
        unsafe { device.kernels.embed.launch(device.raw(), (rows as u32, 1), block, &params) }.unwrap();
        let scaled =
            |row: &[bf16]| -> Vec<bf16> { row.iter().map(|x| bf16::from_f32(x.to_f32() * params.scale)).collect() };
        let picked: Vec<Vec<bf16>> = tokens
            .iter()
            .map(|&t| if t < 0 { sampled[(-1 - t) as usize] as usize } else { t as usize })
            .map(|t| scaled(&table[t * hidden..][..hidden]))
            .collect();
        assert_eq!(read::<bf16>(&x, rows * hidden), picked.concat());
        let expected: Vec<bf16> = picked.iter().flat_map(|row| twin::rms_norm(row, &weight, EPS)).collect();
        close(&read(&normed, rows * hidden), &expected, "embed");

        let draws: Vec<DeviceDraw> =
            (0..5).map(|_| DeviceDraw { row: numbers.below(rows) as u32, ..Default::default() }).collect();
        let d_draws = buffer(&device, &draws);
        let params = NormParams {
            x: x.address(),
            weight: d_weight.address(),
            normed: normed.address(),
            draws: d_draws.address(),
            hidden: hidden as u32,
            eps: EPS,
        };
        // SAFETY: as above.
        unsafe { device.kernels.rms_norm.launch(device.raw(), (5, 1), block, &params) }.unwrap();
        let expected: Vec<bf16> =
            draws.iter().flat_map(|draw| twin::rms_norm(&picked[draw.row as usize], &weight, EPS)).collect();
        close(&read(&normed, 5 * hidden), &expected, "rms_norm");
    }
}

#[test]
fn activation() {
    let Some(device) = device() else { return };
    let mut numbers = Numbers(3);
    for width in [8, 264, 3072, 14336] {
        let rows = 5;
        let gate_up = numbers.vec(rows * 2 * width, 4.0);
        let (d_gate_up, out) = (buffer(&device, &gate_up), device.zeros(2 * rows * width).unwrap());
        let params =
            SiluMulParams { gate_up: d_gate_up.address(), out: out.address(), width: width as u32, reserved: 0 };
        let grid = ((width / 8).div_ceil(128) as u32, rows as u32);
        // SAFETY: the buffers have the sizes in the kernel's source.
        unsafe { device.kernels.silu_mul.launch(device.raw(), grid, 128, &params) }.unwrap();
        let expected: Vec<bf16> =
            gate_up.chunks(2 * width).flat_map(|row| twin::activate(row, ops::silu_times)).collect();
        close(&read(&out, rows * width), &expected, "silu_mul");
        // SAFETY: as above.
        unsafe { device.kernels.gelu_mul.launch(device.raw(), grid, 128, &params) }.unwrap();
        let expected: Vec<bf16> =
            gate_up.chunks(2 * width).flat_map(|row| twin::activate(row, ops::gelu_times)).collect();
        close(&read(&out, rows * width), &expected, "gelu_mul");
    }
}

#[test]
fn random_weights() {
    let Some(device) = device() else { return };
    let mut random = Random { seed: 9 };
    let (rows, cols) = (37, 129);
    let out = device.zeros(2 * rows * cols).unwrap();
    let params = FillParams {
        out: out.address(),
        count: (rows * cols) as u64,
        seed: random.seed_of("a name"),
        scale: Random::scale(cols),
        offset: 0.0,
    };
    // SAFETY: the buffer has memory for that many numbers.
    unsafe { device.kernels.fill.launch(device.raw(), (3, 1), 256, &params) }.unwrap();
    let filled: Vec<bf16> = read(&out, rows * cols);
    let matrix = random.matrix("a name", rows, cols).expect("numbers");
    let mut expected = vec![0.0; cols];
    for (i, row) in filled.chunks_exact(cols).enumerate() {
        matrix.row(i, &mut expected);
        assert_eq!(twin::wide(row), expected);
    }
}

fn device_draw(sampling: &Sampling, key: u64, shape: u64) -> DeviceDraw {
    let Sampling { temperature, top_p, top_k, .. } = *sampling;
    let inverse_temperature = if temperature > 0.0 { 1.0 / temperature } else { 0.0 };
    DeviceDraw { row: 0, inverse_temperature, top_p, top_k, key, shape }
}

/// Returns the value of a token whose maximum a draw takes.
fn score(sampling: &Sampling, key: u64, logits: &[f32], token: u32) -> f32 {
    let logit = logits[token as usize];
    if sampling.temperature > 0.0 { logit / sampling.temperature + gumbel(key, token) } else { logit }
}

#[test]
fn draws() {
    let Some(device) = device() else { return };
    let mut numbers = Numbers(5);
    let plain = Sampling { temperature: 0.7, seed: 3, ..Sampling::default() };
    for (vocab, blocks) in [(512, 1), (4096, 2), (151_936, 64)] {
        let samplings = [
            Sampling::default(),
            plain,
            Sampling { top_k: 1, ..plain },
            Sampling { top_k: 40, ..plain },
            Sampling { top_p: 0.3, ..plain },
            Sampling { top_p: 0.95, ..plain },
            Sampling { top_k: 100, top_p: 0.8, ..plain },
        ];
        let rows = samplings.len();
        let logits = numbers.vec(rows * vocab, 3.0);
        let draws = samplings.iter().zip(0..).map(|(s, i)| device_draw(s, s.key(0, i), 0));
        let draws: Vec<DeviceDraw> = draws.collect();
        let host = PinnedBuffer::new(&device.gpu, 4 * (rows + 2)).unwrap();
        let answers = buffer(&device, &[host.as_slice().as_ptr() as u64]);
        let (d_logits, d_draws) = (buffer(&device, &logits), buffer(&device, &draws));
        let [thresholds, best, counters, sampled] = [4, 8, 4, 4].map(|bytes| device.zeros(bytes * rows).unwrap());
        let params = SampleParams {
            logits: d_logits.address(),
            draws: d_draws.address(),
            thresholds: thresholds.address(),
            best: best.address(),
            counters: counters.address(),
            sampled: sampled.address(),
            host: answers.address(),
            vocab: vocab as u32,
            first: 2,
        };
        // The second launch checks that the first one left its counters at zero.
        for _ in 0..2 {
            // SAFETY: all buffers have the sizes in the kernels' source.
            unsafe {
                device.kernels.sample_filter.launch(device.raw(), (rows as u32, 1), 1024, &params).unwrap();
                device.kernels.sample.launch(device.raw(), (blocks, rows as u32), 256, &params).unwrap();
            }
        }
        let tokens: Vec<u32> = read(&sampled, rows);
        let answers: &[u32] = bytemuck::cast_slice(host.as_slice());
        assert_eq!(&answers[2..2 + rows], tokens);
        for (i, sampling) in samplings.iter().enumerate() {
            let row = twin::wide(&logits[i * vocab..][..vocab]);
            let expected = sampling.choose(draws[i].key, &row);
            let score = |token: u32| score(sampling, draws[i].key, &row, token);
            // The device's logarithms are slightly less accurate, so it may choose the other of two nearly equal
            // tokens.
            let (actual, wanted) = (score(tokens[i]), score(expected));
            assert!((actual - wanted).abs() < 1e-4, "{vocab}, {sampling:?}: {} is not {expected}", tokens[i]);
        }
    }
}

/// Compares tokens from edited logits with the specification: every kind of list with every kind of draw. Rows without
/// a shape keep their token.
#[test]
fn shaped_draws() {
    let Some(device) = device() else { return };
    let mut numbers = Numbers(11);
    let plain = Sampling { temperature: 0.7, seed: 3, ..Sampling::default() };
    let samplings = [
        Sampling::default(),
        plain,
        Sampling { min_p: 0.1, ..plain },
        Sampling { top_k: 20, ..plain },
        Sampling { top_k: 100_000, min_p: 0.01, ..plain },
        Sampling { top_p: 0.6, ..plain },
        Sampling { top_k: 9, top_p: 0.9, min_p: 0.02, ..plain },
    ];
    for vocab in [512, 4096, 12_008] {
        // No edits; edits of some tokens; edits of all tokens; some allowed tokens; some forbidden tokens; no allowed
        // token.
        let lists = [(0, false), (40, false), (vocab, false), (60, true), (300, false), (0, true)];
        let rows = lists.len() * samplings.len() + 1;
        let mut logits = numbers.vec(rows * vocab, 3.0);
        // Equal logits, both zeros, and minus infinity.
        for at in 0..rows * vocab / 5 {
            logits[5 * at] = bf16::from_f32([2.5, 0.0, -0.0, f32::NEG_INFINITY][at % 4]);
        }
        let (mut edits, mut shapes, mut draws, mut expected) = (vec![], vec![], vec![], vec![]);
        for (row, (count, only)) in lists.iter().flat_map(|list| [*list; 7]).enumerate() {
            let sampling = samplings[row % samplings.len()];
            let start = edits.len();
            let mut tokens: Vec<usize> = (0..count).map(|_| numbers.below(vocab)).collect();
            if count == vocab {
                tokens = (0..vocab).collect();
            }
            tokens.sort_unstable();
            tokens.dedup();
            edits.extend(tokens.into_iter().map(|token| Edit {
                token: token as u32,
                before: numbers.below(5) as f32 * 0.37 - 0.7,
                repetition: [1.0, 1.3, 0.8][numbers.below(3)],
                after: if count == 300 && numbers.below(2) == 0 {
                    f32::NEG_INFINITY
                } else {
                    numbers.below(7) as f32 * 0.11 - 0.3
                },
            }));
            let key = sampling.key(1, row as u32);
            shapes.push(DeviceShape {
                start: start as u32,
                count: (edits.len() - start) as u32,
                only: u32::from(only),
                depth: if sampling.temperature > 0.0 { sampling.depth() } else { f32::INFINITY },
            });
            draws.push(device_draw(&sampling, key, shapes.len() as u64));
            let mut edited = Vec::new();
            let own = twin::wide(&logits[row * vocab..][..vocab]);
            shaping::apply(&edits[start..], only, &own, &mut edited);
            expected.push((sampling, key, sampling.choose(key, &edited), edited));
        }
        draws.push(DeviceDraw::default());
        let before = vec![77_u32; rows];
        let mut host = PinnedBuffer::new(&device.gpu, 4 * (rows + 2)).unwrap();
        host.as_mut_slice().fill(0);
        let answers = buffer(&device, &[host.as_slice().as_ptr() as u64]);
        let (d_logits, d_draws) = (buffer(&device, &logits), buffer(&device, &draws));
        let (d_shapes, d_edits) = (buffer(&device, &shapes), buffer(&device, &edits));
        let sampled = buffer(&device, &before);
        let params = ShapedParams {
            logits: d_logits.address(),
            draws: d_draws.address(),
            shapes: d_shapes.address(),
            edits: d_edits.address(),
            sampled: sampled.address(),
            host: answers.address(),
            vocab: vocab as u32,
            first: 2,
        };
        let grid = (rows as u32, 1);
        // SAFETY: all buffers have the sizes in the kernel's source; tokens are below the vocabulary.
        unsafe { device.kernels.sample_shaped.launch(device.raw(), grid, 1024, &params) }.unwrap();
        let tokens: Vec<u32> = read(&sampled, rows);
        let answers: &[u32] = bytemuck::cast_slice(host.as_slice());
        assert_eq!(answers[2..rows + 1], tokens[..rows - 1]);
        assert_eq!((tokens[rows - 1], answers[rows + 1]), (77, 0), "a row without a shape");
        for (row, (sampling, key, wanted, edited)) in expected.into_iter().enumerate() {
            let score = |token: u32| score(&sampling, key, &edited, token);
            let is_near = sampling.temperature > 0.0 && (score(tokens[row]) - score(wanted)).abs() < 1e-4;
            assert!(
                tokens[row] == wanted || is_near,
                "{vocab}, row {row}, {sampling:?}: {} is not {wanted}",
                tokens[row]
            );
        }
    }
}

#[test]
fn folded_norms() {
    let Some(device) = device() else { return };
    let mut numbers = Numbers(7);
    let (rows, cols) = (37, 136);
    let (matrix, weight) = (numbers.vec(rows * cols, 1.0), numbers.vec(cols, 1.0));
    let (d_matrix, d_weight) = (buffer(&device, &matrix), buffer(&device, &weight));
    let params = FoldParams {
        matrix: d_matrix.address(),
        weight: d_weight.address(),
        count: matrix.len() as u64,
        cols: cols as u32,
        reserved: 0,
    };
    // SAFETY: the buffers have the sizes in the kernel's source.
    unsafe { device.kernels.fold.launch(device.raw(), (3, 1), 256, &params) }.unwrap();
    let product = |(i, x): (usize, &bf16)| bf16::from_f32(x.to_f32() * weight[i % cols].to_f32());
    let expected: Vec<bf16> = matrix.iter().enumerate().map(product).collect();
    assert_eq!(read::<bf16>(&d_matrix, matrix.len()), expected);
}
