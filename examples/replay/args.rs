//! The command line.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Parser;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kvarena::Capacity;
use kvarena::config::PrefixMode;

use crate::groups::LayerGroups;

/// Replays a request trace through a kvarena engine as a continuous-batching server would, without a model.
#[derive(Parser, Debug, Clone)]
#[command(name = "replay")]
pub struct Args {
    /// Trace file in Mooncake's JSON-lines format; - reads standard input. Without a trace, the program generates
    /// multi-turn chats
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Tokens that one hash id of the trace covers. With this option, a line may omit the id of its last, partial
    /// block; the tokens of that block are then unique [default: 512, and no line may omit the id]
    #[arg(long, value_name = "N", requires = "trace", value_parser = clap::value_parser!(u32).range(1..))]
    pub block: Option<u32>,
    /// Generates N equal prompts of 2,000 tokens that arrive at once, instead of chats
    #[arg(long, value_name = "N", conflicts_with_all = ["trace", "requests"])]
    pub burst: Option<NonZeroUsize>,
    /// Number of requests to generate [default: 8000], or the most to read from the trace [default: all]
    #[arg(long, value_name = "N")]
    pub requests: Option<NonZeroUsize>,
    /// Seed of the generated requests
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Pages of the pool
    #[arg(long, value_name = "N", conflicts_with = "bytes")]
    pub pages: Option<u32>,
    /// Size of the pool, such as 40GiB or 512MiB, for K and V of Qwen3-8B in bf16 [default: 64GiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub bytes: Option<u64>,
    /// Tokens of a page
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub page_size: u32,
    /// Pages of swap memory that evicted pages move to [default: 0, evicted pages are lost]
    #[arg(long, alias = "host-pages", value_name = "N", default_value_t = 0)]
    pub swap_pages: u32,
    /// After each step, saves up to K of the oldest pages to swap memory ahead of their eviction
    #[arg(long, value_name = "K", default_value_t = 0, requires = "swap_pages")]
    pub ahead: u32,
    /// Adds a store of unlimited size behind swap memory. It stores keys without bytes; core time includes its work
    #[arg(long, requires = "swap_pages")]
    pub store: bool,
    /// Consecutive pages that the store keeps as one record: a power of two up to 64, and 1 with --groups
    #[arg(long, value_name = "U", default_value_t = 1, requires = "store")]
    pub record_pages: u32,
    /// After N requests, replaces the engine by a new one; the store stays
    #[arg(long, value_name = "N", requires_all = ["store", "sequential"])]
    pub restart: Option<NonZeroUsize>,
    /// Groups of layers besides the one that keeps all tokens, each as REACH:TOKENSxTRACKS or state:PAGES, such as
    /// window:1024x6,chunk:8192x3,state:36; needs --sequential and --pages. With a state, the pool has one more page,
    /// which no sequence gets
    #[arg(long, value_name = "LIST", value_parser = LayerGroups::parse)]
    #[arg(requires_all = ["sequential", "pages"])]
    pub groups: Option<LayerGroups>,
    /// Tokens before a prompt's end at which its state is cached
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub state_margin: u32,
    /// Minimum number of tokens from a prompt's hit to the place where its state is cached
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub state_gap: u32,
    /// A cached state that a prompt has read keeps its age; otherwise it is evicted first if the prompt caches a later
    /// one
    #[arg(long)]
    pub keep_used: bool,
    /// Whether prefixes are cached and shared
    #[arg(long, default_value = "radix", value_parser = PossibleValuesParser::new(["radix", "none"]).map(prefix_mode))]
    pub prefix: PrefixMode,
    /// Serves one request at a time, so that the figures are exact and do not depend on a scheduler
    #[arg(long, conflicts_with = "concurrency")]
    pub sequential: bool,
    /// Maximum number of running requests
    #[arg(long, value_name = "N", default_value_t = 96, value_parser = clap::value_parser!(u32).range(1..))]
    pub concurrency: u32,
    /// Admits a prompt even if a running request is computing its prefix; both then compute the prefix
    #[arg(long, conflicts_with = "sequential")]
    pub no_waiting: bool,
    /// Maximum number of tokens in a step [default: 8192; with --sequential: a whole request]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub step_tokens: Option<u32>,
    /// Number of runs. The time of a step is its minimum over all runs, because longer times are noise of the machine
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: u32,
    /// Writes a plot of the hit rate and the page states over the run
    #[arg(long, value_name = "FILE.svg", value_parser = parse_svg)]
    pub plot: Option<PathBuf>,
    /// Prints one JSON object in place of the table
    #[arg(long)]
    pub json: bool,
}

impl Args {
    /// Returns the maximum number of requests, or `default` if unset.
    pub fn max_requests(&self, default: usize) -> usize {
        self.requests.map_or(default, NonZeroUsize::get)
    }

    pub fn capacity(&self) -> Capacity {
        match (self.pages, self.bytes) {
            (Some(pages), _) => {
                let has_state = self.groups.as_ref().is_some_and(|groups| groups.groups.state_group().is_some());
                Capacity::Pages(pages + u32::from(has_state))
            }
            (None, bytes) => Capacity::Bytes(bytes.unwrap_or(64 << 30)),
        }
    }
}

fn prefix_mode(name: String) -> PrefixMode {
    if name == "none" { PrefixMode::None } else { PrefixMode::Radix }
}

/// Parses the path of an SVG plot.
fn parse_svg(text: &str) -> Result<PathBuf, String> {
    let file = PathBuf::from(text);
    match file.extension() {
        Some(extension) if extension.eq_ignore_ascii_case("svg") => Ok(file),
        _ => Err("the plot is an SVG file: its name must end with .svg".to_owned()),
    }
}

/// Parses a number of bytes, with or without a unit.
fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        other => return Err(format!("{other:?} is not a unit: use KiB, MiB, GiB or TiB")),
    };
    let count: u64 = digits.trim().parse().map_err(|_| format!("{digits:?} is not a number"))?;
    count.checked_mul(factor).ok_or_else(|| format!("{text} does not fit in 64 bits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn plots_are_svg() {
        assert_eq!(parse_svg("a/day.SVG"), Ok(PathBuf::from("a/day.SVG")));
        for other in ["day.png", "day", "svg", ".svg"] {
            assert!(parse_svg(other).is_err(), "{other}");
        }
    }

    #[test]
    fn bytes_have_units() {
        assert_eq!(parse_bytes("512"), Ok(512));
        assert_eq!(parse_bytes("40GiB"), Ok(40 << 30));
        assert_eq!(parse_bytes("3m"), Ok(3 << 20));
        assert!(parse_bytes("3 parsecs").is_err());
        assert!(parse_bytes("GiB").is_err());
        assert!(parse_bytes("99999999TiB").is_err());
    }
}
