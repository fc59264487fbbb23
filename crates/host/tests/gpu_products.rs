//! Compares the kernels of matrix products with their specification, if there is a GPU.
#![cfg(feature = "cuda")]

mod common;

use common::gpu::{EPS, Numbers, buffer, close, device, read};
use common::twin;
use half::bf16;
use kvarena_host::gpu::gemm::{Gemm, GemmMethod};
use kvarena_host::gpu::kernels::{DeviceDraw, ProductMode, SKINNY, SkinnyParams};

#[test]
fn skinny_products() {
    let Some(device) = device() else { return };
    let mut numbers = Numbers(4);
    for (kernel, (entry, tiles)) in SKINNY.iter().enumerate() {
        for (number, (ins, tokens)) in
            [(64, 1), (192, 3), (512, 8), (1024, 16), (2048, 9), (4160, 16)].into_iter().enumerate()
        {
            for mode in [ProductMode::Set, ProductMode::Add, ProductMode::Silu] {
                if mode == ProductMode::Silu && *tiles == 1 {
                    continue;
                }
                let outs = 96;
                let matrices = if mode == ProductMode::Silu { 2 } else { 1 };
                let size = (1.0 / ins as f32).sqrt();
                let weight = numbers.vec(matrices * outs * ins, size);
                let (x, norm) = (numbers.vec(16 * ins, 1.0), numbers.vec(ins, 1.0));
                let y = numbers.vec(tokens * outs, 1.0);
                let normed = number % 2 == 0;
                let draws: Vec<DeviceDraw> =
                    (0..tokens).map(|_| DeviceDraw { row: numbers.below(16) as u32, ..Default::default() }).collect();
                let gathered = number % 3 == 0;
                let (d_weight, d_x, d_norm) = (buffer(&device, &weight), buffer(&device, &x), buffer(&device, &norm));
                let (d_y, d_draws) = (buffer(&device, &y), buffer(&device, &draws));
                let params = SkinnyParams {
                    weight: d_weight.address(),
                    x: d_x.address(),
                    y: d_y.address(),
                    norm: if normed { d_norm.address() } else { 0 },
                    draws: if gathered { d_draws.address() } else { 0 },
                    next: d_weight.address(),
                    outs: outs as u32,
                    ins: ins as u32,
                    tokens: tokens as u32,
                    mode: mode as u32,
                    eps: EPS,
                    next_lines: (weight.len() / 64) as u32,
                };
                let taken = if mode == ProductMode::Silu { 4 * tiles } else { 8 * tiles };
                // SAFETY: all buffers have the sizes in the kernel's source.
                unsafe { device.kernels.skinny[kernel].launch(device.raw(), ((outs / taken) as u32, 1), 256, &params) }
                    .unwrap();
                let mut expected = y.clone();
                for (token, y) in expected.chunks_exact_mut(outs).enumerate() {
                    let row = if gathered { draws[token].row as usize } else { token };
                    twin::skinny(&x[row * ins..][..ins], &weight, normed.then_some((&norm[..], EPS)), mode, y);
                }
                close(
                    &read(&d_y, tokens * outs),
                    &expected,
                    &format!("{}, {ins} columns, {tokens} rows, {mode:?}", entry.name()),
                );
            }
        }
    }
}

#[test]
fn gemm_products() {
    let Some(device) = device() else { return };
    if device.kernels.gemm.is_empty() {
        println!("not run: needs compute capability 9.0");
        return;
    }
    let mut numbers = Numbers(6);
    let modes = [ProductMode::Set, ProductMode::Add, ProductMode::Silu];
    for (outs, ins, tokens) in [
        (64, 64, 1),
        (72, 200, 16),
        (320, 512, 9),
        (136, 1096, 17),
        (256, 640, 32),
        (72, 512, 33),
        (512, 1024, 64),
        (264, 1032, 65),
        (128, 2048, 100),
        (392, 520, 128),
        (128, 576, 130),
        (256, 1024, 256),
        (64, 512, 300),
    ] {
        let size = (1.0 / ins as f32).sqrt();
        let (weight, x) = (numbers.vec(2 * outs * ins, size), numbers.vec(tokens * ins, 1.0));
        let before = numbers.vec(tokens * outs, 1.0);
        let (d_weight, d_x) = (buffer(&device, &weight), buffer(&device, &x));
        for (mode, norm) in modes.into_iter().flat_map(|mode| [(mode, None), (mode, Some(EPS))]) {
            let ones = vec![bf16::ONE; ins];
            let mut expected = before.clone();
            for (x, y) in x.chunks_exact(ins).zip(expected.chunks_exact_mut(outs)) {
                let matrices = if mode == ProductMode::Silu { 2 } else { 1 };
                let norm = norm.map(|eps| (&ones[..], eps));
                twin::skinny(x, &weight[..matrices * outs * ins], norm, mode, y);
            }
            for method in GemmMethod::all(outs, ins, tokens) {
                // The kernel must not write past the end.
                let guarded = [&before[..], &before[..8]].concat();
                let d_y = buffer(&device, &guarded);
                let (weight, x, y) = (d_weight.address(), d_x.address(), d_y.address());
                let gemm = Gemm { weight, x, y, outs, ins, tokens, mode, norm };
                // SAFETY: all buffers have the sizes in the kernel's source.
                unsafe { method.launch(&device, &gemm) }.unwrap();
                let what = format!("{}, {outs} of {ins}, {tokens} rows, {mode:?}, {norm:?}", method.name());
                let after: Vec<bf16> = read(&d_y, guarded.len());
                close(&after[..tokens * outs], &expected, &what);
                assert_eq!(after[tokens * outs..], before[..8], "{what}");
            }
        }
    }
}
