//! If there is a GPU, compares its kernels for experts, biases and norms of outputs with their specification.
#![cfg(feature = "cuda")]

mod common;

use common::gpu::{EPS, Numbers, buffer, close, device, read};
use common::twin;
use half::bf16;
use kvarena_host::gpu::kernels::{BiasParams, ExpertsParams, NormAddParams, Route, RouteParams};

#[test]
fn biases_and_norms_of_outputs() {
    let Some(device) = device() else { return };
    let mut numbers = Numbers(11);
    for width in [8, 64, 264, 1024, 4096, 8192] {
        let rows = 5;
        let [x, y] = [0; 2].map(|_| numbers.vec(rows * width, 1.0));
        let [bias, weight] = [0; 2].map(|_| numbers.vec(width, 1.0));
        let [d_x, d_y, d_bias, d_weight] = [&x, &y, &bias, &weight].map(|numbers| buffer(&device, numbers));
        let params = BiasParams { y: d_y.address(), bias: d_bias.address(), width: width as u32, reserved: 0 };
        let grid = ((width / 8).div_ceil(128) as u32, rows as u32);
        // SAFETY: all buffers have the sizes in the kernel's source.
        unsafe { device.kernels.add_bias.launch(device.raw(), grid, 128, &params) }.unwrap();
        let sums: Vec<_> = y.chunks(width).map(|row| twin::add_bias(row, &bias)).collect();
        assert_eq!(read::<bf16>(&d_y, rows * width), sums.concat());

        let params = NormAddParams {
            x: d_x.address(),
            y: d_y.address(),
            weight: d_weight.address(),
            hidden: width as u32,
            eps: EPS,
        };
        let block = (width / 8).next_multiple_of(32) as u32;
        // SAFETY: as above.
        unsafe { device.kernels.norm_add.launch(device.raw(), (rows as u32, 1), block, &params) }.unwrap();
        let rows_of = x.chunks(width).zip(&sums);
        let expected: Vec<bf16> = rows_of.flat_map(|(x, y)| twin::norm_add(x, y, &weight, EPS)).collect();
        close(&read(&d_x, rows * width), &expected, "norm_add");
    }
}

#[test]
fn experts_of_each_token() {
    let Some(device) = device() else { return };
    let mut numbers = Numbers(12);
    for (hidden, width, experts, per_token) in [(8, 2, 1, 1), (64, 96, 4, 2), (128, 130, 32, 4), (96, 50, 256, 8)] {
        let tokens = 7;
        let small = (hidden as f32).powf(-0.5);
        let x = numbers.vec(tokens * hidden, 1.0);
        let router = numbers.vec(experts * hidden, small);
        let router_bias = numbers.vec(experts, 0.5);
        // Some sums exceed the clamps.
        let up = numbers.vec(experts * hidden * 2 * width, 8.0 * small);
        let up_bias = numbers.vec(experts * 2 * width, 1.0);
        let down = numbers.vec(experts * width * hidden, 0.1);
        let down_bias = numbers.vec(experts * hidden, 1.0);
        let old = numbers.vec(tokens * hidden, 1.0);
        let all = [&x, &router, &router_bias, &up, &up_bias, &down, &down_bias, &old];
        let [d_x, d_router, d_router_bias, d_up, d_up_bias, d_down, d_down_bias, d_y] =
            all.map(|numbers| buffer(&device, numbers));
        let chosen = tokens * per_token;
        let d_routes = device.zeros(8 * chosen).unwrap();
        let d_activated = device.zeros(2 * chosen * width).unwrap();
        let route = RouteParams {
            x: d_x.address(),
            weight: d_router.address(),
            bias: d_router_bias.address(),
            routes: d_routes.address(),
            hidden: hidden as u32,
            experts: experts as u32,
            per_token: per_token as u32,
            reserved: 0,
        };
        // SAFETY: all buffers have the sizes in the kernel's source.
        unsafe { device.kernels.route.launch(device.raw(), (tokens as u32, 1), 128, &route) }.unwrap();
        let routes: Vec<Route> = read(&d_routes, chosen);
        for (row, routes) in x.chunks(hidden).zip(routes.chunks(per_token)) {
            let expected = twin::route(row, &router, &router_bias, per_token);
            for (got, wanted) in routes.iter().zip(&expected) {
                assert_eq!(got.expert, wanted.expert, "{expected:?}");
                assert!((got.weight - wanted.weight).abs() < 1e-3, "{got:?} {wanted:?}");
            }
        }

        let params = ExpertsParams {
            x: d_x.address(),
            weight: d_up.address(),
            bias: d_up_bias.address(),
            routes: d_routes.address(),
            y: d_activated.address(),
            ins: hidden as u32,
            outs: width as u32,
            per_token: per_token as u32,
            add: 0,
        };
        let grid = (chosen as u32, width.div_ceil(128) as u32);
        // SAFETY: as above.
        unsafe { device.kernels.experts_up.launch(device.raw(), grid, 128, &params) }.unwrap();
        let activated: Vec<bf16> = read(&d_activated, chosen * width);
        let one = |(number, route): (usize, &Route)| {
            let (row, expert) = (&x[number / per_token * hidden..][..hidden], route.expert as usize);
            let weight = &up[expert * hidden * 2 * width..][..hidden * 2 * width];
            twin::expert_up(row, weight, &up_bias[expert * 2 * width..][..2 * width])
        };
        let expected: Vec<bf16> = routes.iter().enumerate().flat_map(one).collect();
        close(&activated, &expected, "experts_up");

        for (add, has_bias) in [(1, true), (0, false)] {
            let params = ExpertsParams {
                x: d_activated.address(),
                weight: d_down.address(),
                bias: if has_bias { d_down_bias.address() } else { 0 },
                y: d_y.address(),
                ins: width as u32,
                outs: hidden as u32,
                add,
                ..params
            };
            let before: Vec<bf16> = read(&d_y, tokens * hidden);
            let grid = (tokens as u32, hidden.div_ceil(256) as u32);
            // SAFETY: as above.
            unsafe { device.kernels.experts_down.launch(device.raw(), grid, 128, &params) }.unwrap();
            let mut expected = twin::wide(&before);
            if add == 0 {
                expected.fill(0.0);
            }
            for (number, route) in routes.iter().enumerate() {
                let (row, expert) = (&activated[number * width..][..width], route.expert as usize);
                let weight = &down[expert * width * hidden..][..width * hidden];
                let none = vec![bf16::ZERO; hidden];
                let bias = &down_bias[expert * hidden..][..hidden];
                let output = twin::expert_down(row, weight, if has_bias { bias } else { &none });
                let out = &mut expected[number / per_token * hidden..][..hidden];
                out.iter_mut().zip(output).for_each(|(out, y)| *out += route.weight * y);
            }
            close(&read(&d_y, tokens * hidden), &twin::narrow(&expected), "experts_down");
        }
    }
}
