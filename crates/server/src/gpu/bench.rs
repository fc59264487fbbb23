//! Speed measurements: the rows of `kvarena-server --bench`.
//!
//! The workload is that of a published engine's benchmark, so the numbers are comparable. Prompts are random tokens
//! below 10,000, and requests ignore stop tokens. `offline` samples at temperature 0.6, `prefill` is greedy, and
//! `decode` is greedy by default. A decode row's `ms` is the median of the steps in which all streams generate, after
//! prompts of 1,024 (`--context`). If the prompts take n steps, and the first prompt takes one, these are 129 - n steps
//! for n up to 32, and 97 steps for larger n. Longer or shared prompts leave more steps. `ms_at_context` is the median
//! of the first nine. With `--sparse` a row contains the number of positions that streams read. With several ranks, the
//! times of a step's parts are null: rank 0 alone would run this measurement, and its sums would wait forever for the
//! other ranks.

mod load;
mod sums;

use std::io::Write;

use serde_json::{Value, json};

use super::report::{idle, median_ms};
use super::setup::Loaded;
use crate::args::{Args, Bench, DtypeName, Shape};
use crate::setup::{config_of, engine_config, unusable};
use kvarena_host::clock::Part;
use kvarena_host::error::{Error, Result};
use kvarena_host::gpu::products::Op;
use kvarena_host::gpu::runner::OnGpu;
use kvarena_host::gpu::sums::{Link, Transport};
use kvarena_host::gpu::weights::Share;
use kvarena_host::request::{Defaults, Request};
use kvarena_host::sample::{Sampling, splitmix};
use kvarena_host::server::{Server, Sink};

/// Prompt and output tokens of the offline requests, in order.
const OFFLINE: &str = include_str!("offline.json");
const DECODE_STEPS: u32 = 128;
/// Steps of the first pass. All streams of the largest batch must run at once, and a stream begins when its prompt is
/// computed. If the prompts take more than half of these steps, `decode` adds the excess.
const FIRST_STEPS: u32 = 64;
const PREFILL_PROMPTS: usize = 64;

struct Discard;
impl Sink for Discard {}

/// Random prompts.
struct Prompts {
    state: u64,
    /// All tokens are below this number.
    vocab: u64,
    /// The length of the prefix that all prompts share.
    common: usize,
}

impl Prompts {
    fn request(&mut self, len: usize, new_tokens: u32, temperature: f32) -> Request {
        let sampling = Sampling { temperature, seed: self.state, ..Sampling::default() };
        let defaults = Defaults { max_new_tokens: Some(new_tokens), samples: 1, sampling, stop: Vec::new() };
        let (vocab, mut fixed) = (self.vocab, 0xC0);
        let token = |state: &mut u64| (splitmix(state) % vocab) as u32;
        let tokens = (0..len).map(|i| token(if i < self.common { &mut fixed } else { &mut self.state }));
        defaults.request(tokens.collect())
    }
}

/// Measures a part and prints one row in each line.
///
/// # Errors
/// No usable GPU, an option that cannot be served, or a failed run.
pub fn run(args: &Args, part: Bench, out: &mut impl Write) -> Result<()> {
    let shape = args.random_model.unwrap_or(Shape::Qwen3_0_6B);
    let batches: Vec<usize> = args.batch.iter().map(|&n| n as usize).collect();
    let concurrency = match part {
        Bench::Decode => batches.iter().copied().max().unwrap_or(1) as u32,
        Bench::Offline => 256,
        Bench::Prefill => PREFILL_PROMPTS as u32,
        Bench::Load => 1,
        Bench::Sums => return sums::run(args, shape, &batches, out),
    };
    let args =
        Args { random_model: Some(shape), concurrency, kv_dtype: DtypeName::Bf16, first_logits: 0, ..args.clone() };
    let args = if part == Bench::Load { load::args(&args, page_bytes(&args, shape)?) } else { args };
    let mut loaded = Loaded::new(&args)?;
    match args.tp {
        1 => rows(&args, (part, shape), &batches, &mut loaded.one(&args)?, out),
        _ => rows(&args, (part, shape), &batches, &mut loaded.ranks(&args)?, out),
    }
}

