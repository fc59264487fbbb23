//! Mixtures of experts: the choice of a token's experts, and the sum of their outputs.
//!
//! DeepSeek V3 scores experts by sigmoids. A correction bias affects the choice of groups and experts, but not the
//! weights. All tokens also use the shared expert, if there is one. gpt-oss weights the chosen experts by the softmax
//! of their logits. Llama 4 multiplies the inputs of the chosen experts by the sigmoids of their logits, and also has a
//! shared expert. Outputs are added in ascending order of experts, after the shared expert's output.

use serde_json::{Value, json};

use crate::error::Result;
use crate::family::Family;
use crate::fields::Fields;
use crate::linear::{Activation, Linear, Mlp, MlpWork, resize};
use crate::matrix::Matrix;
use crate::ops::SWIGLU_LIMIT as LIMIT;
use crate::source::Source;

/// The rule that chooses a token's experts and computes their weights.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Routing {
    /// DeepSeek V3.
    Grouped {
        /// Number of groups of consecutive experts.
        groups: usize,
        /// Number of groups from which experts are chosen. A group's score is the sum of the corrected scores of its
        /// two best experts.
        kept: usize,
        /// Whether the weights are divided by their sum before scaling.
        normalised: bool,
        /// Factor of the weights.
        scaling: f32,
    },
    /// gpt-oss.
    Softmax,
    /// Llama 4: the weights multiply the inputs of experts, not their outputs.
    Sigmoid,
}

/// The experts of a model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ExpertsConfig {
    /// The first layer with experts.
    pub first_layer: usize,
    /// Layers from one layer with experts to the next.
    pub step: usize,
    /// Number of experts of a layer, without the shared one.
    pub count: usize,
    /// Number of experts of one token, without the shared one.
    pub per_token: usize,
    /// Width of one expert.
    pub intermediate: usize,
    /// Width of the shared expert; 0 without one.
    pub shared: usize,
    /// The rule that chooses and weights a token's experts.
    pub routing: Routing,
}

impl ExpertsConfig {
    /// Returns the experts of a model; `None` if the host implements no experts for its family.
    ///
    /// # Errors
    /// A field is missing, invalid, contradicts another one, or requests an unsupported method.
    pub fn parse(fields: &Fields<'_>, family: Family) -> Result<Option<Self>> {
        let config = match family {
            Family::Llama | Family::Qwen3 | Family::Gemma3 | Family::Gemma4 | Family::Qwen3_5 => return Ok(None),
            Family::Llama4 => match Self::llama4(fields)? {
                Some(config) => config,
                None => return Ok(None),
            },
            Family::DeepseekV3 => Self::deepseek(fields)?,
            Family::GptOss => {
                if fields.number_or("swiglu_limit", LIMIT.into())? != f64::from(LIMIT) {
                    return Err(fields.wrong(&format!("swiglu_limit is implemented as {LIMIT} only")));
                }
                Self {
                    first_layer: 0,
                    step: 1,
                    count: fields.size("num_local_experts")?,
                    per_token: fields.size_or("num_experts_per_tok", 4)?,
                    intermediate: fields.size("intermediate_size")?,
                    shared: 0,
                    routing: Routing::Softmax,
                }
            }
        };
        let Self { count, per_token, .. } = config;
        if per_token > count {
            let what = format!("num_experts_per_tok {per_token} is more than {count} experts");
            return Err(fields.wrong(&what));
        }
        Ok(Some(config))
    }

    /// Returns whether a layer has experts.
    pub fn is_in(&self, layer: usize) -> bool {
        layer >= self.first_layer && (layer - self.first_layer).is_multiple_of(self.step)
    }

