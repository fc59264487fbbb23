//! Tests the contract of backends (B1 to B7) against shadows of every byte and attention in float64.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use kvarena::backend::Either;
use kvarena::backend::cuda::{CudaError, Prepare};
use kvarena::testkit::contract::{
    Case, Filter, check_backend, check_cases, check_rotated, check_served, check_sparse_backend,
};
use kvarena::{
    Attend, Capacity, CpuOptions, KvDtype, KvShape, OpenBackend, PoolConfig, TableShape,
};

use crate::on_gpu::OnGpuOptions;
use crate::{device, gpu, seeds};

#[test]
fn cuda_keeps_the_contract() {
    let Some(gpu) = gpu() else { return };
    println!("{}", check_backend(|case| OnGpuOptions::new(&gpu).for_case(case), seeds(200)));
}

/// A backend chosen at run time, the GPU's in every second case.
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

/// Layers in several groups, over every kind of pool: pages that a group no longer reads are released and poisoned.
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

/// Layers that read everything have one length of heads, the others another.
#[test]
fn cuda_keeps_the_contract_over_two_lengths_of_heads() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::with_all_spans(&gpu).for_case(case);
    for (full, limited) in [(64, 128), (64, 256), (128, 64), (128, 256), (256, 64), (256, 128)] {
        let report = check_cases(&Filter::head_dims(full, limited), options, seeds(12));
        println!("{full}, {limited}: {report}");
    }
}

/// Only pools of fp8, which other tests draw one time in four.
#[test]
fn cuda_keeps_the_contract_over_fp8() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::new(&gpu).for_case(case);
    println!("{}", check_cases(&Filter::FP8, options, seeds(200)));
}

/// Norm, rotation and store in one call, over rows of every type, fp8 and labels.
#[test]
fn cuda_keeps_the_contract_of_rotated_rows() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::new(&gpu).for_case(case);
    println!("{}", check_rotated(&Filter::KERNEL_HEADS, options, seeds(60)));
    println!("{}", check_rotated(&Filter::KERNEL_HEADS.in_groups(), options, seeds(10)));
}

/// Only pools with labels: selections bit by bit, and attention over selections and any other lists.
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
    // A few of them launch that kernel.
    let seeds = seeds(50);
    println!("{}", check_cases(&Filter::SPANS, options, 2 * seeds.start..2 * seeds.end));
}

/// Plans of an engine whose texts share prefixes, over 16 bits and fp8, with every span read once.
#[test]
fn an_engine_serves_texts_that_share_spans() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::with_all_spans(&gpu).for_case(case);
    let (seeds, mut once) = (seeds(60), 0);
    let report = check_served(false, options, seeds.clone(), |backend| {
        once += u32::from(backend.cuda.span_work().is_some());
    });
    println!("{report}; {once} launches read a span once");
    assert!(once > 0 || seeds.count() < 5, "no span is read once");
}

/// Bytes with scales of heads or of tokens, and few or many query rows of a tail.
#[test]
fn cuda_keeps_the_contract_where_spans_of_fp8_are_read_once() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::with_all_spans(&gpu).for_case(case);
    println!("{}", check_cases(&Filter::FP8_SPANS, options, seeds(100)));
}

/// Groups of 9 to 16: the kernel for 16 query rows of a tail.
#[test]
fn cuda_keeps_the_contract_where_wide_groups_read_spans_once() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::with_all_spans(&gpu).for_case(case);
    println!("{}", check_cases(&Filter::WIDE_SPANS, options, seeds(50)));
}

/// A few new tokens a row, all of them members of spans.
#[test]
fn cuda_keeps_the_contract_where_short_queries_read_spans_once() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::with_all_spans(&gpu).for_case(case);
    println!("{}", check_cases(&Filter::SHORT_SPANS, options, seeds(50)));
}

/// Only pools of 16 bits and heads of 128, over which a kernel takes 17 to 64 query rows at once.
#[test]
fn cuda_keeps_the_contract_of_short_queries() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::new(&gpu).for_case(case);
    println!("{}", check_cases(&Filter::SHORT, options, seeds(100)));
}

/// Only latent rows, which other tests draw in one pool of twelve.
#[test]
fn cuda_keeps_the_contract_over_latent_rows() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::new(&gpu).for_case(case);
    println!("{}", check_cases(&Filter::LATENT, options, seeds(100)));
}

/// Latent rows of fp8 with rows of 16 bits, which have their own kernels.
#[test]
fn cuda_keeps_the_contract_over_latent_rows_of_fp8() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::new(&gpu).for_case(case);
    println!("{}", check_cases(&Filter::LATENT_FP8, options, seeds(100)));
}

/// Clusters of two CTAs that share their reads, which other tests draw in one pool of a few hundred.
#[test]
fn cuda_keeps_the_contract_over_latent_rows_of_pairs() {
    let Some(gpu) = gpu() else { return };
    let options = |case: &Case| OnGpuOptions::new(&gpu).for_case(case);
    println!("{}", check_cases(&Filter::LATENT_PAIRS, options, seeds(60)));
}

/// The kernels of other devices on any device, without Hopper's.
#[test]
fn cuda_keeps_the_contract_with_kernels_of_other_devices() {
    let Some(_gpu) = gpu() else { return };
    let all = seeds(40);
    for (i, capability) in [80, 89, 100, 120].into_iter().enumerate() {
        let device = device(0).expect("the device exists");
        let options = |case: &Case| {
            OnGpuOptions::with_all_spans(&device).for_case(case).with_capability(capability)
        };
        // The tests use different seeds, because their kernels are the same.
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

/// Around 4,096 kv heads, and the maximum that kernels support: a decode kernel stores a token's slot and head in one
/// word.
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
