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

use std::io::Write;

use kvarena::KvDtype;
use serde_json::{Value, json};

use super::report::{host_us, idle};
use super::setup::Loaded;
use crate::args::{Args, Bench, Shape};
use crate::setup::{config_of, engine_config, unusable};
use kvarena_host::clock::Part;
use kvarena_host::error::{Error, Result};
use kvarena_host::gpu::products::{Op, padded_rows};
use kvarena_host::gpu::runner::{OnGpu, StepTime};
use kvarena_host::gpu::sums::Link;
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

/// A server, and the generator of its prompts.
struct Run<'a, R: OnGpu> {
    server: &'a mut Server<R>,
    state: u64,
    /// The length of the prefix that all prompts share.
    common: usize,
}

/// Measures a part and prints one row in each line.
///
/// # Errors
/// No usable GPU, an option that cannot be served, or a failed run.
pub fn run(args: &Args, part: Bench, out: &mut impl Write) -> Result<()> {
    let shape = args.random_model.unwrap_or(Shape::Qwen3_0_6B);
    let concurrency = match part {
        Bench::Decode => args.batch.iter().copied().max().unwrap_or(1),
        Bench::Offline => 256,
        Bench::Prefill => PREFILL_PROMPTS as u32,
        Bench::Load => 1,
    };
    let mut args =
        Args { random_model: Some(shape), concurrency, kv_dtype: KvDtype::Bf16, first_logits: 0, ..args.clone() };
    if part == Bench::Load {
        args = load::args(&args, page_bytes(&args, shape)?);
    }
    let mut loaded = Loaded::new(&args)?;
    match args.tp {
        1 => rows(&args, part, &mut loaded.one(&args)?, out),
        _ => rows(&args, part, &mut loaded.ranks(&args)?, out),
    }
}

/// Returns the bytes of a page on one GPU.
fn page_bytes(args: &Args, shape: Shape) -> Result<u64> {
    let args = Args { pages: Some(1), ..args.clone() };
    let share = Share { rank: 0, ranks: args.tp as usize };
    let config = engine_config(&args, &share.of(&config_of(shape)?)?, 0)?;
    Ok(config.shape().map_err(unusable)?.layout.page_bytes())
}

fn rows(args: &Args, part: Bench, server: &mut Server<impl OnGpu>, out: &mut impl Write) -> Result<()> {
    let common = if part == Bench::Decode { args.common as usize } else { 0 };
    let mut run = Run { server, state: args.seed ^ 0xBE4C, common };
    let context = args.context as usize;
    let mut print = |run: &Run<_>, row| print(args, run.server, row, out);
    match part {
        Bench::Decode => args.batch.iter().try_for_each(|&batch| {
            let row = run.decode(args, batch as usize)?;
            print(&run, row)
        }),
        Bench::Offline => {
            run.warm(0.6)?;
            let row = run.offline()?;
            print(&run, row)
        }
        Bench::Prefill => {
            run.prefill(context)?;
            let row = run.prefill(context)?;
            print(&run, row)
        }
        Bench::Load => {
            let rows = load::rows(&mut run, context)?;
            rows.into_iter().try_for_each(|row| print(&run, row))
        }
    }
}

/// Prints a row as a line, with its parameters.
fn print(args: &Args, server: &Server<impl OnGpu>, mut row: Value, out: &mut impl Write) -> Result<()> {
    row["model"] = args.random_model.map(Shape::name).into();
    if let Some(sums) = server.runner().gpu().forward().link().map(Link::sums) {
        row["tp"] = args.tp.into();
        row["sums"] = sums.name().into();
    }
    if let Some(sparse) = args.sparse {
        row["sparse"] = sparse.top.into();
    }
    let fields = row.as_object().into_iter().flatten().map(|(name, value)| format!("{name} {value}"));
    let line = if args.json { row.to_string() } else { fields.collect::<Vec<_>>().join(", ") };
    writeln!(out, "{line}").map_err(|e| Error::run(format!("cannot write: {e}")))
}

/// Returns the median time between the ends of these steps, in milliseconds.
fn median_ms(times: &[StepTime]) -> Option<f32> {
    let mut periods: Vec<f32> = times.iter().filter_map(|time| time.period_ms).collect();
    periods.sort_by(f32::total_cmp);
    periods.get(periods.len() / 2).copied()
}

