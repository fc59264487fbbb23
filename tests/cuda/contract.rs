//! Runs the tests of the backend contract on the CUDA backend. All tests of random cases compare every byte of the pool
//! with a copy on the host. These tests and those of served texts compare outputs with attention in float64.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use kvarena::backend::cuda::{CudaError, Prepare};
use kvarena::backend::{Either, OpenBackend};
use kvarena::layout::TableShape;
use kvarena::testkit::contract::{
    Case, Filter, check_backend, check_cases, check_rotated, check_served, check_sparse_backend,
};
use kvarena::{Attend, Capacity, CpuOptions, KvDtype, KvShape, PoolConfig};

use crate::on_gpu::OnGpuOptions;
use crate::{device, gpu, seeds};

#[test]
fn cuda_keeps_the_contract() {
    let Some(gpu) = gpu() else { return };
    println!("{}", check_backend(|case| OnGpuOptions::new(&gpu).for_case(case), seeds(200)));
}

/// Declares tests of the cases of a filter: options of the backend, filter, and number of seeds.
macro_rules! check_filters {
    ($($(#[$about:meta])* $test:ident: $options:ident, $filter:expr, $count:literal;)*) => {$(
        $(#[$about])*
        #[test]
        fn $test() {
            let Some(gpu) = gpu() else { return };
            let options = |case: &Case| OnGpuOptions::$options(&gpu).for_case(case);
            println!("{}", check_cases(&$filter, options, seeds($count)));
        }
    )*};
}

check_filters! {
    /// All pools are quantised. Without a filter, one drawn pool in four is.
    cuda_keeps_the_contract_over_fp8: new, Filter::FP8, 200;
    /// Quantised pools have static scales or scales by token. Suffixes have few or many query rows.
    cuda_keeps_the_contract_where_spans_of_fp8_are_read_once: with_all_spans, Filter::FP8_SPANS, 100;
    /// A kv head has 9 to 16 query heads, so the suffixes use the kernel for 16 query rows.
    cuda_keeps_the_contract_where_wide_groups_read_spans_once: with_all_spans, Filter::WIDE_SPANS, 50;
    /// Most rows that share spans have a few new tokens each, as in the verification of drafts.
    cuda_keeps_the_contract_where_short_queries_read_spans_once: with_all_spans, Filter::SHORT_SPANS, 50;
    /// All pools are 16-bit with a `head_dim` of 128. For them, Hopper has a decode kernel for 17 to 64 query rows.
    cuda_keeps_the_contract_of_short_queries: new, Filter::SHORT, 100;
    /// All pools have latent rows that kernels support. Without a filter, one drawn pool in twelve has them.
    cuda_keeps_the_contract_over_latent_rows: new, Filter::LATENT, 100;
    /// All pools have quantised latent rows, and q has 16-bit rows. Special kernels serve this combination.
    cuda_keeps_the_contract_over_latent_rows_of_fp8: new, Filter::LATENT_FP8, 100;
    /// Two CTAs of a cluster share their reads of latent rows. Without a filter, few pools have enough query heads for
    /// it.
    cuda_keeps_the_contract_over_latent_rows_of_pairs: new, Filter::LATENT_PAIRS, 60;
}

/// The backend is chosen at run time: every second case uses the GPU, the others the CPU.
#[test]
fn either_backend_keeps_the_contract() {
    let Some(gpu) = gpu() else { return };
    let on_gpu = AtomicBool::new(false);
    let options = |case: &Case| match on_gpu.fetch_not(Relaxed) {
        true => Either::Right(OnGpuOptions::new(&gpu).for_case(case)),
        false => {
            let (scales, labels) = (case.scales(), case.labels());
            Either::Left(CpuOptions { scales, labels, ..CpuOptions::with_threads(1) })
        }
    };
    println!("{}", check_backend(options, seeds(20)));
}

/// Layers form several groups, in every kind of pool. In random cases, about half of the sequences without forks
/// release pages that a group no longer reads; these pages are filled with NaN.
#[test]
fn cuda_keeps_the_contract_in_groups() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::with_all_spans(&gpu).for_case(case);
    println!("{}", check_cases(&Filter::ALL.in_groups(), options, seeds(200)));
    let seeds = seeds(60);
    for filter in [Filter::FP8, Filter::SHORT, Filter::SPANS, Filter::FP8_SPANS] {
        println!("{}", check_cases(&filter.in_groups(), options, seeds.clone()));
    }
    let few = seeds.start..seeds.start + seeds.clone().count().div_ceil(4) as u64;
    println!("{}", check_cases(&Filter::LATENT.in_groups(), options, few.clone()));
    println!("{}", check_cases(&Filter::LATENT_FP8.in_groups(), options, few));
    println!("{}", check_sparse_backend(&Filter::LABELS.in_groups(), options, seeds.clone()));
    println!("{}", check_served(true, options, seeds, |_| {}));
}

/// The layers that read all tokens have one `head_dim`, the layers of other groups have another.
#[test]
fn cuda_keeps_the_contract_over_two_lengths_of_heads() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::with_all_spans(&gpu).for_case(case);
    for (full, limited) in [(64, 128), (64, 256), (128, 64), (128, 256), (256, 64), (256, 128)] {
        let report = check_cases(&Filter::head_dims(full, limited), options, seeds(12));
        println!("{full}, {limited}: {report}");
    }
}

