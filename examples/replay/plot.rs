//! Plots a run over the served requests. The upper chart shows the hit rate, by tier if there are several; the lower
//! chart shows page states. With several groups of layers, a third chart shows what the cached pages contain.

use std::error::Error;
use std::path::Path;

use kvarena::stats::Stats;
use plotters::style::RGBColor;

use crate::chart::{self, BLUE, Chart, Form, RED, Series};
use crate::host::{Sample, Tally};

/// Page states from the bottom up, as `(name, colour)`.
const STATES: [(&str, RGBColor); 4] = [
    ("private", RED),
    ("protected (cached, in use)", RGBColor(236, 162, 79)),
    ("evictable (cached, idle)", RGBColor(96, 150, 180)),
    ("free", RGBColor(222, 226, 228)),
];
/// Tiers that a hit comes from, as `(name, colour)`.
const TIERS: [(&str, RGBColor); 3] =
    [("device", RGBColor(96, 150, 180)), ("swap memory", RGBColor(236, 162, 79)), ("store", RGBColor(214, 208, 190))];

/// Contents of cached pages from the bottom up, as `(name, colour)`.
const CONTENTS: [(&str, RGBColor); 3] = [
    ("states (snapshots)", RED),
    ("cells of windows and chunks", RGBColor(236, 162, 79)),
    ("pages of group 0", RGBColor(96, 150, 180)),
];

/// Draws the samples into an SVG file.
pub fn draw(file: &Path, title: String, samples: &[Sample]) -> Result<(), Box<dyn Error>> {
    let hits = Chart {
        title,
        x: "requests served",
        y: "hit rate of input tokens, %",
        series: hits(samples),
        ..Chart::default()
    };
    let pages = Chart { x: "requests served", y: "pages", series: pages(samples), ..Chart::default() };
    let mut charts = vec![hits, pages];
    if samples.iter().any(|s| s.stats.cells > 0) {
        let y = "cached pages";
        charts.push(Chart { x: "requests served", y, series: cached_contents(samples), ..Chart::default() });
    }
    chart::draw(file, (1000, 370 * charts.len() as u32), 1, &charts)
}

fn series(name: &str, colour: RGBColor, form: Form, points: impl Iterator<Item = (f64, f64)>) -> Series {
    Series { name: name.to_owned(), colour, form, points: points.collect() }
}

/// Returns the hit rates since the start and lately, and those of each tier down to the lowest that had hits. The top
/// layer comes first, so that each lower layer covers the lower part of the layers above it.
fn hits(samples: &[Sample]) -> Vec<Series> {
    let used = used_tiers(samples);
    let tiers = TIERS.iter().enumerate().take(used).rev().filter(|_| used > 1).map(|(tier, &(name, colour))| {
        let top = |s: &Sample| (s.done as f64, rate(tier_hits(&s.tally)[tier], s.tally.input_tokens));
        series(name, colour, Form::Area, samples.iter().map(top))
    });
    let overall = samples.iter().map(|s| (s.done as f64, rate(s.tally.hit_tokens, s.tally.input_tokens)));
    let lines = [
        series("lately", RGBColor(150, 180, 205), Form::Line(2), recent(samples)),
        series("hit rate since the start", BLUE, Form::Line(3), overall),
    ];
    tiers.chain(lines).collect()
}

/// Returns three numbers of hit tokens: on the device; on the device or in swap memory; in any tier.
fn tier_hits(tally: &Tally) -> [u64; TIERS.len()] {
    let Tally { hit_tokens, device_hit_tokens, .. } = *tally;
    [device_hit_tokens, device_hit_tokens + tally.swap_hit_tokens(), hit_tokens]
}

/// Returns the number of tiers down to the lowest that had hits, at least 1: the device.
fn used_tiers(samples: &[Sample]) -> usize {
    let Some(last) = samples.last() else { return 1 };
    let [device, swap, all] = tier_hits(&last.tally);
    if all > swap { 3 } else { 1 + usize::from(swap > device) }
}

/// Returns the hit rates between pairs of samples that are one 50th of all samples apart.
fn recent(samples: &[Sample]) -> impl Iterator<Item = (f64, f64)> + '_ {
    let window = (samples.len() / 50).max(1);
    samples.iter().zip(&samples[window.min(samples.len())..]).filter_map(|(from, to)| {
        let hit = to.tally.hit_tokens - from.tally.hit_tokens;
        let input = to.tally.input_tokens - from.tally.input_tokens;
        (input > 0).then(|| (to.done as f64, rate(hit, input)))
    })
}

fn rate(hit: u64, input: u64) -> f64 {
    100.0 * hit as f64 / input.max(1) as f64
}

