//! Rotary position embedding: converts the config's two styles to one table of frequencies.
//!
//! The implemented types are `default`, `linear`, `llama3`, `proportional` and `yarn`. `ops.rs` applies the rotation.

use std::f64::consts::TAU;

use crate::error::Result;
use crate::fields::Fields;

/// Frequencies of a head's rotating pairs. Of `n` rotating elements, pair `i` is elements `i` and `i + n / 2`, or
/// adjacent elements in [`rotate_ends`](crate::ops::rotate_ends) with `interleaved`.
#[derive(Clone, PartialEq, Debug)]
pub struct Rope {
    /// Radians per position, one for each pair; 0 for a pair that does not rotate.
    pub frequencies: Vec<f32>,
    /// Factor of the rotated numbers.
    pub amplitude: f32,
    /// DeepSeek's factor of the logits, in addition to the heads' scale. Other families ignore it.
    pub logit_factor: f32,
}

impl Rope {
    /// Reads `rope_parameters` (new style), or `rope_theta` and `rope_scaling` (old style). If `is_partial`, only the
    /// first elements of a head rotate: `partial_rotary_factor` of them, by default a quarter.
    ///
    /// # Errors
    /// A rope type is not implemented, or a field is missing or invalid.
    pub fn parse(fields: &Fields<'_>, head_dim: usize, is_partial: bool) -> Result<Self> {
        let parameters = fields.object("rope_parameters")?;
        let old_theta = fields.number_or("rope_theta", 10_000.0)?;
        Self::new(fields, parameters, (old_theta, fields.object("rope_scaling")?), head_dim, is_partial)
    }

    /// Reads the two ropes of Gemma 3 and 4: first that of layers that read all tokens, then that of layers with a
    /// window. The tuple contains the head sizes of these layers, in the same order. In the old style, `rope_scaling`
    /// applies only to the first rope.
    ///
    /// # Errors
    /// As [`Rope::parse`].
    pub fn parse_pair(fields: &Fields<'_>, (head_dim, window_dim): (usize, usize)) -> Result<(Self, Self)> {
        let parameters = fields.object("rope_parameters")?;
        let of_kind = |kind| parameters.as_ref().map_or(Ok(None), |both| both.object(kind));
        let theta = fields.number_or("rope_theta", 1_000_000.0)?;
        let local_theta = fields.number_or("rope_local_base_freq", 10_000.0)?;
        let scaling = fields.object("rope_scaling")?;
        let all = Self::new(fields, of_kind("full_attention")?, (theta, scaling), head_dim, false)?;
        let window = of_kind("sliding_attention")?;
        Ok((all, Self::new(fields, window, (local_theta, None), window_dim, false)?))
    }

    /// Reads a rope from `parameters` in the new style, or from `old_theta` and `scaling` in the old style.
    fn new(
        fields: &Fields<'_>,
        parameters: Option<Fields<'_>>,
        (old_theta, scaling): (f64, Option<Fields<'_>>),
        mut head_dim: usize,
        is_partial: bool,
    ) -> Result<Self> {
        let theta = parameters.as_ref().map_or(Ok(old_theta), |new| new.number_or("rope_theta", old_theta))?;
        if theta <= 0.0 {
            return Err(fields.wrong(&format!("rope_theta {theta} is not above 0")));
        }
        let whole = if is_partial { 0.25 } else { 1.0 };
        let rotary_part = parameters.as_ref().unwrap_or(fields).number_or("partial_rotary_factor", whole)?;
        let is_proportional = parameters.as_ref().map(kind).transpose()? == Some("proportional");
        if is_partial {
            let rotated = (rotary_part * head_dim as f64) as usize;
            if rotated == 0 || rotated > head_dim || !rotated.is_multiple_of(2) {
                let what =
                    format!("partial_rotary_factor {rotary_part} of head_dim {head_dim} is not pairs of elements");
                return Err(fields.wrong(&what));
            }
            head_dim = rotated;
        } else if rotary_part != 1.0 && !is_proportional {
            let what = format!("partial_rotary_factor {rotary_part} is not implemented, only 1");
            return Err(fields.wrong(&what));
        }
        let mut frequencies: Vec<f64> =
            (0..head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64)).collect();
        if is_proportional {
            // The pairs after the rotary part do not rotate.
            let turning = (rotary_part * head_dim as f64 / 2.0) as usize;
            frequencies.iter_mut().skip(turning).for_each(|f| *f = 0.0);
        }
        let (mut amplitude, mut logit_factor) = (1.0, 1.0);
        if let Some(rope) = parameters.as_ref().or(scaling.as_ref()) {
            match kind(rope)? {
                "yarn" => (amplitude, logit_factor) = scale_yarn(rope, theta, &mut frequencies)?,
                kind => scale(fields, rope, kind, &mut frequencies)?,
            }
        }
        let frequencies = frequencies.into_iter().map(|f| f as f32).collect();
        Ok(Self { frequencies, amplitude: amplitude as f32, logit_factor: logit_factor as f32 })
    }
}