    /// Returns Llama 4's experts, if any layer has them. `moe_layers` names these layers; without it, every
    /// `interleave_moe_layer_step`-th layer has experts.
    fn llama4(fields: &Fields<'_>) -> Result<Option<Self>> {
        let layers = fields.size("num_hidden_layers")?;
        let step = fields.size_or("interleave_moe_layer_step", 1)?;
        let (first_layer, step) = match fields.get("moe_layers") {
            None => (step - 1, step),
            Some(Value::Array(list)) if list.is_empty() => return Ok(None),
            Some(list) => {
                let at = |i: usize| list.get(i).and_then(Value::as_u64).map(|n| n as usize);
                let first = at(0).unwrap_or(layers);
                let step = at(1).and_then(|next| next.checked_sub(first)).unwrap_or(layers).max(1);
                let evenly: Vec<_> = (first..layers).step_by(step).collect();
                if evenly.is_empty() || *list != json!(evenly) {
                    let what = "moe_layers: only evenly spaced layers up to the last are implemented";
                    return Err(fields.wrong(what));
                }
                (first, step)
            }
        };
        let intermediate = fields.size("intermediate_size")?;
        Ok(Some(Self {
            first_layer,
            step,
            count: fields.size_or("num_local_experts", 16)?,
            per_token: fields.size_or("num_experts_per_tok", 1)?,
            intermediate,
            shared: intermediate,
            routing: Routing::Sigmoid,
        }))
    }

    fn deepseek(fields: &Fields<'_>) -> Result<Self> {
        for (name, wanted) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
            let kind = fields.text(name)?.unwrap_or(wanted);
            if kind != wanted {
                let what = format!("{name} {kind:?} is not implemented, only {wanted:?}");
                return Err(fields.wrong(&what));
            }
        }
        if fields.size_or("moe_layer_freq", 1)? != 1 {
            return Err(fields.wrong("moe_layer_freq is implemented as 1 only"));
        }
        let count = fields.size("n_routed_experts")?;
        let groups = fields.size_or("n_group", 1)?;
        let kept = fields.size_or("topk_group", 1)?;
        let per_group = count / groups;
        if !count.is_multiple_of(groups) || kept > groups || per_group < 2 {
            let what = format!("{count} experts cannot form {groups} groups, of which {kept} are kept");
            return Err(fields.wrong(&what));
        }
        let per_token = fields.size("num_experts_per_tok")?;
        if per_token > kept * per_group {
            let what = format!("num_experts_per_tok {per_token} is more than {kept} groups have");
            return Err(fields.wrong(&what));
        }
        let intermediate = fields.size("moe_intermediate_size")?;
        Ok(Self {
            first_layer: fields.count_or("first_k_dense_replace", 0)?,
            step: 1,
            count,
            per_token,
            intermediate,
            shared: intermediate * fields.count_or("n_shared_experts", 0)?,
            routing: Routing::Grouped {
                groups,
                kept,
                normalised: fields.flag_or("norm_topk_prob", true)?,
                scaling: fields.number_or("routed_scaling_factor", 1.0)? as f32,
            },
        })
    }
}

/// One layer's experts.
pub struct Experts {
    config: ExpertsConfig,
    router: Linear,
    correction: Option<Vec<f32>>,
    list: Vec<Mlp>,
    shared: Option<Mlp>,
}

/// Buffers of the computation, reused.
#[derive(Default)]
pub struct ExpertsWork {
    logits: Vec<f32>,
    /// `[tokens, per_token]`: experts and their weights.
    chosen: Vec<(usize, f32)>,
    /// Tokens of an expert, and the weights of its outputs.
    rows: Vec<(usize, f32)>,
    x: Vec<f32>,
    y: Vec<f32>,
    mlp: MlpWork,
}

