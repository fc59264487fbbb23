//! Draws charts with two logarithmic axes, in two columns of one file. The format is SVG, because
//! writing SVG needs no fonts.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

/// Size in pixels.
const SIZE: (u32, u32) = (1200, 900);
const COLOURS: [RGBColor; 3] = [RGBColor(40, 70, 110), RGBColor(202, 82, 60), RGBColor(96, 150, 96)];

/// A line of a chart.
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// One chart.
pub struct Chart {
    pub title: &'static str,
    pub x: &'static str,
    pub y: &'static str,
    pub series: Vec<Series>,
}

/// Draws all charts into one file.
pub fn draw(file: &Path, charts: &[Chart]) -> Result<(), Box<dyn Error>> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(|error| error.to_string())?;
        let rows = charts.len().div_ceil(2);
        for (area, chart) in root.split_evenly((rows, 2)).iter().zip(charts) {
            draw_one(area, chart).map_err(|error| error.to_string())?;
        }
        root.present().map_err(|error| error.to_string())?;
    }
    Ok(std::fs::write(file, svg)?)
}

fn draw_one<'a>(area: &DrawingArea<SVGBackend<'a>, Shift>, chart: &Chart) -> Result<(), Box<dyn Error + 'a>> {
    let points = || chart.series.iter().flat_map(|series| &series.points);
    let range = |pick: fn(&(f64, f64)) -> f64| {
        let low = points().map(pick).fold(f64::MAX, f64::min);
        let high = points().map(pick).fold(f64::MIN, f64::max);
        // An axis ends at whole powers of ten around the values.
        10_f64.powf(low.log10().floor())..10_f64.powf(high.log10().ceil())
    };
    let (head, body) = area.split_vertically(52);
    head.draw(&Text::new(chart.title, (72, 8), ("sans-serif", 16).into_font()))?;
    draw_names(&head, chart)?;
    let mut canvas = ChartBuilder::on(&body)
        .margin_right(24)
        .margin_bottom(8)
        .x_label_area_size(42)
        .y_label_area_size(70)
        .build_cartesian_2d(range(|p| p.0).log_scale(), range(|p| p.1).log_scale())?;
    canvas
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .x_desc(chart.x)
        .y_desc(chart.y)
        .axis_desc_style(("sans-serif", 14))
        .label_style(("sans-serif", 13))
        .x_label_formatter(&short)
        .y_label_formatter(&short)
        .draw()?;
    for (series, colour) in chart.series.iter().zip(COLOURS) {
        canvas.draw_series(LineSeries::new(series.points.clone(), colour.stroke_width(2)))?;
        let dot = |&point: &(f64, f64)| Circle::new(point, 4, colour.filled());
        canvas.draw_series(series.points.iter().map(dot))?;
    }
    Ok(())
}

fn draw_names<'a>(area: &DrawingArea<SVGBackend<'a>, Shift>, chart: &Chart) -> Result<(), Box<dyn Error + 'a>> {
    let mut x = 72;
    for (series, colour) in chart.series.iter().zip(COLOURS) {
        area.draw(&Rectangle::new([(x, 34), (x + 14, 44)], colour.filled()))?;
        let font = ("sans-serif", 13).into_font();
        area.draw(&Text::new(series.name.clone(), (x + 20, 32), font))?;
        // The width is an estimate, because there are no fonts.
        x += 44 + 7 * series.name.len() as i32;
    }
    Ok(())
}

/// Formats `12000` as `12k`.
fn short(value: &f64) -> String {
    match *value {
        v if v >= 1e6 => format!("{}M", v / 1e6),
        v if v >= 1e3 => format!("{}k", v / 1e3),
        v => format!("{v}"),
    }
}
