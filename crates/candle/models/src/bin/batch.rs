//! Generates a text for each line of a file; all prompts begin with the same system prompt. The
//! program generates the texts twice: in an arena, where the prompts share the prefix, and with
//! candle's own caches, one prompt after the other.
//!
//!     cargo run --release -p kvarena-candle-models --bin batch -- --model FOLDER --system TEXT --prompts FILE

use std::fs;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use kvarena_candle::KvArena;
use kvarena_candle_models::contiguous::Contiguous;
use kvarena_candle_models::serve::{Limits, serve};
use kvarena_candle_models::{Outcome, device, load, run};
use kvarena_host::text::Text;

#[derive(Parser)]
struct Args {
    /// A model's folder in Hugging Face's form. Without `tokenizer.json`, tokens are bytes.
    #[arg(long)]
    model: PathBuf,
    /// The text before each prompt.
    #[arg(long, default_value = "You answer in one short sentence, and you say so where you do not know.")]
    system: String,
    /// A file with one prompt a line. Default: eight questions.
    #[arg(long)]
    prompts: Option<PathBuf>,
    /// Maximum number of new tokens of a text.
    #[arg(long, default_value = "32")]
    new_tokens: NonZeroUsize,
    /// Run on the first GPU, in bf16; needs feature `cuda`.
    #[arg(long)]
    gpu: bool,
}

/// Maximum number of tokens of a step.
const STEP_TOKENS: u32 = 2048;

fn main() -> ExitCode {
    let args = Args::parse();
    run("batch", || batch(&args))
}

fn batch(args: &Args) -> Outcome {
    let text = Text::read(&args.model, usize::MAX, None)?;
    let encode = |prompt: String| {
        if text.has_tokenizer() { text.encode(&prompt) } else { Ok(prompt.bytes().map(u32::from).collect()) }
    };
    let questions = match &args.prompts {
        Some(path) => fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?,
        None => (1..=8).map(|n| format!("What is {n} times {n}?\n")).collect(),
    };
    let prompts = questions.lines().map(|line| encode(format!("{}\n{line}\n", args.system)));
    let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
    let (device, dtype) = device(args.gpu)?;
    let loaded = load(&args.model, dtype, &device)?;
    let lens = prompts.iter().map(|prompt| prompt.len() + args.new_tokens.get());
    let mut arena = KvArena::new(loaded.arena(lens, STEP_TOKENS)?, &device)?;
    let limits = Limits { new_tokens: args.new_tokens, step_tokens: STEP_TOKENS, joins: 1 };
    let served = serve(&loaded.model, &mut arena, &prompts, &loaded.end, limits, |_, _, _| {})?;

    let mut own = Contiguous::load(&args.model, dtype, &device)?;
    let start = Instant::now();
    let texts = prompts.iter();
    let texts = texts.map(|prompt| own.generate(&device, prompt, args.new_tokens.get(), &loaded.end));
    let texts = texts.collect::<candle::Result<Vec<_>>>();
    let time = start.elapsed();

    println!("{} prompts, {} tokens", prompts.len(), served.prompt_tokens);
    println!("| | new tokens | steps | seconds | tokens/s | prompt tokens cached |");
    println!("|---|---|---|---|---|---|");
    row("kvarena", &served.texts, served.steps, served.time, served.hit_tokens);
    match texts {
        Ok(texts) => {
            row("candle, one by one", &texts, texts.iter().map(Vec::len).sum(), time, 0);
            let same = served.texts.iter().zip(&texts).filter(|(ours, own)| ours == own).count();
            println!("{same} of {} texts are equal", texts.len());
        }
        // candle 0.11.1's gemma3 cannot append to its own cache on a CPU.
        Err(error) => {
            println!("candle's own model fails: {}", error.to_string().lines().next().unwrap_or(""));
        }
    }
    Ok(())
}

fn row(name: &str, texts: &[Vec<u32>], steps: usize, time: Duration, hits: usize) {
    let (new, seconds) = (texts.iter().map(Vec::len).sum::<usize>(), time.as_secs_f64());
    println!("| {name} | {new} | {steps} | {seconds:.3} | {:.1} | {hits} |", new as f64 / seconds);
}
