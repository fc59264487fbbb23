//! Compares Qwen3.5's text model without pages with the golden tokens and with a naive model in f64. If this test
//! fails, the model is wrong.

mod common;

use std::collections::BTreeMap;

use common::contiguous::{Contiguous, greedy_by};
use kvarena_host::checkpoint::Checkpoint;
use kvarena_host::config::ModelConfig;
use kvarena_host::delta::{ConvDtype, Delta, DeltaWork, State};
use kvarena_host::files::read_json;
use kvarena_host::model::Model;
use safetensors::SafeTensors;
use serde_json::{Value, json};

const NAME: &str = "qwen3-5-tiny";

#[test]
fn states_in_all_steps_give_the_golden_tokens() {
    let model = common::model(NAME);
    for (number, case) in common::cases(NAME).iter().enumerate() {
        for conv in [ConvDtype::F32, ConvDtype::Bf16] {
            for chunk in [usize::MAX, 48, 7, 1] {
                let storage = Contiguous::new(&model.config, conv);
                let (tokens, _) = greedy_by(&model, &case.prompt, case.tokens.len(), chunk, storage, |_, _| ());
                assert_eq!(tokens, case.tokens, "case {number}, {conv:?}, chunk {chunk}");
            }
        }
    }
}

#[test]
fn configs_are_read_and_unsupported_values_are_named() {
    let path = common::dir(NAME).join("config.json");
    let parse = |change: &dyn Fn(&mut Value)| {
        let mut config = read_json(&path).expect("a config");
        change(&mut config);
        ModelConfig::parse(&path, &config).map_err(|error| error.message)
    };
    let whole = parse(&|_| ()).expect("a config");
    assert_eq!(whole.rope.frequencies.len(), 8, "a quarter of 64 elements");
    let default = parse(&|config| config["rope_parameters"]["partial_rotary_factor"] = Value::Null);
    assert_eq!(default.as_ref(), Ok(&whole));
    let half = parse(&|config| config["rope_parameters"]["partial_rotary_factor"] = json!(0.5));
    assert_eq!(half.expect("a config").rope.frequencies.len(), 16);
    for part in [0.0, 0.3, 2.0] {
        let rejected = parse(&|config| config["rope_parameters"]["partial_rotary_factor"] = json!(part));
        assert!(rejected.is_err_and(|message| message.contains("partial_rotary_factor")), "{part}");
    }
    let rejected = parse(&|config| config["attn_output_gate"] = json!(false));
    assert!(rejected.is_err_and(|message| message.contains("attn_output_gate false")));
    let rejected = parse(&|config| config["layer_types"][1] = json!("mamba"));
    assert!(rejected.is_err_and(|message| message.contains("\"mamba\"")));
}

/// A missing part of a state therefore shows in the tokens.
#[test]
fn both_parts_of_a_state_change_the_tokens() {
    let model = common::model(NAME);
    let cases = common::cases(NAME);
    let case = cases.iter().max_by_key(|case| case.prompt.len()).expect("a case");
    let delta = model.config.delta.as_ref().expect("layers that keep a state");
    let recurrent = delta.state(ConvDtype::F32).recurrent_bytes / size_of::<f32>();
    for is_recurrent in [true, false] {
        let zero = |storage: &mut Contiguous<'_>, done| {
            for [current, _] in storage.states.iter_mut().filter(|[current, _]| done == 336 && !current.is_empty()) {
                let (first, second) = current.split_at_mut(recurrent);
                if is_recurrent { first } else { second }.fill(0.0);
            }
        };
        let storage = Contiguous::new(&model.config, ConvDtype::F32);
        let (tokens, _) = greedy_by(&model, &case.prompt, case.tokens.len(), 48, storage, zero);
        assert_ne!(tokens, case.tokens, "recurrent part: {is_recurrent}");
    }
}

