//! The contract of backends (B1 to B7), against shadows of every byte and attention in float64.

use kvarena::testkit::contract::check_backend;

use crate::on_gpu::OnGpuOptions;
use crate::{gpu, seeds};

#[test]
fn cuda_keeps_the_contract() {
    let Some(gpu) = gpu() else { return };
    println!("{}", check_backend(|_| OnGpuOptions::new(&gpu), seeds(200)));
}

#[test]
fn cuda_keeps_the_contract_where_spans_are_read_once() {
    let Some(gpu) = gpu() else { return };
    println!("{}", check_backend(|_| OnGpuOptions::with_all_spans(&gpu), seeds(200)));
}
