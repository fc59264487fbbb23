//! The main cases in one table: median, lower bound (floor) in the same run, their ratio, and the goal.
//!
//! ```text
//! cargo bench --bench targets                    the table
//! cargo bench --bench targets -- --json          a JSON object a line
//! cargo bench --bench targets -- --only evict    groups of cases with "evict" in a name
//! ```
//!
//! Times are medians over runs of one or more calls on one thread. Other work on the machine makes them larger. The
//! floor of a hit, an insert and a replayed request is the comparison and copy of their bytes. The floor of an eviction
//! reads a leaf's columns and child entry, and copies its page ids, from slabs as large as the tree's. `nodes of 16` is
//! the time of a page that moves between tiers, in nodes of 16 pages.

mod cases;

use std::hint::black_box;

use cases::chats;
use cases::decode::Decode;
use cases::evict::{Evict, EvictFloor, SAMPLE, fits};
use cases::gather::Gather;
use cases::hit::{Hit, HitFloor, Miss, full_cache};
use cases::insert::{Cycle, Insert, InsertFloor, ROUND};
use cases::pages::{AllocFree, COUNT};
use cases::sample::{median, median_ns};
use cases::tiers::{MOVED, Tiers};
use cases::tree::{EVICTED, TreeCase};
use cases::work;
use serde::Serialize;

/// A line of the table.
#[derive(Serialize)]
struct Row {
    case: String,
    page_size: u32,
    ns: f64,
    floor_ns: Option<f64>,
    ratio: Option<f64>,
    /// Goal, on the machine on which the peers were measured.
    target: Option<f64>,
}

struct Table {
    json: bool,
    only: Option<String>,
}

fn main() {
    if !cases::is_measured() {
        return;
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    let only = args.iter().position(|arg| arg == "--only").and_then(|i| args.get(i + 1)).cloned();
    let json = args.iter().any(|arg| arg == "--json");
    let table = Table { json, only };
    table.head();
    for page_size in [1, 16] {
        hits(&table, page_size);
        trees(&table, page_size);
        inserts(&table, page_size);
        cycles(&table, page_size);
        evictions(&table, page_size);
        plans(&table, page_size);
        replay(&table, page_size);
    }
    alloc_free(&table);
    gathers(&table);
    moves(&table);
}

impl Table {
    /// Returns whether the name of one of a group's cases contains the text of `--only`.
    fn selects(&self, group: &[&str]) -> bool {
        self.only.as_ref().is_none_or(|only| group.iter().any(|case| case.contains(only.as_str())))
    }

    fn head(&self) {
        if !self.json {
            let [case, page_size, median, floor, ratio] = ["case", "page_size", "median", "floor", "ratio"];
            println!("{case:<28}{page_size:>11}{median:>11}{floor:>11}{ratio:>11}{:>11}", "target");
        }
    }

    fn row(&self, case: &str, page_size: u32, ns: f64, floor: Option<f64>, target: impl Into<Option<f64>>) {
        let row = Row {
            case: case.to_owned(),
            page_size,
            ns,
            floor_ns: floor,
            ratio: floor.map(|floor| ns / floor),
            target: target.into(),
        };
        if self.json {
            println!("{}", serde_json::to_string(&row).expect("a row is plain data"));
        } else {
            let or_dash = |value: Option<f64>| value.map_or("-".to_owned(), number);
            println!(
                "{case:<28}{page_size:>11}{:>11}{:>11}{:>11}{:>11}",
                number(ns),
                or_dash(floor),
                row.ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
                or_dash(row.target)
            );
        }
    }
}

fn number(value: f64) -> String {
    if value < 100.0 { format!("{value:.2}") } else { format!("{value:.0}") }
}

fn pick(page_size: u32, one: f64, sixteen: f64) -> f64 {
    if page_size == 1 { one } else { sixteen }
}

fn hits(table: &Table, page_size: u32) {
    if !table.selects(&["hit hot", "hit cold", "miss"]) {
        return;
    }
    let mut cache = full_cache(page_size, work::SEQUENCES, 0);
    for (case, rotation, target) in
        [("hit hot", 64, pick(page_size, 450.0, 400.0)), ("hit cold", 2000, pick(page_size, 1800.0, 1400.0))]
    {
        let mut hit = Hit::new(cache, work::SEQUENCES, rotation);
        let mut floor = HitFloor::new(work::SEQUENCES, rotation, page_size);
        hit.check();
        assert_eq!(floor.call(), hit.call(), "the floor copies the same pages");
        // Each measurement runs a whole rotation first, so that the hot case is hot.
        let warm = |call: &mut dyn FnMut()| (0..rotation).for_each(|_| call());
        warm(&mut || _ = hit.call());
        let ns = median_ns(300, 64, || _ = black_box(hit.call()));
        warm(&mut || _ = floor.call());
        let floor_ns = median_ns(300, 64, || _ = black_box(floor.call()));
        table.row(case, page_size, ns, Some(floor_ns), target);
        cache = hit.into_cache();
    }
    let mut miss = Miss::new(cache);
    miss.check();
    let ns = median_ns(300, 256, || _ = black_box(miss.call()));
    table.row("miss", page_size, ns, None, pick(page_size, 15.0, 25.0));
}

/// The tree alone. The floor of a match by handle is the match of an engine, which returns no handle.
fn trees(table: &Table, page_size: u32) {
    const ROTATION: usize = 64;
    let cases = ["tree, match", "tree, lock and unlock", "tree, extend by a page", "tree, evict a page"];
    if !table.selects(&cases) {
        return;
    }
    let mut hit = Hit::new(full_cache(page_size, 1000, 0), 1000, ROTATION);
    let mut tree = TreeCase::new(page_size, 1000, ROTATION);
    tree.check();
    let mut samples = [const { Vec::new() }; 5];
    for _ in 0..300 {
        samples[0].push(median_ns(1, ROTATION, || _ = black_box(hit.call())));
        samples[1].push(median_ns(1, ROTATION, || _ = black_box(tree.find())));
        samples[2].push(median_ns(1, ROTATION, || tree.lock()));
        tree.start();
        samples[3].push(median_ns(1, tree.room(), || tree.extend()));
        tree.finish();
        samples[4].push(median_ns(1, TreeCase::evictions(), || tree.evict()) / f64::from(EVICTED));
    }
    tree.check();
    let [hit_ns, match_ns, lock, extend, evict] = samples.map(median);
    table.row(cases[0], page_size, match_ns, Some(hit_ns), 1.05 * hit_ns);
    for (case, ns, target) in [(cases[1], lock, 30.0), (cases[2], extend, 50.0), (cases[3], evict, 15.0)] {
        table.row(case, page_size, ns, None, target);
    }
}

fn inserts(table: &Table, page_size: u32) {
    const PLACES: usize = 20_000;
    const CALLS: usize = 20;
    if !table.selects(&["insert"]) {
        return;
    }
    let mut insert = Insert::new(page_size, work::SEQUENCES);
    let mut floor = InsertFloor::new(page_size, PLACES);
    (0..PLACES).for_each(|_| floor.call());
    let (mut samples, mut floor_samples) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        for _ in 0..ROUND / CALLS {
            insert.read_next(CALLS);
            samples.push(median_ns(1, CALLS, || insert.call()));
        }
        // The CPU caches have the same contents before both measurements.
        insert.restore();
        for _ in 0..ROUND / CALLS {
            floor.read_next(CALLS);
            floor_samples.push(median_ns(1, CALLS, || floor.call()));
        }
        insert.restore();
    }
    let (ns, floor_ns) = (median(samples), median(floor_samples));
    table.row("insert", page_size, ns, Some(floor_ns), pick(page_size, 2400.0, 1000.0));
}