/// Returns the bytes of a page on one GPU.
fn page_bytes(args: &Args, shape: Shape) -> Result<u64> {
    let args = Args { pages: Some(1), ..args.clone() };
    let share = Share { rank: 0, ranks: args.tp as usize };
    let config = engine_config(&args, &share.of(&config_of(shape)?)?, 0)?;
    Ok(config.shape().map_err(unusable)?.layout.page_bytes())
}

fn rows(
    args: &Args,
    (part, shape): (Bench, Shape),
    batches: &[usize],
    server: &mut Server<impl OnGpu>,
    out: &mut impl Write,
) -> Result<()> {
    let vocab = server.runner().config().vocab.min(10_000) as u64;
    let common = if part == Bench::Decode { args.common as usize } else { 0 };
    let mut prompts = Prompts { state: args.seed ^ 0xBE4C, vocab, common };
    let sums = server.runner().gpu().forward().link().map(Link::sums);
    let mut print = |row| print(args, shape, sums, row, out);
    let context = args.context as usize;
    match part {
        Bench::Decode => {
            let (alone, temperature) = (args.tp == 1, args.temperature.unwrap_or(0.0));
            for &batch in batches {
                print(decode(server, &mut prompts, (batch, context, alone), temperature)?)?;
            }
            Ok(())
        }
        Bench::Offline => {
            warm(server, &mut prompts, 0.6)?;
            print(offline(server, &mut prompts)?)
        }
        Bench::Prefill => {
            prefill(server, &mut prompts, context)?;
            print(prefill(server, &mut prompts, context)?)
        }
        Bench::Load => load::rows(server, &mut prompts, context)?.into_iter().try_for_each(print),
        Bench::Sums => unreachable!("sums need no server"),
    }
}

/// Prints a row as a line, with its parameters.
fn print(args: &Args, shape: Shape, sums: Option<Transport>, mut row: Value, out: &mut impl Write) -> Result<()> {
    row["model"] = shape.name().into();
    if let Some(sums) = sums {
        row["tp"] = args.tp.into();
        row["sums"] = sums.name().into();
    }
    if let Some(sparse) = args.sparse {
        row["sparse"] = sparse.top.into();
    }
    let line = if args.json { row.to_string() } else { plain(&row) };
    writeln!(out, "{line}").map_err(|e| Error::run(format!("cannot write: {e}")))
}

fn plain(row: &Value) -> String {
    let fields = row.as_object().into_iter().flatten();
    fields.map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
}

fn submit(server: &mut Server<impl OnGpu>, requests: Vec<Request>) -> Result<()> {
    requests.into_iter().try_for_each(|request| server.submit(request).map(|_| ()))
}

/// Captures the graphs of steps of up to 256 streams.
fn warm(server: &mut Server<impl OnGpu>, prompts: &mut Prompts, temperature: f32) -> Result<()> {
    let mut before = 0;
    for streams in 1..=256 {
        let size = kvarena_host::gpu::products::padded_rows(streams);
        if size == before {
            continue;
        }
        before = size;
        submit(server, (0..streams).map(|_| prompts.request(2, 3, temperature)).collect())?;
        server.run(&mut Discard)?;
    }
    Ok(())
}

/// Returns the host's microseconds in the engine, in launches and in waits, summed over all runs of the server.
fn host_us(server: &Server<impl OnGpu>) -> [f64; 3] {
    let (_, clock) = server.tally();
    [Part::Engine, Part::Launch, Part::Wait].map(|part| clock.spent(part).as_secs_f64() * 1e6)
}

