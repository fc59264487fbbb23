//! A chat in the terminal. The whole pages of the conversation are a cached prefix, so a turn computes
//! its new tokens and at most one page of earlier ones.
//!
//!     cargo run --release -p kvarena-candle-models -- --model FOLDER

use std::error::Error;
use std::io::{self, BufRead, Write};
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Parser;
use kvarena_candle::KvArena;
use kvarena_candle_models::config::Family;
use kvarena_candle_models::serve::{Limits, serve};
use kvarena_candle_models::text::Text;
use kvarena_candle_models::{device, load};

#[derive(Parser)]
struct Args {
    /// A model's folder in Hugging Face's form. Default: a tiny model with random weights, which
    /// prints nonsense.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../../host/tests/data/qwen3-tiny"))]
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

/// Returns three parts of the family's chat template: the beginning of a chat, the text before a user's message and the
/// text after it.
fn template(family: Family) -> [&'static str; 3] {
    match family {
        Family::Qwen3 => ["", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"],
        Family::Llama => [
            "<|begin_of_text|>",
            "<|start_header_id|>user<|end_header_id|>\n\n",
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ],
        Family::Gemma3 => {
            ["<bos>", "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"]
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let (device, dtype) = device(args.gpu)?;
    let loaded = load(&args.model, dtype, &device)?;
    let text = Text::load(&args.model).map_err(|error| error.to_string())?;
    let mut arena =
        KvArena::new(loaded.arena([args.cache_tokens as usize], args.step_tokens)?, &device)?;
    let limits = Limits { new_tokens: args.new_tokens, step_tokens: args.step_tokens, joins: 1 };
    let [begin, before, after] = template(loaded.family);
    let mut tokens = text.encode(begin).map_err(|error| error.to_string())?;
    prompt()?;
    for line in io::stdin().lock().lines() {
        let turn = format!("{before}{}{after}", line?);
        tokens.extend(text.encode(&turn).map_err(|error| error.to_string())?);
        let (mut answer, mut shown, total) = (Vec::new(), 0, tokens.len());
        let mut has_bar = false;
        let watch = |_, token: Option<u32>, left: u32| {
            let Some(token) = token else {
                has_bar = true;
                return progress(total, total - left as usize);
            };
            if answer.is_empty() && has_bar {
                progress(total, total);
                eprintln!();
            }
            answer.push(token);
            let all = text.decode(&answer).unwrap_or_default();
            // An incomplete character is decoded as U+FFFD. It is printed once a later token completes it.
            if let (false, Some(new)) = (all.ends_with('\u{fffd}'), all.get(shown..)) {
                print!("{new}");
                shown = all.len();
                let _ = io::stdout().flush();
            }
        };
        let prompts = [tokens.clone()];
        let served = serve(&loaded.model, &mut arena, &prompts, &loaded.end, limits, watch)?;
        let (new, seconds) = (served.texts[0].len(), served.time.as_secs_f64());
        println!();
        let rate = new as f64 / seconds;
        println!("[{new} tokens, {rate:.1} tokens/s, {} of {} cached]", served.hit_tokens, total);
        tokens.extend(&served.texts[0]);
        prompt()?;
    }
    println!();
    Ok(())
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