/// One call norms, rotates and stores. Cases have rows of every type, quantised pools and labels.
#[test]
fn cuda_keeps_the_contract_of_rotated_rows() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::new(&gpu).for_case(case);
    println!("{}", check_rotated(&Filter::KERNEL_HEADS, options, seeds(60)));
    println!("{}", check_rotated(&Filter::KERNEL_HEADS.in_groups(), options, seeds(10)));
}

/// All pools have labels. Selections must be equal bit by bit. Attention reads selections and random lists.
#[test]
fn cuda_keeps_the_contract_of_sparse_reads() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::new(&gpu).for_case(case);
    println!("{}", check_sparse_backend(&Filter::LABELS, options, seeds(200)));
}

#[test]
fn cuda_keeps_the_contract_where_spans_are_read_once() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::with_all_spans(&gpu).for_case(case);
    // Only some cases have spans that a kernel reads once, so the test runs twice as many.
    let seeds = seeds(50);
    println!("{}", check_cases(&Filter::SPANS, options, 2 * seeds.start..2 * seeds.end));
}

/// An engine plans steps of texts that share prefixes, in 16-bit and quantised pools. The backend reads spans once
/// wherever its kernels can.
#[test]
fn an_engine_serves_texts_that_share_spans() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::with_all_spans(&gpu).for_case(case);
    let (seeds, mut once) = (seeds(60), 0);
    let report = check_served(false, options, seeds.clone(), |backend| {
        once += u32::from(backend.cuda.span_work().is_some());
    });
    println!("{report}; {once} calls of attention read a span once");
    assert!(once > 0 || seeds.count() < 5, "no span is read once");
}

/// Any device can run the kernels that other devices select, except Hopper's.
#[test]
fn cuda_keeps_the_contract_with_kernels_of_other_devices() {
    let Some(_gpu) = gpu() else { return };
    let all = seeds(40);
    for (i, capability) in [80, 89, 100, 120].into_iter().enumerate() {
        let device = device(0).expect("the device exists");
        let options = |case: &Case| OnGpuOptions::with_all_spans(&device).for_case(case).with_capability(capability);
        // Several capabilities select the same kernels, so other seeds for each of them test more cases.
        let some = |count: u64| {
            let start = all.start + i as u64 * count;
            start..(start + count).min(start + all.end - all.start)
        };
        let reports = [
            check_backend(options, some(4)),
            check_cases(&Filter::SHORT, options, some(4)),
            check_cases(&Filter::SHORT_SPANS, options, some(4)),
            check_cases(&Filter::FP8_SPANS, options, some(4)),
            check_cases(&Filter::LATENT, options, some(1)),
            check_cases(&Filter::LATENT_FP8, options, some(1)),
        ];
        println!("{capability}: {reports:?}");
        let kernels = device.kernels();
        assert!(kernels.iter().any(|name| name.starts_with("attend_latent_")), "{kernels:?}");
        assert!(!kernels.iter().any(|name| name.ends_with("_sm90a")), "{kernels:?}");
    }
}

/// A device other than Hopper rejects Hopper's kernels if they are selected.
#[test]
fn kernels_of_hopper_are_refused_elsewhere() {
    let Some(gpu) = gpu() else { return };
    let config = PoolConfig {
        shape: KvShape::heads(1, 128),
        dtype: KvDtype::Bf16,
        capacity: Capacity::Pages(4),
        ..PoolConfig::default()
    };
    let options = OnGpuOptions::new(&gpu).with_capability(90);
    let table = TableShape::new(16, 1, 16, 16).expect("a small table");
    let layout = config.layout().expect("a small pool");
    let mut backend = options.open(&layout, &table, 1).expect("a small pool");
    let prepared = backend.cuda.prepare(&Prepare::new(&[Attend::new(1, 128)]));
    match gpu.capability() {
        90 => assert_eq!(prepared, Ok(())),
        of => assert!(
            matches!(prepared, Err(CudaError::Capability { capability, .. }) if capability == of),
            "{prepared:?}"
        ),
    }
}

/// Pools have about 4,096 kv heads, or the maximum that kernels support. A decode kernel stores a token's slot and head
/// in one word, so such numbers could overflow it.
#[test]
fn cuda_keeps_the_contract_of_many_kv_heads() {
    let Some(gpu) = gpu() else { return };
    for (kv_heads, count) in [(4_095, 3), (4_097, 3), (65_535, 1)] {
        let seeds = seeds(count);
        let seeds = seeds.start..seeds.end.min(seeds.start + count);
        let options = |case: &Case| OnGpuOptions::new(&gpu).for_case(case);
        println!("{kv_heads}: {}", check_cases(&Filter::many_heads(kv_heads), options, seeds));
    }
}