impl Experts {
    /// Builds a layer's experts. `name` is the name of the layer's `mlp` in the checkpoint.
    pub fn build(source: &mut dyn Source, name: &str, hidden: usize, config: ExpertsConfig) -> Result<Self> {
        let ExpertsConfig { count, intermediate, .. } = config;
        if !matches!(config.routing, Routing::Grouped { .. }) {
            let bias = config.routing == Routing::Softmax;
            let router = Linear::build(source, &format!("{name}.router"), count, hidden, bias)?;
            let list = packed_experts(source, &format!("{name}.experts"), hidden, config)?;
            let shared = shared(source, &format!("{name}.shared_expert"), hidden, config)?;
            return Ok(Self { config, router, correction: None, list, shared });
        }
        let router = Linear::build(source, &format!("{name}.gate"), count, hidden, false)?;
        let correction = source.vector(&format!("{name}.gate.e_score_correction_bias"), count)?;
        let mlp = |i| Mlp::build(source, &format!("{name}.experts.{i}"), (hidden, intermediate), false);
        let list = (0..count).map(mlp).collect::<Result<_>>()?;
        let shared = shared(source, &format!("{name}.shared_experts"), hidden, config)?;
        Ok(Self { config, router, correction: Some(correction), list, shared })
    }

    /// Computes `out[t]`, the weighted sum of the outputs of `x[t]`'s experts and of the shared one.
    pub fn apply(&self, x: &[f32], out: &mut Vec<f32>, work: &mut ExpertsWork, transposed: &mut Vec<f32>) {
        let hidden = self.router.weight.cols();
        self.router.apply(x, &mut work.logits, transposed);
        work.chosen.clear();
        for logits in work.logits.chunks_exact(self.config.count) {
            self.choose(logits, &mut work.chosen);
        }
        match &self.shared {
            Some(shared) => shared.apply(x, out, &mut work.mlp, transposed),
            None => {
                out.clear();
                resize(out, x.len());
            }
        }
        let scales_inputs = self.config.routing == Routing::Sigmoid;
        for (number, expert) in self.list.iter().enumerate() {
            work.rows.clear();
            work.x.clear();
            for (token, chosen) in work.chosen.chunks_exact(self.config.per_token).enumerate() {
                let Some(&(_, weight)) = chosen.iter().find(|one| one.0 == number) else {
                    continue;
                };
                work.rows.push((token, if scales_inputs { 1.0 } else { weight }));
                let x = &x[token * hidden..(token + 1) * hidden];
                let factor = if scales_inputs { weight } else { 1.0 };
                work.x.extend(x.iter().map(|x| x * factor));
            }
            if work.rows.is_empty() {
                continue;
            }
            expert.apply(&work.x, &mut work.y, &mut work.mlp, transposed);
            for (&(token, weight), row) in work.rows.iter().zip(work.y.chunks_exact(hidden)) {
                let out = &mut out[token * hidden..(token + 1) * hidden];
                out.iter_mut().zip(row).for_each(|(out, row)| *out += weight * row);
            }
        }
    }

    /// Appends one token's experts and their weights to `chosen`.
    fn choose(&self, logits: &[f32], chosen: &mut Vec<(usize, f32)>) {
        let first = chosen.len();
        let take = self.config.per_token;
        let Routing::Grouped { groups, kept, normalised, scaling } = self.config.routing else {
            chosen.extend(best(logits, take).into_iter().map(|i| (i, logits[i])));
            if self.config.routing == Routing::Sigmoid {
                chosen[first..].iter_mut().for_each(|one| one.1 = sigmoid(one.1));
                return;
            }
            let top = chosen[first].1;
            chosen[first..].iter_mut().for_each(|one| one.1 = (one.1 - top).exp());
            let sum: f32 = chosen[first..].iter().map(|one| one.1).sum();
            chosen[first..].iter_mut().for_each(|one| one.1 /= sum);
            return;
        };
        let scores: Vec<f32> = logits.iter().copied().map(sigmoid).collect();
        let correction = self.correction.as_ref().expect("grouped routing has a correction");
        let mut ranked: Vec<f32> = scores.iter().zip(correction).map(|(x, y)| x + y).collect();
        let size = ranked.len() / groups;
        let score = |group: &[f32]| best(group, 2).into_iter().map(|i| group[i]).sum::<f32>();
        let group_scores: Vec<f32> = ranked.chunks_exact(size).map(score).collect();
        let kept = best(&group_scores, kept);
        for (group, ranked) in ranked.chunks_exact_mut(size).enumerate() {
            if !kept.contains(&group) {
                // The group's experts are never chosen, even if all other scores are negative. Transformers 5.17.0,
                // modeling_deepseek_v3.py, line 162:
                // scores_for_choice.masked_fill(~score_mask.bool(), float("-inf")).
                ranked.fill(f32::NEG_INFINITY);
            }
        }
        chosen.extend(best(&ranked, take).into_iter().map(|i| (i, scores[i])));
        let sum: f32 = chosen[first..].iter().map(|one| one.1).sum();
        let divisor = if normalised { sum + 1e-20 } else { 1.0 };
        chosen[first..].iter_mut().for_each(|one| one.1 = one.1 / divisor * scaling);
    }
}