/// The model of the first layers, for each number of layers, in passes of several sizes.
#[test]
fn each_layer_equals_the_naive_model() {
    let cases = common::cases(NAME);
    let tokens = &cases.last().expect("a case").prompt[..60];
    let path = common::dir(NAME).join("config.json");
    let mut config = read_json(&path).expect("a config");
    let types = config["layer_types"].as_array().expect("kinds of layers").clone();
    for layers in 1..=types.len() {
        config["num_hidden_layers"] = json!(layers);
        config["layer_types"] = json!(types[..layers]);
        let expected = Naive::read(&config).logits(tokens);
        let parsed = ModelConfig::parse(&path, &config).expect("a config");
        let mut source = Checkpoint::open(&common::dir(NAME)).expect("a checkpoint");
        let model = Model::build(parsed, &mut source).expect("a model");
        for steps in [&[60][..], &[48, 12], &[1; 60], &[2, 1, 30, 3, 24]] {
            let mut storage = Contiguous::new(&model.config, ConvDtype::F32);
            let (mut done, mut logits) = (0, Vec::new());
            for &step in steps {
                logits.extend(storage.run(&model, &tokens[done..done + step], done));
                done += step;
            }
            let pairs = logits.iter().zip(expected.iter().flatten());
            let worst = pairs.map(|(x, y)| (f64::from(*x) - y).abs() / y.abs().max(1.0)).fold(0.0, f64::max);
            println!("{layers} layers, {steps:?}: logits differ by up to {worst:.1e}");
            assert!(worst < 1e-4, "{layers} layers, {steps:?}: {worst}");
            assert_eq!(logits.len(), 60 * model.config.vocab);
        }
    }
}

/// Each sequence of a step has its own state, and reads one place or two.
#[test]
fn sequences_of_a_step_are_independent() {
    let config = ModelConfig::read(&common::dir(NAME)).expect("a config");
    let sizes = config.delta.as_ref().expect("layers that keep a state");
    let mut source = Checkpoint::open(&common::dir(NAME)).expect("a checkpoint");
    let layer = Delta::build(&mut source, "model.layers.1.linear_attn", config.hidden, sizes).expect("a layer");
    let len = sizes.state(ConvDtype::F32).bytes() / size_of::<f32>();
    let x: Vec<f32> = (0..30 * config.hidden).map(noise).collect();
    let before: Vec<Vec<f32>> = (0..3).map(|sequence| (0..len).map(|i| noise(i * 3 + sequence)).collect()).collect();
    // A projection of all rows sums in the same order for all of them.
    let run = |sequences: &[usize], states: &mut [Vec<f32>]| {
        let (mut work, mut out) = (DeltaWork::default(), Vec::new());
        layer.project(&x, &mut work, &mut Vec::new());
        let mut step = layer.step(&mut work, &mut out);
        for &sequence in sequences {
            let state = bytemuck::cast_slice_mut(&mut states[sequence]);
            let state = match sequence {
                1 => State::From(bytemuck::cast_slice(&before[1]), state),
                _ => State::InPlace(state),
            };
            step.update(10 * sequence..10 * sequence + 10, state, ConvDtype::F32);
        }
        out
    };
    let fresh = [before[0].clone(), vec![f32::NAN; len], before[2].clone()];
    let mut together = fresh.clone();
    let all = run(&[0, 1, 2], &mut together);
    for sequence in 0..3 {
        let mut alone = fresh.clone();
        let out = run(&[sequence], &mut alone);
        let rows = 10 * sequence * sizes.value_width()..10 * (sequence + 1) * sizes.value_width();
        assert_eq!(all[rows.clone()], out[rows], "sequence {sequence}");
        assert_eq!(together[sequence], alone[sequence], "sequence {sequence}");
        assert_ne!(together[sequence], before[sequence], "sequence {sequence}");
    }
}

/// Returns a number between -1 and 1.
fn noise(i: usize) -> f32 {
    (i as f32 * 12.9898).sin() * 43758.547 % 1.0
}

/// The model in f64, one token at a time, with K, V and states of one sequence.
struct Naive {
    config: Value,
    weights: BTreeMap<String, Vec<f64>>,
}

/// What a layer keeps of the tokens so far: rows of K and V, or inputs of the convolution and the recurrent part.
#[derive(Default)]
struct Kept {
    k: Vec<Vec<f64>>,
    v: Vec<Vec<f64>>,
    inputs: Vec<Vec<f64>>,
    state: Vec<f64>,
}

