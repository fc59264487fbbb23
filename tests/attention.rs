//! The CPU backend keeps the contract of backends: attention over pages is attention over contiguous K and V.

use kvarena::Cpu;
use kvarena::testkit::contract::check_backend;

#[test]
fn cpu_keeps_the_contract() {
    let report = check_backend(|| Cpu::with_threads(3), 0..100);
    println!("{report}");
}