/// Builds the shared expert, if there is one.
fn shared(source: &mut dyn Source, name: &str, hidden: usize, config: ExpertsConfig) -> Result<Option<Mlp>> {
    let has_one = config.shared > 0;
    has_one.then(|| Mlp::build(source, name, (hidden, config.shared), false)).transpose()
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns the indices of the `count` largest numbers, the largest first. Among equal numbers the lower index comes
/// first.
fn best(numbers: &[f32], count: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..numbers.len()).collect();
    places.sort_by(|&a, &b| numbers[b].total_cmp(&numbers[a]));
    places.truncate(count);
    places
}

/// Builds the experts of gpt-oss and Llama 4. The checkpoint stores all experts in two tensors of transposed matrices.
/// The columns of gate and up alternate in gpt-oss, which has biases; in Llama 4, up follows gate.
fn packed_experts(source: &mut dyn Source, name: &str, hidden: usize, config: ExpertsConfig) -> Result<Vec<Mlp>> {
    let ExpertsConfig { count, intermediate, .. } = config;
    let (both, alternate) = (2 * intermediate, config.routing == Routing::Softmax);
    let mut bias =
        |part: &str, cols| alternate.then(|| source.matrix(&format!("{name}.{part}_bias"), count, cols)).transpose();
    let (gate_up_bias, down_bias) = (bias("gate_up_proj", both)?, bias("down_proj", hidden)?);
    let bias_of = |biases: &Option<Matrix>, i: usize| {
        biases.as_ref().map(|biases| {
            let mut row = vec![0.0; biases.cols()];
            biases.row(i, &mut row);
            row
        })
    };
    let gate_up = source.stack(&format!("{name}.gate_up_proj"), count, hidden, both)?;
    let halves = |i: usize| {
        let transposed = gate_up.part(i * hidden..(i + 1) * hidden).transpose();
        let bias = bias_of(&gate_up_bias, i);
        [0, 1].map(|side| Linear {
            weight: if alternate {
                transposed.every_other(side)
            } else {
                transposed.part(side * intermediate..(side + 1) * intermediate)
            },
            bias: bias.as_ref().map(|bias| bias.iter().skip(side).step_by(2).copied().collect()),
        })
    };
    let gate_ups: Vec<_> = (0..count).map(halves).collect();
    drop(gate_up); // So that only one of the large tensors is in memory beside the experts.
    let down = source.stack(&format!("{name}.down_proj"), count, intermediate, hidden)?;
    let activation = if alternate { Activation::Clamped } else { Activation::Silu };
    let mlp = |(i, [gate, up]): (usize, [Linear; 2])| {
        let weight = down.part(i * intermediate..(i + 1) * intermediate).transpose();
        let down = Linear { weight, bias: bias_of(&down_bias, i) };
        Mlp { gate, up, down, activation }
    };
    Ok(gate_ups.into_iter().enumerate().map(mlp).collect())
}