impl<R: OnGpu> Run<'_, R> {
    /// Returns a request with a random prompt.
    fn request(&mut self, len: usize, new_tokens: u32, temperature: f32) -> Request {
        let sampling = Sampling { temperature, seed: self.state, ..Sampling::default() };
        let defaults = Defaults { max_new_tokens: Some(new_tokens), samples: 1, sampling, stop: Vec::new() };
        let (vocab, mut fixed) = (self.server.runner().config().vocab.min(10_000) as u64, 0xC0);
        let token = |state: &mut u64| (splitmix(state) % vocab) as u32;
        let tokens = (0..len).map(|i| token(if i < self.common { &mut fixed } else { &mut self.state }));
        defaults.request(tokens.collect())
    }

    fn requests(&mut self, count: usize, len: usize, new_tokens: u32, temperature: f32) -> Vec<Request> {
        (0..count).map(|_| self.request(len, new_tokens, temperature)).collect()
    }

    /// Serves requests. Returns the seconds, and the times of the steps.
    fn serve(&mut self, requests: Vec<Request>) -> Result<(f64, Vec<StepTime>)> {
        for request in requests {
            self.server.submit(request)?;
        }
        self.server.runner_mut().gpu_mut().take_times();
        let before = self.server.tally().0.seconds;
        self.server.run(&mut Discard)?;
        Ok((self.server.tally().0.seconds - before, self.server.runner_mut().gpu_mut().take_times()))
    }

    /// Captures the graphs of steps of up to 256 streams.
    fn warm(&mut self, temperature: f32) -> Result<()> {
        let mut sizes: Vec<usize> = (1..=256).collect();
        sizes.dedup_by_key(|streams| padded_rows(*streams));
        for streams in sizes {
            let requests = self.requests(streams, 2, 3, temperature);
            self.serve(requests)?;
        }
        Ok(())
    }

    fn decode(&mut self, args: &Args, batch: usize) -> Result<Value> {
        let (context, temperature) = (args.context as usize, args.temperature.unwrap_or(0.0));
        let chunks = (batch * context).div_ceil(self.server.policy().chunk as usize) as u32;
        let more = chunks.saturating_sub(FIRST_STEPS / 2);
        // The first run captures graphs and measures the parts; the second measures the steps.
        let requests = self.requests(batch, context, FIRST_STEPS + more, temperature);
        if args.tp == 1 {
            self.server.runner_mut().gpu_mut().measure_parts(batch);
        }
        self.serve(requests)?;
        let parts = self.server.runner_mut().gpu_mut().take_parts();
        let part_ms = |part: usize| parts.map(|parts| parts[part]);
        let host = |server: &_| [Part::Engine, Part::Launch, Part::Wait].map(|part| host_us(server, part));
        let before = host(self.server);
        let requests = self.requests(batch, context, DECODE_STEPS + 1 + more, temperature);
        let (_, times) = self.serve(requests)?;
        let after = host(self.server);
        let [engine, launch, wait] = [0, 1, 2].map(|i| (after[i] - before[i]) / times.len() as f64);
        let decodes: Vec<_> = times.iter().copied().filter(|t| t.decode && t.tokens == batch).collect();
        let products = self.server.runner().gpu().forward().products();
        let ways = [Op::Qkv, Op::Out, Op::GateUp, Op::Down, Op::Logits].map(|op| products.method(op, batch));
        Ok(json!({
            "part": "decode",
            "batch": batch,
            "context": context,
            "common": self.common,
            "ms": median_ms(&decodes),
            // Median of the first steps, before the contexts have grown.
            "ms_at_context": median_ms(&decodes[..decodes.len().min(9)]),
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

    fn offline(&mut self) -> Result<Value> {
        let items: Vec<Value> = serde_json::from_str(OFFLINE).expect("the file is a list");
        let field = |item: &Value, name: &str| item[name].as_u64().expect("a number");
        let sizes = items.iter().map(|item| (field(item, "prompt_tokens"), field(item, "output_tokens")));
        let requests = sizes.clone().map(|(len, new)| self.request(len as usize, new as u32, 0.6)).collect();
        let (seconds, times) = self.serve(requests)?;
        let (decodes, others): (Vec<_>, Vec<_>) = times.iter().copied().partition(|time| time.decode);
        let whole = |times: &[StepTime]| times.iter().filter_map(|time| time.period_ms).map(f64::from).sum::<f64>();
        Ok(json!({
            "part": "offline",
            "batch": items.len(),
            "context": Value::Null,
            "tokens_s": sizes.map(|(_, new)| new).sum::<u64>() as f64 / seconds,
            "seconds": seconds,
            "steps": times.len(),
            "decode_s": whole(&decodes) / 1e3,
            "other_s": whole(&others) / 1e3,
            "gpu_idle": idle(&times),
            "gpu_idle_decode": idle(&decodes),
        }))
    }

    fn prefill(&mut self, context: usize) -> Result<Value> {
        let requests = self.requests(PREFILL_PROMPTS, context, 1, 0.0);
        let (seconds, times) = self.serve(requests)?;
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
}
