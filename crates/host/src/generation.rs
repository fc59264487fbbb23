//! Sampling parameters of `generation_config.json`, which a model's authors recommend.

use std::path::Path;

use crate::error::Result;
use crate::fields::Fields;
use crate::files::read_json;

/// The sampling parameters that vLLM reads from the file, except `max_new_tokens`; `None` for those that the file does
/// not set.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Generation {
    /// Temperature of the draws.
    pub temperature: Option<f32>,
    /// See [`Sampling`](crate::sample::Sampling); 0 considers all tokens.
    pub top_k: Option<u32>,
    /// See [`Sampling`](crate::sample::Sampling).
    pub top_p: Option<f32>,
    /// See [`Sampling`](crate::sample::Sampling).
    pub min_p: Option<f32>,
    /// See [`Shaping`](crate::shaping::Shaping).
    pub repetition: Option<f32>,
}

impl Generation {
    /// Reads the file of a model directory, if there is one.
    ///
    /// # Errors
    /// The file cannot be read or parsed, or a parameter is out of its range.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("generation_config.json");
        if !path.exists() {
            return Ok(Self::default());
        }
        let value = read_json(&path)?;
        let fields = Fields::new(&path, &value)?;
        let number = |name: &str, range: &str, is_valid: fn(f32) -> bool| {
            if fields.get(name).is_none() {
                return Ok(None);
            }
            let number = fields.number(name)? as f32;
            let wrong = format!("{name} {number} is not {range}; --generation-config none ignores it");
            if is_valid(number) { Ok(Some(number)) } else { Err(fields.wrong(&wrong)) }
        };
        // As in vLLM, -1 also stands for all tokens.
        let is_count = |k: f32| k >= -1.0 && k.fract() == 0.0;
        Ok(Self {
            temperature: number("temperature", "from 0 to 2", |t| (0.0..=2.0).contains(&t))?,
            top_k: number("top_k", "a whole number from -1", is_count)?.map(|k| k.max(0.0) as u32),
            top_p: number("top_p", "above 0 and at most 1", |p| p > 0.0 && p <= 1.0)?,
            min_p: number("min_p", "from 0 to 1", |p| (0.0..=1.0).contains(&p))?,
            repetition: number("repetition_penalty", "above 0 and at most 1000", |r| r > 0.0 && r <= 1e3)?,
        })
    }
}
