//! Growth of cost with size. `cargo bench --bench growth -- FILE.svg` measures and draws six charts, and prints their
//! points; without a file it draws nothing. Costs that must not grow form flat lines: eviction from a larger tree,
//! allocation from a larger pool, plans for longer contexts.

#[path = "../cases/mod.rs"]
mod cases;
#[path = "../../examples/replay/chart.rs"]
mod chart;

use std::hint::black_box;
use std::path::PathBuf;

use cases::decode::Decode;
use cases::evict::{Evict, fits};
use cases::pages::{AllocFree, COUNT};
use cases::sample::{median, median_ns};
use cases::{Cache, NAMESPACE, whole_pages};
use chart::{BLUE, Chart, Form, RED, Series};
use kvarena::TokenId;
use plotters::style::RGBColor;

fn main() {
    if !cases::is_measured() {
        return;
    }
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let measure: [fn() -> Chart; 6] = [hit, insert, evict, alloc, plan, step];
    let charts: Vec<Chart> = measure.into_iter().map(|measure| report(measure())).collect();
    if let Some(file) = args.first().map(PathBuf::from) {
        chart::draw(&file, (1200, 900), 2, &charts).expect("the file can be written");
        println!("drawn to {}", file.display());
    }
}

fn report(chart: Chart) -> Chart {
    println!("{} ({} by {})", chart.title, chart.y, chart.x);
    for series in &chart.series {
        let points = series.points.iter().map(|(x, y)| format!("{x}: {y:.1}"));
        println!("  {:<28} {}", series.name, points.collect::<Vec<_>>().join("  "));
    }
    chart
}

/// Measures a line of a chart.
fn series(name: &str, sizes: &[usize], mut measure: impl FnMut(usize) -> f64) -> Series {
    let points = sizes.iter().map(|&size| (size as f64, measure(size)));
    Series { name: name.to_owned(), colour: BLUE, form: Form::Dots, points: points.collect() }
}

fn chart(title: &str, x: &'static str, mut series: Vec<Series>) -> Chart {
    let colours = [BLUE, RED, RGBColor(96, 150, 96)];
    series.iter_mut().zip(colours).for_each(|(series, colour)| series.colour = colour);
    Chart { title: title.to_owned(), x, y: "ns", is_log: true, series }
}

/// Returns a sequence of `len` tokens that shares no prefix.
fn own_sequence(number: usize, len: usize) -> Vec<TokenId> {
    let token = |i: usize| TokenId::new(((number << 20) + i) as u32 ^ 0x5555);
    (0..len).map(token).collect()
}

/// Number of sequences of `hit` and `insert`.
const SEQUENCES: usize = 16;

fn hit() -> Chart {
    let lens = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18];
    let one = |page_size: u32| {
        series(&format!("page_size {page_size}"), &lens, |len| {
            let mut cache = Cache::new(whole_pages(len * SEQUENCES, page_size), page_size);
            let sequences: Vec<_> = (0..SEQUENCES).map(|s| own_sequence(s, len)).collect();
            sequences.iter().for_each(|tokens| _ = cache.cycle(tokens));
            let (mut i, mut out) = (0, Vec::with_capacity(len));
            median_ns(50, SEQUENCES, || {
                i = (i + 1) % SEQUENCES;
                out.clear();
                let collect = |pages: &[_]| out.extend_from_slice(pages);
                let found = cache.tree.match_pages(NAMESPACE, black_box(&sequences[i]), collect);
                assert_eq!(found.pages(), whole_pages(len, page_size));
            })
        })
    };
    chart("hit: match and collect pages", "tokens matched", vec![one(1), one(16)])
}

fn insert() -> Chart {
    let lens = [1 << 10, 1 << 12, 1 << 14, 1 << 16];
    let one = |page_size: u32| {
        series(&format!("page_size {page_size}"), &lens, |len| {
            // The cache has room for half of the sequences. Once it is full, each cycle evicts an older one.
            let mut cache = Cache::new(whole_pages(len * SEQUENCES / 2, page_size), page_size);
            let sequences: Vec<_> = (0..SEQUENCES).map(|s| own_sequence(s, len)).collect();
            let mut i = 0;
            median_ns(50, SEQUENCES, || {
                i = (i + 1) % SEQUENCES;
                assert_eq!(cache.cycle(black_box(&sequences[i])), 0);
            })
        })
    };
    chart(
        "insert: a cycle that matches nothing and evicts as many pages as it inserts",
        "tokens inserted",
        vec![one(1), one(16)],
    )
}

fn evict() -> Chart {
    let one = |page_size: u32| {
        let mut sizes = vec![1000, 10_000, 100_000, 1_000_000];
        sizes.retain(|&leaves| fits(page_size, leaves));
        series(&format!("page_size {page_size}"), &sizes, |leaves| {
            let mut evict = Evict::new(page_size, leaves);
            evict.warm_up();
            let mut samples = Vec::new();
            while samples.len() < 20 {
                samples.append(&mut evict.samples());
            }
            median(samples)
        })
    };
    chart("evict 256 tokens", "leaves of the tree", vec![one(1), one(16)])
}

fn alloc() -> Chart {
    let sizes = [1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 24];
    let one = |taken: u32| {
        series(&format!("{taken} % taken, at random"), &sizes, |pages| {
            let mut case = AllocFree::new(pages as u32, taken);
            case.check();
            median_ns(50, 100, || case.call()) / COUNT as f64
        })
    };
    chart("alloc and free of 128 pages, a page", "pages of the pool", vec![one(10), one(50), one(85)])
}

fn plan() -> Chart {
    let one = |name: &str, sizes: &[usize], make: &dyn Fn(usize) -> Decode| {
        series(name, sizes, |size| {
            let mut decode = make(size);
            let plans = (0..100).map(|_| {
                decode.prepare();
                let mut step = None;
                let ns = median_ns(1, 1, || step = Some(decode.plan()));
                decode.rest(step.expect("the step is planned"));
                ns
            });
            median(plans.collect())
        })
    };
    let batches = [1, 4, 16, 64, 256, 1024, 4096];
    let contexts = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18];
    chart(
        "plan of a decode step",
        "sequences of 1,024 tokens; tokens of each of 16 sequences",
        vec![
            one("by batch", &batches, &|batch| Decode::new(16, batch as u32, 1024)),
            one("by context, batch 16", &contexts, &|kv_len| Decode::new(16, 16, kv_len as u32)),
        ],
    )
}

fn step() -> Chart {
    let batches = [1, 4, 16, 64, 256, 1024, 4096, 10_000];
    let one = |page_size: u32| {
        series(&format!("page_size {page_size}"), &batches, |batch| {
            let mut decode = Decode::new(page_size, batch as u32, 512);
            let steps = (0..100).map(|_| {
                decode.prepare();
                median_ns(1, 1, || decode.step())
            });
            median(steps.collect())
        })
    };
    chart("a whole decode step", "running sequences", vec![one(1), one(16)])
}
