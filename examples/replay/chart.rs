//! Draws charts of lines, areas and marks. The format is SVG, because writing SVG needs no fonts.
#![allow(dead_code)] // Each program uses some of the forms and colours.

use std::error::Error;
use std::ops::Range;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

pub const GREY: RGBColor = RGBColor(90, 90, 90);
pub const BLUE: RGBColor = RGBColor(40, 70, 110);
pub const RED: RGBColor = RGBColor(190, 60, 45);

/// Form in which a series is drawn.
#[derive(Clone, Copy)]
pub enum Form {
    /// A line of this width.
    Line(u32),
    /// A line with a dot at each point.
    Dots,
    /// The area below the points.
    Area,
    /// A triangle at each point.
    Marks,
}

/// Named points of a chart.
pub struct Series {
    pub name: String,
    pub colour: RGBColor,
    pub form: Form,
    pub points: Vec<(f64, f64)>,
}

/// One chart. Later series cover earlier ones.
#[derive(Default)]
pub struct Chart {
    pub title: String,
    /// Description of the x axis, and of the y axis.
    pub x: &'static str,
    pub y: &'static str,
    /// Whether both axes are logarithmic; they then end at whole powers of ten. Other axes begin at 0.
    pub is_log: bool,
    pub series: Vec<Series>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<'a> = Result<(), Box<dyn Error + 'a>>;

/// Draws charts in columns into an SVG file of this size in pixels.
pub fn draw(file: &Path, size: (u32, u32), columns: usize, charts: &[Chart]) -> Result<(), Box<dyn Error>> {
    let failed = |reason: &dyn std::fmt::Display| format!("{} cannot be drawn: {reason}", file.display());
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE).map_err(|error| failed(&error))?;
        let areas = root.split_evenly((charts.len().div_ceil(columns), columns));
        for (area, chart) in areas.iter().zip(charts) {
            draw_one(area, chart).map_err(|error| failed(&error))?;
        }
        root.present().map_err(|error| failed(&error))?;
    }
    Ok(std::fs::write(file, svg).map_err(|error| failed(&error))?)
}

fn draw_one<'a>(area: &Area<'a>, chart: &Chart) -> Drawn<'a> {
    let (head, body) = area.split_vertically(52);
    head.draw(&Text::new(chart.title.clone(), (24, 8), ("sans-serif", 16).into_font()))?;
    draw_names(&head, chart)?;
    let [x, y] = [|point: &(f64, f64)| point.0, |point: &(f64, f64)| point.1].map(|axis| range(chart, axis));
    // A label for each power of ten.
    let labels = |range: &Range<f64>, most| if chart.is_log { 1 + (range.end - range.start) as usize } else { most };
    let labels = [labels(&x, 10), labels(&y, 6)];
    let low = y.start;
    let mut canvas = ChartBuilder::on(&body)
        .margin_right(24)
        .margin_left(8)
        .margin_bottom(8)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(x, y)?;
    let label = |value: &f64| short(if chart.is_log { 10_f64.powf(*value) } else { *value });
    canvas
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .axis_style(GREY)
        .x_desc(chart.x)
        .y_desc(chart.y)
        .axis_desc_style(("sans-serif", 15))
        .label_style(("sans-serif", 14))
        .x_labels(labels[0])
        .y_labels(labels[1])
        .x_label_formatter(&label)
        .y_label_formatter(&label)
        .draw()?;
    for Series { colour, form, points, .. } in &chart.series {
        let points = points.iter().map(|&(x, y)| if chart.is_log { (x.log10(), y.log10()) } else { (x, y) });
        let line = |width| LineSeries::new(points.clone(), colour.stroke_width(width));
        match form {
            Form::Area => _ = canvas.draw_series(AreaSeries::new(points, low, colour.filled()))?,
            Form::Line(width) => _ = canvas.draw_series(line(*width))?,
            Form::Dots => {
                canvas.draw_series(line(2))?;
                canvas.draw_series(points.map(|point| Circle::new(point, 4, colour.filled())))?;
            }
            Form::Marks => {
                canvas.draw_series(points.map(|point| TriangleMarker::new(point, 5, colour.filled())))?;
            }
        }
    }
    Ok(())
}

/// Returns the ends of an axis; `axis` selects the points' numbers on it.
fn range(chart: &Chart, axis: fn(&(f64, f64)) -> f64) -> Range<f64> {
    let numbers = || chart.series.iter().flat_map(|series| &series.points).map(axis);
    let high = numbers().fold(f64::MIN_POSITIVE, f64::max);
    if chart.is_log {
        let low = numbers().fold(high, f64::min);
        return low.log10().floor()..high.log10().ceil();
    }
    // Without points there is an axis up to 1.
    0.0..if high > f64::MIN_POSITIVE { high } else { 1.0 }
}

/// Draws the names of the series beside their colours.
fn draw_names<'a>(area: &Area<'a>, chart: &Chart) -> Drawn<'a> {
    let mut x = 80;
    for Series { name, colour, .. } in &chart.series {
        area.draw(&Rectangle::new([(x, 34), (x + 14, 44)], colour.filled()))?;
        area.draw(&Text::new(name.clone(), (x + 20, 32), ("sans-serif", 13).into_font()))?;
        // The width is an estimate, because there are no fonts.
        x += 44 + 7 * name.len() as i32;
    }
    Ok(())
}

/// Formats `12000` as `12k`.
fn short(value: f64) -> String {
    // Powers of ten are not exact.
    let rounded = |value: f64| (value * 1e3).round() / 1e3;
    match value {
        v if v >= 1e6 => format!("{}M", rounded(v / 1e6)),
        v if v >= 1e4 => format!("{}k", rounded(v / 1e3)),
        v => format!("{}", rounded(v)),
    }
}
