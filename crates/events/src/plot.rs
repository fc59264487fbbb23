//! Plots outcomes of one trace as SVG: the cached share by request number, the busiest engine's load divided by the
//! mean load, and the mean wait.

use std::fmt::Write;

use crate::fleet::Outcome;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 40.0;
/// Width of the curves.
const CURVES: f64 = 470.0;
/// Left edge of the bars.
const BARS: f64 = 600.0;
const BOTTOM: f64 = HEIGHT - 50.0;
const COLORS: [&str; 3] = ["#7a7a7a", "#c0392b", "#2471a3"];

/// Returns the plot.
pub fn draw(outcomes: &[Outcome]) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let shown = draw_curves(&mut svg, outcomes).and_then(|()| draw_bars(&mut svg, outcomes));
    shown.expect("a write to memory succeeds");
    svg.push_str("</svg>\n");
    svg
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) -> std::fmt::Result {
    writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>")
}

fn draw_curves(svg: &mut String, outcomes: &[Outcome]) -> std::fmt::Result {
    let all = outcomes.iter().flat_map(|outcome| outcome.rates.iter());
    let most = all.clone().map(|point| point.1).fold(0.1, f64::max);
    let last = all.map(|point| point.0).max().unwrap_or(1).max(1) as f64;
    let (width, height) = (CURVES, BOTTOM - TOP);
    text(svg, LEFT, TOP - 15.0, "start", "cumulative share of prompt tokens that were cached")?;
    for step in 0..=4 {
        let (share, y) = (most * f64::from(step) / 4.0, BOTTOM - height * f64::from(step) / 4.0);
        let end = LEFT + width;
        writeln!(svg, "<path d=\"M{LEFT} {y:.1}H{end}\" stroke=\"#ddd\"/>")?;
        text(svg, LEFT - 8.0, y + 4.0, "end", &format!("{:.1}%", 100.0 * share))?;
    }
    text(svg, LEFT + width, BOTTOM + 20.0, "end", &format!("{last:.0} requests"))?;
    for (index, outcome) in outcomes.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let points: Vec<String> = outcome
            .rates
            .iter()
            .map(|&(number, rate)| {
                let x = LEFT + width * number as f64 / last;
                format!("{x:.1},{:.1}", BOTTOM - height * rate / most)
            })
            .collect();
        let points = points.join(" ");
        writeln!(svg, "<polyline points=\"{points}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>")?;
        let y = HEIGHT - 12.0;
        let x = LEFT + 150.0 * index as f64;
        writeln!(svg, "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"10\" height=\"10\" fill=\"{color}\"/>", y - 9.0)?;
        text(svg, x + 15.0, y, "start", &outcome.policy.to_string())?;
    }
    Ok(())
}

/// Draws two groups of bars: the busiest engine's load divided by the mean load, and the mean wait.
fn draw_bars(svg: &mut String, outcomes: &[Outcome]) -> std::fmt::Result {
    type Of = fn(&Outcome) -> f64;
    let groups: [(&str, &str, Of); 2] =
        [("busiest / mean", "", Outcome::skew), ("mean wait", " s", |outcome| outcome.wait().0)];
    for (group, (title, unit, of)) in groups.into_iter().enumerate() {
        let left = BARS + 155.0 * group as f64;
        let most = outcomes.iter().map(of).fold(1e-9, f64::max);
        text(svg, left, TOP - 15.0, "start", title)?;
        for (index, outcome) in outcomes.iter().enumerate() {
            let (value, color) = (of(outcome), COLORS[index % COLORS.len()]);
            let height = (BOTTOM - TOP - 20.0) * value / most;
            let (x, y) = (left + 42.0 * index as f64, BOTTOM - height);
            writeln!(svg, "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"34\" height=\"{height:.1}\" fill=\"{color}\"/>")?;
            text(svg, x + 17.0, y - 5.0, "middle", &format!("{value:.2}{unit}"))?;
        }
    }
    Ok(())
}