fn scale(config: &Fields<'_>, rope: &Fields<'_>, kind: &str, frequencies: &mut [f64]) -> Result<()> {
    match kind {
        "default" | "proportional" => Ok(()),
        "linear" => {
            let factor = at_least_one(rope, "factor")?;
            frequencies.iter_mut().for_each(|f| *f /= factor);
            Ok(())
        }
        "llama3" => scale_llama3(rope, frequencies),
        other => {
            let what = "default, linear, llama3, proportional and yarn";
            Err(config.wrong(&format!("rope type {other:?} is not implemented, only {what}")))
        }
    }
}

fn kind<'a>(rope: &Fields<'a>) -> Result<&'a str> {
    Ok(rope.text("rope_type")?.or(rope.text("type")?).unwrap_or("default"))
}

/// Scales frequencies by YaRN (arXiv:2309.00071). Pairs with many turns over the training length keep their frequency.
/// Pairs with few turns are stretched by `factor`; pairs between are blended by index. Returns the amplitude, and
/// DeepSeek's factor of the logits.
fn scale_yarn(rope: &Fields<'_>, theta: f64, frequencies: &mut [f64]) -> Result<(f64, f64)> {
    let factor = at_least_one(rope, "factor")?;
    let trained_len = rope.number("original_max_position_embeddings")?;
    let (fast, slow) = (rope.number_or("beta_fast", 32.0)?, rope.number_or("beta_slow", 1.0)?);
    if trained_len <= 0.0 || slow <= 0.0 || fast < slow {
        return Err(rope.wrong(&format!(
            "yarn rope needs 0 < beta_slow <= beta_fast and a length, not {slow}, {fast} and {trained_len}"
        )));
    }
    let dim = 2.0 * frequencies.len() as f64;
    // Index of the pair that makes this many turns over the training length.
    let place = |turns: f64| dim * (trained_len / (turns * TAU)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (place(fast), place(slow));
    if rope.flag_or("truncate", true)? {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim - 1.0));
    if low == high {
        high += 0.001;
    }
    for (i, f) in frequencies.iter_mut().enumerate() {
        let stretched = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        *f = *f / factor * stretched + *f * (1.0 - stretched);
    }
    let grown = |by: f64| 0.1 * by * factor.ln() + 1.0;
    let (some, all) = (rope.number_or("mscale", 0.0)?, rope.number_or("mscale_all_dim", 0.0)?);
    let amplitude = match rope.get("attention_factor") {
        Some(_) => rope.number("attention_factor")?,
        None if some != 0.0 && all != 0.0 => grown(some) / grown(all),
        None => grown(1.0),
    };
    let logit_factor = if all == 0.0 { 1.0 } else { grown(all).powi(2) };
    Ok((amplitude, logit_factor))
}

/// Scales frequencies as Llama 3.1 does. Long wavelengths are stretched by `factor`; short ones keep their frequency;
/// those between are blended.
fn scale_llama3(rope: &Fields<'_>, frequencies: &mut [f64]) -> Result<()> {
    let factor = at_least_one(rope, "factor")?;
    let low = rope.number("low_freq_factor")?;
    let high = rope.number("high_freq_factor")?;
    let trained_len = rope.number("original_max_position_embeddings")?;
    if low <= 0.0 || high < low || trained_len <= 0.0 {
        return Err(rope.wrong(&format!(
            "llama3 rope needs 0 < low_freq_factor <= high_freq_factor and a length, not {low}, {high} and {trained_len}"
        )));
    }
    for f in frequencies {
        let turns = trained_len * *f / TAU; // full turns over the training length
        // Llama 4 has equal factors, and so nothing between them.
        let kept = if turns >= high { 1.0 } else { ((turns - low) / (high - low)).max(0.0) };
        *f = (1.0 - kept) * *f / factor + kept * *f;
    }
    Ok(())
}

fn at_least_one(rope: &Fields<'_>, name: &str) -> Result<f64> {
    let value = rope.number(name)?;
    if value >= 1.0 { Ok(value) } else { Err(rope.wrong(&format!("rope {name} {value} is below 1"))) }
}