fn decode(
    server: &mut Server<impl OnGpu>,
    prompts: &mut Prompts,
    (batch, context, alone): (usize, usize, bool),
    temperature: f32,
) -> Result<Value> {
    // The first run captures graphs and measures the parts; the second measures the steps.
    let requests = |prompts: &mut Prompts, steps| -> Vec<Request> {
        (0..batch).map(|_| prompts.request(context, steps, temperature)).collect()
    };
    let chunks = (batch * context).div_ceil(server.policy().chunk as usize) as u32;
    let more = chunks.saturating_sub(FIRST_STEPS / 2);
    submit(server, requests(prompts, FIRST_STEPS + more))?;
    if alone {
        server.runner_mut().gpu_mut().measure_parts(batch);
    }
    server.run(&mut Discard)?;
    let parts = server.runner_mut().gpu_mut().take_parts();
    let part_ms = |part: usize| parts.map(|parts| parts[part]);
    server.runner_mut().gpu_mut().take_times();
    let before = host_us(server);
    submit(server, requests(prompts, DECODE_STEPS + 1 + more))?;
    server.run(&mut Discard)?;
    let after = host_us(server);
    let times = server.runner_mut().gpu_mut().take_times();
    let [engine, launch, wait] = [0, 1, 2].map(|i| (after[i] - before[i]) / times.len() as f64);
    let decodes: Vec<_> = times.iter().copied().filter(|t| t.decode && t.tokens == batch).collect();
    let products = server.runner().gpu().forward().products();
    let ways: Vec<String> =
        [Op::Qkv, Op::Out, Op::GateUp, Op::Down, Op::Logits].map(|op| products.method(op, batch)).to_vec();
    Ok(json!({
        "part": "decode",
        "batch": batch,
        "context": context,
        "common": prompts.common,
        "ms": median_ms(&decodes, batch),
        // Median of the first steps, before the contexts have grown.
        "ms_at_context": median_ms(&decodes[..decodes.len().min(9)], batch),
        "attention_ms": part_ms(1),
        "products_ms": part_ms(2),
        "small_ms": part_ms(3),
        "graph_ms": part_ms(0),
        "gpu_idle": idle(&decodes[1.min(decodes.len())..]),
        "engine_us": engine,
        "launch_us": launch,
        "wait_us": wait,
        "ways": ways,
    }))
}

fn offline(server: &mut Server<impl OnGpu>, prompts: &mut Prompts) -> Result<Value> {
    let list: Value = serde_json::from_str(OFFLINE).expect("the list is JSON");
    let field = |item: &Value, name: &str| item[name].as_u64().expect("a number");
    let items = list.as_array().expect("a list");
    let requests = items.iter().map(|item| {
        let (len, new) = (field(item, "prompt_tokens"), field(item, "output_tokens"));
        prompts.request(len as usize, new as u32, 0.6)
    });
    submit(server, requests.collect())?;
    server.runner_mut().gpu_mut().take_times();
    let seconds = server.tally().0.seconds;
    server.run(&mut Discard)?;
    let seconds = server.tally().0.seconds - seconds;
    let outputs: u64 = items.iter().map(|item| field(item, "output_tokens")).sum();
    let times = server.runner_mut().gpu_mut().take_times();
    let whole = |decode| {
        let wanted = times.iter().filter(|time| time.decode == decode);
        wanted.filter_map(|time| time.period_ms).map(f64::from).sum::<f64>() / 1e3
    };
    let decodes: Vec<_> = times.iter().copied().filter(|t| t.decode).collect();
    Ok(json!({
        "part": "offline",
        "batch": items.len(),
        "context": Value::Null,
        "tokens_s": outputs as f64 / seconds,
        "seconds": seconds,
        "steps": times.len(),
        "decode_s": whole(true),
        "other_s": whole(false),
        "gpu_idle": idle(&times),
        "gpu_idle_decode": idle(&decodes),
    }))
}

fn prefill(server: &mut Server<impl OnGpu>, prompts: &mut Prompts, context: usize) -> Result<Value> {
    let requests = (0..PREFILL_PROMPTS).map(|_| prompts.request(context, 1, 0.0));
    submit(server, requests.collect())?;
    server.runner_mut().gpu_mut().take_times();
    let seconds = server.tally().0.seconds;
    server.run(&mut Discard)?;
    let seconds = server.tally().0.seconds - seconds;
    let times = server.runner_mut().gpu_mut().take_times();
    Ok(json!({
        "part": "prefill",
        "batch": PREFILL_PROMPTS,
        "context": context,
        "tokens_s": (PREFILL_PROMPTS * context) as f64 / seconds,
        "seconds": seconds,
        "steps": times.len(),
        "gpu_idle": idle(&times),
    }))
}
