//! Measures attention and stores of the CPU backend on each of its paths, beside a plain read: see `table.rs`.
//!
//! ```text
//! cargo bench --bench attention             all cases, on all cores
//! cargo bench --bench attention -- fp8      cases with "fp8" in their names
//! taskset -c 0 cargo bench --bench attention
//! ```

mod table;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // `cargo bench` passes `--bench`; `cargo test --benches` does not.
    if args.iter().any(|arg| arg == "--bench") {
        let only = args.iter().find(|arg| !arg.starts_with('-'));
        table::print(only.map_or("", String::as_str), |_| None);
    }
}
