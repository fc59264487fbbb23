//! Plots a run over the served requests. The upper chart shows the hit rate, by tier if there are several; the lower
//! chart shows page states. The plot is an SVG file, because writing SVG needs no fonts.

use std::fmt;
use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::host::Sample;

/// Size in pixels.
const SIZE: (u32, u32) = (1000, 740);
/// Height of a chart's legend.
const LEGEND_HEIGHT: i32 = 28;
const GREY: RGBColor = RGBColor(90, 90, 90);
/// Page states from the bottom up, as `(name, colour)`.
const STATES: [(&str, RGBColor); 4] = [
    ("private", RGBColor(190, 60, 45)),
    ("protected (cached, in use)", RGBColor(236, 162, 79)),
    ("evictable (cached, idle)", RGBColor(96, 150, 180)),
    ("free", RGBColor(222, 226, 228)),
];
const OVERALL: RGBColor = RGBColor(40, 70, 110);
const RECENT: RGBColor = RGBColor(150, 180, 205);

/// Tiers that a hit comes from, as `(name, colour)`.
const TIERS: [(&str, RGBColor); 3] =
    [("device", RGBColor(96, 150, 180)), ("swap memory", RGBColor(236, 162, 79)), ("store", RGBColor(214, 208, 190))];

/// The plot cannot be drawn or written.
#[derive(Debug)]
pub struct PlotError {
    file: PathBuf,
    reason: String,
}

impl fmt::Display for PlotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be drawn: {}", self.file.display(), self.reason)
    }
}

impl std::error::Error for PlotError {}

/// Draws the samples into an SVG file.
pub fn draw(file: &Path, title: &str, samples: &[Sample]) -> Result<(), PlotError> {
    let failed = |reason: &dyn fmt::Display| PlotError { file: file.into(), reason: reason.to_string() };
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        draw_on(&root, title, samples).map_err(|error| failed(&error))?;
        root.present().map_err(|error| failed(&error))?;
    }
    std::fs::write(file, svg).map_err(|error| failed(&error))
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<'a> = Result<(), Box<dyn std::error::Error + 'a>>;

fn draw_on<'a>(root: &Area<'a>, title: &str, samples: &[Sample]) -> Drawn<'a> {
    root.fill(&WHITE)?;
    let (head, body) = root.split_vertically(44);
    head.draw(&Text::new(title.to_owned(), (24, 16), ("sans-serif", 19).into_font()))?;
    let (upper, lower) = body.split_vertically(260);
    let (names, chart) = upper.split_vertically(LEGEND_HEIGHT);
    let mut entries = vec![("hit rate since the start", OVERALL), ("lately", RECENT)];
    let used = used_tiers(samples);
    if used > 1 {
        entries.extend(&TIERS[..used]);
    }
    draw_legend(&names, &entries)?;
    draw_hit_rate(&chart, samples)?;
    let (names, chart) = lower.split_vertically(LEGEND_HEIGHT);
    let preemptions = samples.last().map_or(0, |s| s.preemptions);
    let marks = format!("preemption ({preemptions})");
    let mut entries = STATES.to_vec();
    if preemptions > 0 {
        entries.push((&marks, BLACK));
    }
    draw_legend(&names, &entries)?;
    draw_pages(&chart, samples)
}

/// Draws a legend: colours with their names.
fn draw_legend<'a>(area: &Area<'a>, entries: &[(&str, RGBColor)]) -> Drawn<'a> {
    let mut x = 80;
    for (name, colour) in entries {
        area.draw(&Rectangle::new([(x, 8), (x + 16, 20)], colour.filled()))?;
        area.draw(&Text::new((*name).to_owned(), (x + 22, 7), ("sans-serif", 14).into_font()))?;
        // The width is an estimate, because there are no fonts.
        x += 50 + 7 * name.len() as i32;
    }
    Ok(())
}

fn end_of(samples: &[Sample]) -> f64 {
    samples.last().map_or(1.0, |last| last.done.max(1) as f64)
}

fn draw_hit_rate<'a>(area: &Area<'a>, samples: &[Sample]) -> Drawn<'a> {
    let mut chart = ChartBuilder::on(area)
        .margin_right(24)
        .margin_left(8)
        .margin_bottom(8)
        .x_label_area_size(24)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..end_of(samples), 0.0..100.0)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .axis_style(GREY)
        .y_desc("hit rate of input tokens, %")
        .axis_desc_style(("sans-serif", 15))
        .label_style(("sans-serif", 14))
        .x_label_formatter(&short)
        .y_label_formatter(&short)
        .y_labels(6)
        .draw()?;
    let used = used_tiers(samples);
    for tier in (0..used).rev().filter(|_| used > 1) {
        let top = samples.iter().map(|s| (s.done as f64, rate(tier_hits(s)[tier], s.input_tokens)));
        chart.draw_series(AreaSeries::new(top, 0.0, TIERS[tier].1.filled()))?;
    }
    chart.draw_series(LineSeries::new(recent(samples), RECENT.stroke_width(2)))?;
    let overall = samples.iter().map(|s| (s.done as f64, rate(s.hit_tokens, s.input_tokens)));
    chart.draw_series(LineSeries::new(overall, OVERALL.stroke_width(3)))?;
    Ok(())
}