impl Naive {
    fn read(config: &Value) -> Self {
        let bytes = std::fs::read(common::dir(NAME).join("model.safetensors")).expect("a file");
        let tensors = SafeTensors::deserialize(&bytes).expect("tensors");
        let widen = |bytes: &[u8]| bytemuck::pod_collect_to_vec::<u8, half::bf16>(bytes);
        let weights = tensors
            .iter()
            .map(|(name, view)| (name.to_owned(), widen(view.data()).into_iter().map(f64::from).collect()));
        Self { config: config.clone(), weights: weights.collect() }
    }

    fn size(&self, name: &str) -> usize {
        self.config[name].as_u64().expect("a size") as usize
    }

    fn weight(&self, name: &str) -> &[f64] {
        &self.weights[name]
    }

    /// Returns `weight * x`.
    fn product(&self, name: &str, x: &[f64]) -> Vec<f64> {
        self.weight(&format!("{name}.weight")).chunks(x.len()).map(|row| dot(row, x)).collect()
    }

    /// Returns the norm of x with a weight that is stored as its difference from 1.
    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let factor = 1.0 / (dot(x, x) / x.len() as f64 + 1e-6).sqrt();
        x.iter().zip(self.weight(&format!("{name}.weight"))).map(|(x, w)| x * factor * (1.0 + w)).collect()
    }

    /// Returns the logits after each token.
    fn logits(&self, tokens: &[u32]) -> Vec<Vec<f64>> {
        let layers = self.size("num_hidden_layers");
        let mut kept: Vec<Kept> = (0..layers).map(|_| Kept::default()).collect();
        let hidden = self.size("hidden_size");
        let mut logits = Vec::new();
        for (position, &token) in tokens.iter().enumerate() {
            let mut x = self.weight("model.embed_tokens.weight")[token as usize * hidden..][..hidden].to_vec();
            for (layer, kept) in kept.iter_mut().enumerate() {
                let name = format!("model.layers.{layer}");
                let normed = self.norm(&format!("{name}.input_layernorm"), &x);
                let mixed = match self.config["layer_types"][layer].as_str() {
                    Some("full_attention") => self.attend(&format!("{name}.self_attn"), &normed, position, kept),
                    _ => self.delta(&format!("{name}.linear_attn"), &normed, kept),
                };
                x.iter_mut().zip(mixed).for_each(|(x, y)| *x += y);
                let normed = self.norm(&format!("{name}.post_attention_layernorm"), &x);
                let gate = self.product(&format!("{name}.mlp.gate_proj"), &normed);
                let up = self.product(&format!("{name}.mlp.up_proj"), &normed);
                let inner: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| gate * sigmoid(*gate) * up).collect();
                let down = self.product(&format!("{name}.mlp.down_proj"), &inner);
                x.iter_mut().zip(down).for_each(|(x, y)| *x += y);
            }
            logits.push(self.product("lm_head", &self.norm("model.norm", &x)));
        }
        logits
    }

    /// One token of a layer of Gated DeltaNet.
    fn delta(&self, name: &str, x: &[f64], kept: &mut Kept) -> Vec<f64> {
        let (key_heads, heads) = (self.size("linear_num_key_heads"), self.size("linear_num_value_heads"));
        let (key_dim, dim) = (self.size("linear_key_head_dim"), self.size("linear_value_head_dim"));
        kept.inputs.push(self.product(&format!("{name}.in_proj_qkv"), x));
        kept.state.resize(heads * key_dim * dim, 0.0);
        let taps = self.weight(&format!("{name}.conv1d.weight")).chunks(4);
        let convolve = |(channel, taps): (usize, &[f64])| {
            let inputs = kept.inputs.iter().rev().zip(taps.iter().rev());
            let sum: f64 = inputs.map(|(input, tap)| input[channel] * tap).sum();
            sum * sigmoid(sum)
        };
        let mixed: Vec<f64> = taps.enumerate().map(convolve).collect();
        let [a, b, z] = ["a", "b", "z"].map(|part| self.product(&format!("{name}.in_proj_{part}"), x));
        let mut out = Vec::new();
        for head in 0..heads {
            let key = head / (heads / key_heads) * key_dim;
            let q = unit(&mixed[key..][..key_dim]);
            let k = unit(&mixed[key_heads * key_dim + key..][..key_dim]);
            let v = &mixed[2 * key_heads * key_dim + head * dim..][..dim];
            let step = (1.0 + (a[head] + self.weight(&format!("{name}.dt_bias"))[head]).exp()).ln();
            let decay = (-self.weight(&format!("{name}.A_log"))[head].exp() * step).exp();
            let state = &mut kept.state[head * key_dim * dim..][..key_dim * dim];
            state.iter_mut().for_each(|s| *s *= decay);
            let mut read = vec![0.0; dim];
            for (j, read) in read.iter_mut().enumerate() {
                let recalled: f64 = (0..key_dim).map(|i| state[i * dim + j] * k[i]).sum();
                (0..key_dim).for_each(|i| state[i * dim + j] += k[i] * sigmoid(b[head]) * (v[j] - recalled));
                *read = (0..key_dim).map(|i| state[i * dim + j] * q[i]).sum::<f64>() / (key_dim as f64).sqrt();
            }
            let factor = 1.0 / (dot(&read, &read) / dim as f64 + 1e-6).sqrt();
            let gates = z[head * dim..].iter().zip(self.weight(&format!("{name}.norm.weight")));
            out.extend(read.iter().zip(gates).map(|(x, (z, w))| x * factor * w * z * sigmoid(*z)));
        }
        self.product(&format!("{name}.out_proj"), &out)
    }

    /// One token of a layer of attention.
    fn attend(&self, name: &str, x: &[f64], position: usize, kept: &mut Kept) -> Vec<f64> {
        let (heads, kv_heads) = (self.size("num_attention_heads"), self.size("num_key_value_heads"));
        let dim = self.size("head_dim");
        let place = |norm: &str, head: &[f64]| {
            let head = self.norm(&format!("{name}.{norm}"), head);
            rotate(&head, position, &self.config["rope_parameters"])
        };
        let both = self.product(&format!("{name}.q_proj"), x);
        let k = self.product(&format!("{name}.k_proj"), x);
        kept.k.push(k.chunks(dim).flat_map(|head| place("k_norm", head)).collect());
        kept.v.push(self.product(&format!("{name}.v_proj"), x));
        let mut out = Vec::new();
        for (head, both) in both.chunks(2 * dim).enumerate() {
            let (q, gates) = both.split_at(dim);
            let q = place("q_norm", q);
            let at = head / (heads / kv_heads) * dim;
            let weights = kept.k.iter().map(|k| (dot(&q, &k[at..][..dim]) / (dim as f64).sqrt()).exp());
            let weights: Vec<f64> = weights.collect();
            let total: f64 = weights.iter().sum();
            for (i, gate) in gates.iter().enumerate() {
                let sum: f64 = weights.iter().zip(&kept.v).map(|(weight, v)| weight * v[at + i]).sum();
                out.push(sum / total * sigmoid(*gate));
            }
        }
        self.product(&format!("{name}.o_proj"), &out)
    }
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn unit(x: &[f64]) -> Vec<f64> {
    let len = (dot(x, x) + 1e-6).sqrt();
    x.iter().map(|x| x / len).collect()
}

/// Rotates the first elements of a head.
fn rotate(head: &[f64], position: usize, rope: &Value) -> Vec<f64> {
    let number = |name: &str| rope[name].as_f64().expect("a number");
    let pairs = (head.len() as f64 * number("partial_rotary_factor")) as usize / 2;
    let mut out = head.to_vec();
    for i in 0..pairs {
        let angle = position as f64 * number("rope_theta").powf(-(i as f64) / pairs as f64);
        let (a, b) = (head[i], head[i + pairs]);
        out[i] = a * angle.cos() - b * angle.sin();
        out[i + pairs] = b * angle.cos() + a * angle.sin();
    }
    out
}