fn cycles(table: &Table, page_size: u32) {
    let case = "cycle, 15.4 M tokens";
    if !table.selects(&[case]) {
        return;
    }
    let mut cycle = Cycle::new(page_size, work::SEQUENCES);
    cycle.check();
    let samples = (0..1000).map(|_| {
        cycle.read_next(16);
        median_ns(1, 16, || _ = black_box(cycle.call()))
    });
    let ns = median(samples.collect());
    table.row(case, page_size, ns, None, pick(page_size, 1e9 / 350e3, 1e9 / 600e3));
}

fn evictions(table: &Table, page_size: u32) {
    // A million leaves of 256 pages take 16 GB of tables. `fits` skips them on a machine with less memory.
    let leaves: &[usize] =
        if page_size == 1 { &[1000, 10_000, 100_000, 250_000, 1_000_000] } else { &[1000, 10_000, 100_000, 1_000_000] };
    for &leaves in leaves {
        let case = format!("evict 256 of {leaves} leaves");
        if !table.selects(&[&case]) || !fits(page_size, leaves) {
            continue;
        }
        let mut evict = Evict::new(page_size, leaves);
        let mut floor = EvictFloor::new(page_size, leaves);
        evict.warm_up();
        floor.warm_up();
        let (mut samples, mut floor_samples) = (Vec::new(), Vec::new());
        while samples.len() < 20 {
            // `samples` ends with a restore, which replaces the CPU caches' contents before the floor is measured.
            let mut more = evict.samples();
            floor_samples.extend(more.iter().map(|_| median_ns(1, SAMPLE, || floor.call())));
            samples.append(&mut more);
        }
        let (ns, floor_ns) = (median(samples), median(floor_samples));
        table.row(&case, page_size, ns, Some(floor_ns), 400.0);
    }
}

