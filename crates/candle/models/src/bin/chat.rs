//! A chat in the terminal. The whole pages of the conversation are a cached prefix, so a turn computes
//! its new tokens and at most one page of earlier ones.
//!
//!     cargo run --release -p kvarena-candle-models -- --model FOLDER

use std::io::{self, BufRead, Write};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use kvarena_candle::KvArena;
use kvarena_candle_models::chat::Chat;
use kvarena_candle_models::serve::{Limits, serve};
use kvarena_candle_models::{Outcome, device, load, read_config, run};

#[derive(Parser)]
struct Args {
    /// A model's folder in Hugging Face's form, with its tokenizer and chat template.
    #[arg(long)]
    model: PathBuf,
    /// Maximum number of tokens in an answer.
    #[arg(long, default_value = "64")]
    new_tokens: NonZeroUsize,
    /// Maximum number of tokens in a step; a longer prompt takes several steps.
    #[arg(long, default_value_t = 512)]
    step_tokens: u32,
    /// Number of tokens that fit in the cache.
    #[arg(long, default_value_t = 16_384)]
    cache_tokens: u32,
    /// Run on the first GPU, in bf16; needs feature `cuda`.
    #[arg(long)]
    gpu: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    run("chat", || converse(&args))
}

fn converse(args: &Args) -> Outcome {
    // The small files are checked before the weights are read.
    read_config(&args.model)?;
    let mut chat = Chat::read(&args.model)?;
    let (device, dtype) = device(args.gpu)?;
    let loaded = load(&args.model, dtype, &device)?;
    let mut arena = KvArena::new(loaded.arena([args.cache_tokens as usize], args.step_tokens)?, &device)?;
    let limits = Limits { new_tokens: args.new_tokens, step_tokens: args.step_tokens, joins: 1 };
    prompt()?;
    for line in io::stdin().lock().lines() {
        let tokens = chat.ask(&line?)?;
        let (mut answer, mut shown, total) = (Vec::new(), 0, tokens.len());
        let (mut is_first, mut has_bar) = (true, false);
        let watch = |_, token: Option<u32>, left: u32| {
            let Some(token) = token else {
                has_bar = true;
                return progress(total, total - left as usize);
            };
            if is_first && has_bar {
                progress(total, total);
                eprintln!();
            }
            is_first = false;
            if loaded.end.contains(&token) {
                return;
            }
            answer.push(token);
            let all = chat.decode(&answer);
            // An incomplete character is decoded as U+FFFD. It is printed once a later token completes it.
            if !all.ends_with('\u{fffd}') {
                print(&all, &mut shown);
            }
        };
        let served = serve(&loaded.model, &mut arena, &[tokens], &loaded.end, limits, watch)?;
        print(&chat.decode(&answer), &mut shown);
        println!();
        let (new, seconds) = (served.texts[0].len(), served.time.as_secs_f64());
        let rate = new as f64 / seconds;
        println!("[{new} tokens, {rate:.1} tokens/s, {} of {total} cached]", served.hit_tokens);
        chat.answer(&answer);
        prompt()?;
    }
    println!();
    Ok(())
}

/// Prints the part of an answer that follows its first `shown` bytes.
fn print(answer: &str, shown: &mut usize) {
    if let Some(new) = answer.get(*shown..) {
        print!("{new}");
        *shown = answer.len();
        let _ = io::stdout().flush();
    }
}

fn prompt() -> io::Result<()> {
    print!("> ");
    io::stdout().flush()
}

/// Prints the progress of a long prompt.
fn progress(total: usize, done: usize) {
    let bar = "#".repeat(40 * done / total);
    eprint!("\r[{bar:<40}] {done} of {total} tokens");
}