/// Returns three numbers of hit tokens: on the device; on the device or in swap memory; in any tier.
fn tier_hits(sample: &Sample) -> [u64; TIERS.len()] {
    let Sample { hit_tokens, swap_hit_tokens, store_hit_tokens, .. } = *sample;
    // Hits in the store also count as hits in swap memory, because the pages came through it.
    let host = swap_hit_tokens.saturating_sub(store_hit_tokens);
    [hit_tokens - swap_hit_tokens, hit_tokens - swap_hit_tokens + host, hit_tokens]
}

/// Returns the number of tiers down to the lowest that had hits, at least 1: the device.
fn used_tiers(samples: &[Sample]) -> usize {
    let Some(last) = samples.last() else { return 1 };
    let [device, host, all] = tier_hits(last);
    if all > host { 3 } else { 1 + usize::from(host > device) }
}

/// Returns the hit rates between pairs of samples that are one 50th of all samples apart.
fn recent(samples: &[Sample]) -> impl Iterator<Item = (f64, f64)> + '_ {
    let window = (samples.len() / 50).max(1);
    samples.iter().zip(&samples[window.min(samples.len())..]).filter_map(|(from, to)| {
        let (hit, input) = (to.hit_tokens - from.hit_tokens, to.input_tokens - from.input_tokens);
        (input > 0).then(|| (to.done as f64, rate(hit, input)))
    })
}

fn rate(hit: u64, input: u64) -> f64 {
    100.0 * hit as f64 / input.max(1) as f64
}

fn draw_pages<'a>(area: &Area<'a>, samples: &[Sample]) -> Drawn<'a> {
    let page_count = samples.first().map_or(1, |s| layers(s)[STATES.len() - 1]);
    let mut chart = ChartBuilder::on(area)
        .margin_right(24)
        .margin_left(8)
        .margin_bottom(8)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..end_of(samples), 0.0..f64::from(page_count))?;
    // The top layer is drawn first. Each lower layer then covers the lower part of the layers above it.
    for (i, (_, colour)) in STATES.iter().enumerate().rev() {
        let top = samples.iter().map(|s| (s.done as f64, f64::from(layers(s)[i])));
        chart.draw_series(AreaSeries::new(top, 0.0, colour.filled()))?;
    }
    let preempted = samples.windows(2).filter(|pair| pair[0].preemptions < pair[1].preemptions);
    chart.draw_series(preempted.map(|pair| {
        let at = (pair[1].done as f64, f64::from(layers(&pair[1])[1]));
        TriangleMarker::new(at, 5, BLACK.filled())
    }))?;
    chart
        .configure_mesh()
        .disable_mesh()
        .axis_style(GREY)
        .x_desc("requests served")
        .y_desc("pages")
        .axis_desc_style(("sans-serif", 15))
        .label_style(("sans-serif", 14))
        .x_label_formatter(&short)
        .y_label_formatter(&short)
        .draw()?;
    Ok(())
}

/// Returns the upper edges of the stacked states. A fenced page counts as private, because a step still uses it.
fn layers(sample: &Sample) -> [u32; STATES.len()] {
    let s = &sample.stats;
    let private = s.private_pages + s.fenced_pages;
    let protected = private + s.protected_pages;
    let cached = protected + s.evictable_pages;
    [private, protected, cached, cached + s.free_pages]
}

/// Formats `12000` as `12k`, for axes.
fn short(value: &f64) -> String {
    match *value {
        v if v >= 1e6 => format!("{}M", v / 1e6),
        v if v >= 1e4 => format!("{}k", v / 1e3),
        v => format!("{v}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarena::Stats;

    #[test]
    fn states_stack_up_to_the_pool() {
        let mut stats = Stats::default();
        (stats.free_pages, stats.private_pages, stats.fenced_pages) = (1, 20, 300);
        (stats.protected_pages, stats.evictable_pages) = (4000, 50_000);
        assert_eq!(layers(&sample(stats)), [320, 4320, 54_320, 54_321]);
    }

    fn sample(stats: Stats) -> Sample {
        Sample {
            done: 0,
            input_tokens: 0,
            hit_tokens: 0,
            swap_hit_tokens: 0,
            store_hit_tokens: 0,
            preemptions: 0,
            stats,
        }
    }

    #[test]
    fn hits_stack_by_tier() {
        let mut hits = Sample { hit_tokens: 100, ..sample(Stats::default()) };
        assert_eq!((tier_hits(&hits), used_tiers(&[hits])), ([100, 100, 100], 1));
        hits.swap_hit_tokens = 30;
        assert_eq!((tier_hits(&hits), used_tiers(&[hits])), ([70, 100, 100], 2));
        hits.store_hit_tokens = 10;
        assert_eq!((tier_hits(&hits), used_tiers(&[hits])), ([70, 90, 100], 3));
    }

    #[test]
    fn an_empty_run_has_a_plot() {
        let file = std::env::temp_dir().join(format!("kvarena-plot-{}.svg", std::process::id()));
        draw(&file, "nothing", &[]).expect("an empty plot is a plot");
        let svg = std::fs::read_to_string(&file).expect("the file is written");
        assert!(svg.contains("hit rate"));
        std::fs::remove_file(file).expect("the file is the test's");
        let nowhere = Path::new("no/such/folder/plot.svg");
        let error = draw(nowhere, "nothing", &[]).expect_err("the folder does not exist");
        assert!(error.to_string().starts_with("no/such/folder/plot.svg cannot be drawn"));
    }
}