fn plans(table: &Table, page_size: u32) {
    for kv_len in [4096, 65_536] {
        let case = format!("plan, 256 of {kv_len}");
        let step_case = format!("step, 256 of {kv_len}");
        let tracks: &[u32] = if kv_len == 4096 { &[2, 4] } else { &[] };
        let tracks: Vec<_> = tracks.iter().map(|&tracks| (tracks, format!("{case}, {tracks} tracks"))).collect();
        let mut group = vec![&*case, &*step_case];
        group.extend(tracks.iter().map(|(_, case)| &**case));
        if !table.selects(&group) || (page_size == 1 && kv_len > 4096) {
            continue;
        }
        let mut decode = Decode::new(page_size, 256, kv_len);
        let one = plan_ns(&mut decode);
        table.row(&case, page_size, one, None, 10_000.0);
        for (tracks, case) in tracks {
            // The goal: each further track adds at most 0.3 of the time of a plan with one track.
            let ns = plan_ns(&mut Decode::with_tracks(page_size, 256, kv_len, tracks));
            let target = one * (1.0 + 0.3 * f64::from(tracks - 1));
            table.row(&case, page_size, ns, None, target);
        }
        let steps = (0..400).map(|_| {
            decode.prepare();
            median_ns(1, 1, || decode.step())
        });
        let ns = median(steps.collect());
        table.row(&step_case, page_size, ns, None, None);
    }
}

/// Returns the median time of a plan.
fn plan_ns(decode: &mut Decode) -> f64 {
    decode.check();
    let plans = (0..400).map(|_| {
        decode.prepare();
        let mut step = None;
        let ns = median_ns(1, 1, || step = Some(decode.plan()));
        decode.rest(step.expect("the step is planned"));
        ns
    });
    median(plans.collect())
}

fn alloc_free(table: &Table) {
    let case = "alloc and free, a page";
    if table.selects(&[case]) {
        let mut pages = AllocFree::new(1 << 20, 50);
        pages.check();
        let ns = median_ns(300, 100, || pages.call()) / COUNT as f64;
        table.row(case, 1, ns, None, 2.5);
    }
}

/// Measures the engine's work for moves of pages to swap memory and back, and to a store and back.
fn moves(table: &Table) {
    for pages in [1, 16, 64] {
        let case = |moves: &str| format!("{moves}, nodes of {pages}");
        let cases = ["load and save", "save ahead", "put", "fetch"].map(case);
        if !table.selects(&cases.each_ref().map(String::as_str)) {
            continue;
        }
        let (mut tiers, mut store) = (Tiers::new(pages), Tiers::with_store(pages));
        tiers.check();
        let mut samples = [const { Vec::new() }; 4];
        for _ in 0..50 {
            tiers.admit();
            // To make room, other pages are evicted and saved.
            samples[0].push(median_ns(1, 1, || tiers.load()) / 2.0);
            tiers.finish();
        }
        for _ in 0..50 {
            tiers.admit();
            tiers.load();
            tiers.finish();
            samples[1].push(median_ns(1, 1, || tiers.save_ahead()));
            samples[2].push(median_ns(1, 1, || store.put()));
        }
        for _ in 0..50 {
            let prompts = store.new_prompts(pages);
            samples[3].push(median_ns(1, 1, || store.fetch(&prompts)));
        }
        for (case, samples) in cases.iter().zip(samples) {
            table.row(case, 16, median(samples) / f64::from(MOVED), None, None);
        }
    }
}

/// The pages of the states of 256 rows, of the sizes of Qwen3-Next and Kimi K3.
fn gathers(table: &Table) {
    for (pages, target) in [(36, None), (69, Some(3000.0))] {
        let cases = [format!("gather {pages} x 256"), format!("gather {pages} x 256, moved")];
        if !table.selects(&[&cases[0], &cases[1]]) {
            continue;
        }
        let mut gather = Gather::new(pages);
        gather.check();
        let same = median_ns(300, 64, || gather.same());
        let moved = median_ns(300, 64, || gather.moved());
        let from = vec![1; gather.words()];
        let floor = median_ns(300, 64, || black_box(&mut gather).floor(black_box(&from)));
        table.row(&cases[0], 1, same, Some(floor), target);
        table.row(&cases[1], 1, moved, Some(floor), None);
    }
}

fn replay(table: &Table, page_size: u32) {
    let case = "replay, a request";
    if !table.selects(&[case]) {
        return;
    }
    let texts = chats::texts(chats::REQUESTS);
    let (mut samples, mut floor_samples) = (Vec::new(), Vec::new());
    let mut floor = chats::ServeFloor::new(page_size);
    for _ in 0..5 {
        let (mut cache, mut hits) = (chats::cache(page_size), Vec::new());
        samples.push(median_ns(1, 1, || hits = chats::serve(&texts, &mut cache)));
        chats::check(page_size, &hits);
        floor_samples.push(median_ns(1, 1, || floor.serve(&texts, &hits)));
    }
    let [ns, floor_ns] = [samples, floor_samples].map(|samples| median(samples) / texts.len() as f64);
    table.row(case, page_size, ns, Some(floor_ns), None);
}