/// Returns the stacked page states, the top layer first, and the preemptions, if there are any.
fn pages(samples: &[Sample]) -> Vec<Series> {
    let states = STATES.iter().enumerate().rev().map(|(state, &(name, colour))| {
        let top = |s: &Sample| (s.done as f64, f64::from(layers(&s.stats)[state]));
        series(name, colour, Form::Area, samples.iter().map(top))
    });
    let mut all: Vec<Series> = states.collect();
    let preemptions = samples.last().map_or(0, |s| s.tally.preemptions);
    if preemptions > 0 {
        let preempted = samples.windows(2).filter(|pair| pair[0].tally.preemptions < pair[1].tally.preemptions);
        let marks = preempted.map(|pair| (pair[1].done as f64, f64::from(layers(&pair[1].stats)[1])));
        all.push(series(&format!("preemption ({preemptions})"), RGBColor(0, 0, 0), Form::Marks, marks));
    }
    all
}

/// Returns the stacked contents of cached pages, the top layer first.
fn cached_contents(samples: &[Sample]) -> Vec<Series> {
    let contents = CONTENTS.iter().enumerate().rev().map(|(content, &(name, colour))| {
        let top = |s: &Sample| (s.done as f64, f64::from(contents_of(&s.stats)[content]));
        series(name, colour, Form::Area, samples.iter().map(top))
    });
    contents.collect()
}

/// Returns the upper edges of the stacked contents.
fn contents_of(stats: &Stats) -> [u32; CONTENTS.len()] {
    [stats.state_pages, stats.state_pages + stats.cell_pages, stats.cached_pages]
}

/// Returns the upper edges of the stacked states. A fenced page counts as private, because a step still uses it.
fn layers(stats: &Stats) -> [u32; STATES.len()] {
    let private = stats.private_pages + stats.fenced_pages;
    let protected = private + stats.protected_pages;
    let cached = protected + stats.evictable_pages;
    [private, protected, cached, cached + stats.free_pages]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_stack_up_to_the_pool() {
        let mut stats = Stats::default();
        (stats.free_pages, stats.private_pages, stats.fenced_pages) = (1, 20, 300);
        (stats.protected_pages, stats.evictable_pages) = (4000, 50_000);
        assert_eq!(layers(&stats), [320, 4320, 54_320, 54_321]);
    }

    #[test]
    fn contents_stack_up_to_the_cached_pages() {
        let mut stats = Stats::default();
        (stats.state_pages, stats.cell_pages, stats.cached_pages) = (30, 500, 7000);
        assert_eq!(contents_of(&stats), [30, 530, 7000]);
    }

    /// Only a run with several groups of layers has the chart of contents.
    #[test]
    fn snapshots_and_cells_are_drawn_beside_pages() {
        let text = |cells| {
            let mut stats = Stats::default();
            (stats.cells, stats.state_pages, stats.cached_pages) = (cells, 30 * cells, 7000);
            let samples = [0, 5].map(|done| Sample { done, tally: Tally::default(), stats });
            let file = std::env::temp_dir().join(format!("kvarena-plot-{cells}-{}.svg", std::process::id()));
            draw(&file, "states".to_owned(), &samples).expect("two samples are a plot");
            let svg = std::fs::read_to_string(&file).expect("the file is written");
            std::fs::remove_file(file).expect("the file is the test's");
            svg
        };
        assert!(!text(0).contains("snapshots"));
        for (name, _) in CONTENTS {
            assert!(text(2).contains(name), "{name}");
        }
    }

    #[test]
    fn hits_stack_by_tier() {
        let tally = Tally { hit_tokens: 100, device_hit_tokens: 100, ..Tally::default() };
        let mut hits = Sample { done: 0, tally, stats: Stats::default() };
        assert_eq!((tier_hits(&hits.tally), used_tiers(&[hits])), ([100, 100, 100], 1));
        hits.tally.device_hit_tokens = 70;
        assert_eq!((tier_hits(&hits.tally), used_tiers(&[hits])), ([70, 100, 100], 2));
        hits.tally.store_hit_tokens = 10;
        assert_eq!((tier_hits(&hits.tally), used_tiers(&[hits])), ([70, 90, 100], 3));
    }

    #[test]
    fn an_empty_run_has_a_plot() {
        let file = std::env::temp_dir().join(format!("kvarena-plot-{}.svg", std::process::id()));
        draw(&file, "nothing".to_owned(), &[]).expect("an empty plot is a plot");
        let svg = std::fs::read_to_string(&file).expect("the file is written");
        assert!(svg.contains("hit rate"));
        std::fs::remove_file(file).expect("the file is the test's");
        let nowhere = Path::new("no/such/folder/plot.svg");
        let error = draw(nowhere, "nothing".to_owned(), &[]).expect_err("the folder does not exist");
        assert!(error.to_string().starts_with("no/such/folder/plot.svg cannot be drawn"));
    }
}
