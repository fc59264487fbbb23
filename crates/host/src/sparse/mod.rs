//! Sparse reads: generating streams attend only to the positions that labels find.
//!
//! ```text
//! channels   the channels of K that are labels: measured with full reads, stored in a file
//! reader     attention of a step over selected positions
//! recall     the share of attention's weight on selected positions
//! change     counts of the tokens that sparse reads change
//! ```

pub mod change;
pub mod channels;
pub mod reader;
pub mod recall;

use std::str::FromStr;

use kvarena::layout::TableShape;
use kvarena::{EngineConfig, PoolConfig};

use crate::error::{Error, Result};

/// Label channels of a head if neither the command line nor a file gives a number.
const CHANNELS: u32 = 16;

/// `K[,CHANNELS]`: the number of positions that each kv head reads, and the number of its label channels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sparse {
    /// Positions for each kv head, at least 1.
    pub top: u32,
    /// Channels of a head, at least 1, if given.
    pub channels: Option<u32>,
}

impl FromStr for Sparse {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let number = |text: &str| match text.parse() {
            Ok(0) | Err(_) => Err(format!("{text:?} is not a count of at least 1")),
            Ok(number) => Ok(number),
        };
        let (top, channels) = match text.split_once(',') {
            Some((top, channels)) => (top, Some(number(channels)?)),
            None => (text, None),
        };
        Ok(Self { top: number(top)?, channels })
    }
}

impl Sparse {
    /// Returns the channels of a head: those of the option, else those of a file (`given`), else the default.
    ///
    /// # Errors
    /// The file has another number of channels than the option.
    pub fn channels(&self, given: Option<u32>) -> Result<u32> {
        match (self.channels, given) {
            (Some(stored), Some(given)) if stored != given => {
                let message = format!("--labels has {given} channels of a head, not {stored}");
                Err(Error::request(message))
            }
            (stored, given) => Ok(given.or(stored).unwrap_or(CHANNELS)),
        }
    }

    /// Returns the engine's config with a pool that stores `channels` channels, and the shape of its page tables.
    ///
    /// # Errors
    /// The pool cannot store the channels, or `top` exceeds the maximum length of a sequence.
    pub fn engine(&self, config: &EngineConfig, channels: u32) -> Result<(EngineConfig, TableShape)> {
        let pool = PoolConfig { label_channels: channels, ..config.pool };
        let config = EngineConfig { pool, ..*config };
        let shape =
            config.shape().map_err(|error| Error::request(format!("--sparse with {channels} channels: {error}")))?;
        let (top, longest) = (self.top, shape.max_sequence_len);
        if top > longest {
            let message = format!("--sparse {top}: a sequence has at most {longest} tokens");
            return Err(Error::request(message));
        }
        Ok((config, shape.table))
    }
}
