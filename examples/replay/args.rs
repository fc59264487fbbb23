//! The command line.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use kvarena::{Capacity, PrefixMode};

use crate::groups::LayerGroups;

/// Replays a request trace through a kvarena engine as a continuous-batching server would, without a model.
#[derive(Parser, Debug, Clone)]
#[command(name = "replay")]
pub struct Args {
    /// Trace in Mooncake's JSON-lines format, - for standard input; without it, multi-turn chats are generated
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Tokens of a hash id of the trace. The ids may cover whole blocks only; the rest of a prompt is then unique
    /// [default: 512, with an id for the rest]
    #[arg(long, value_name = "N", requires = "trace", value_parser = clap::value_parser!(u32).range(1..))]
    pub block: Option<u32>,
    /// Equal prompts of 2,000 tokens that arrive at once, in place of chats
    #[arg(long, value_name = "N", conflicts_with_all = ["trace", "requests"])]
    pub burst: Option<NonZeroUsize>,
    /// Most requests: read from the trace [default: all], or generated [default: 8000]
    #[arg(long, value_name = "N")]
    pub requests: Option<NonZeroUsize>,
    /// Seed of the generated chats
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Pages of the pool
    #[arg(long, value_name = "N", conflicts_with = "bytes")]
    pub pages: Option<u32>,
    /// Size of the pool in bytes of K and V of Qwen3-8B in bf16: 40GiB, 512MiB, ... [default: 64GiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub bytes: Option<u64>,
    /// Tokens of a page
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub page_size: u32,
    /// Pages of host memory that evicted pages move to [default: 0, evicted pages are lost]
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub host_pages: u32,
    /// How many of the oldest pages are saved to host memory ahead of their eviction, after each step
    #[arg(long, value_name = "K", default_value_t = 0, requires = "host_pages")]
    pub ahead: u32,
    /// Groups of layers besides the one that keeps all tokens, each as REACH:TOKENSxTRACKS, such as
    /// window:1024x6,chunk:8192x3; needs --sequential and --pages
    #[arg(long, value_name = "LIST", value_parser = LayerGroups::parse)]
    #[arg(requires_all = ["sequential", "pages"])]
    pub groups: Option<LayerGroups>,
    /// Whether prefixes are cached and shared
    #[arg(long, value_enum, default_value_t = Prefix::Radix)]
    pub prefix: Prefix,
    /// One request at a time: exact figures that do not depend on a scheduler
    #[arg(long, conflicts_with = "concurrency")]
    pub sequential: bool,
    /// Most requests running at a time
    #[arg(long, value_name = "N", default_value_t = 96, value_parser = clap::value_parser!(u32).range(1..))]
    pub concurrency: u32,
    /// Prompts do not wait for a running request that computes their prefix; each request computes it itself
    #[arg(long, conflicts_with = "sequential")]
    pub no_waiting: bool,
    /// Most tokens computed in a step [default: 8192; with --sequential: a whole request]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub step_tokens: Option<u32>,
    /// Number of runs; a step's time is its minimum over the runs, because the rest is noise of the machine
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: u32,
    /// Draws hit rate and page states over the run
    #[arg(long, value_name = "FILE.svg", value_parser = parse_svg)]
    pub plot: Option<PathBuf>,
    /// Prints one JSON object in place of the table
    #[arg(long)]
    pub json: bool,
}

/// [`PrefixMode`] on the command line.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefix {
    Radix,
    None,
}

impl Args {
    /// Returns the maximum number of requests, or `default` if unset.
    pub fn max_requests(&self, default: usize) -> usize {
        self.requests.map_or(default, NonZeroUsize::get)
    }

    pub fn capacity(&self) -> Capacity {
        match (self.pages, self.bytes) {
            (Some(pages), _) => Capacity::Pages(pages),
            (None, bytes) => Capacity::Bytes(bytes.unwrap_or(64 << 30)),
        }
    }

    pub fn prefix_mode(&self) -> PrefixMode {
        match self.prefix {
            Prefix::Radix => PrefixMode::Radix,
            Prefix::None => PrefixMode::None,
        }
    }
}

/// Parses the path of an SVG plot.
fn parse_svg(text: &str) -> Result<PathBuf, String> {
    let file = PathBuf::from(text);
    match file.extension() {
        Some(ending) if ending.eq_ignore_ascii_case("svg") => Ok(file),
        _ => Err("a plot is written as SVG: name the file NAME.svg".to_owned()),
    }
}

/// Parses a number of bytes, with or without a unit.
fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        other => return Err(format!("{other} is not one of KiB, MiB, GiB, TiB")),
    };
    let count: u64 = digits.trim().parse().map_err(|_| format!("{digits:?} is not a number"))?;
    count.checked_mul(unit).ok_or_else(|| format!("{text} does not fit 64 bits"))
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
