//! The states of layers such as Mamba, Gated DeltaNet and short convolutions, in pages of the pool.
//!
//! A layer's state has up to four parts of fixed size, one after the other. A page contains the states of `lanes`
//! layers of one sequence, each in a *lane* of `lane_bytes` bytes, so the states of all layers take `pages` pages. A
//! kernel finds the state of a layer at `page * page_bytes + lane * lane_bytes`: the number of the page is the kernel's
//! slot.

use super::groups::{Groups, STATE_PARTS_MAX};
use crate::error::ConfigError;

/// A lane of a state begins at a multiple of this number of bytes in its page.
const LANE_ALIGN: u64 = 256;

/// The place of a sequence's state in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct StateLayout {
    /// Number of pages of a state of all layers.
    pub pages: u32,
    /// Number of layers whose states are in one page.
    pub lanes: u32,
    /// Number of bytes from one lane to the next: those of all parts, rounded up to a multiple of 256.
    pub lane_bytes: u64,
    /// First byte of each part in its lane. Unused parts have the end of the last one.
    pub offsets: [u64; STATE_PARTS_MAX],
}

impl StateLayout {
    /// Returns the layout of a state in pages of `page_bytes` bytes, which have room for at least one lane.
    pub(super) fn new(groups: &Groups, group: u32, page_bytes: u64) -> Self {
        let lane_bytes = lane_bytes(groups).expect("checked");
        let layers = groups.layers_of(group);
        let lanes = (page_bytes / lane_bytes).min(layers.into()) as u32;
        let mut end = 0;
        let offsets = groups.parts.map(|part| {
            let start = end;
            end += part.bytes();
            start
        });
        Self { pages: layers.div_ceil(lanes), lanes, lane_bytes, offsets }
    }
}

/// Returns the number of bytes of a lane of this rank's parts; `None` if it does not fit 64 bits.
fn lane_bytes(groups: &Groups) -> Option<u64> {
    let mut parts = groups.parts.iter();
    let bytes = parts.try_fold(0_u64, |sum, part| sum.checked_add(part.bytes()))?;
    bytes.checked_next_multiple_of(LANE_ALIGN)
}

/// Returns the number of tokens of the smallest page that holds a lane of a state. `page_bytes` returns the bytes of a
/// page of some tokens, which rise with the tokens.
fn least_page_size(lane_bytes: u64, page_bytes: impl Fn(u32) -> Option<u64>) -> u32 {
    let holds = |tokens: u32| page_bytes(tokens).is_none_or(|bytes| bytes >= lane_bytes);
    let (mut below, mut least) = (0, 1);
    while !holds(least) && least < 1 << 31 {
        (below, least) = (least, least * 2);
    }
    while least - below > 1 {
        let middle = below + (least - below) / 2;
        *(if holds(middle) { &mut least } else { &mut below }) = middle;
    }
    least
}

/// Checks that pages of `page_size` tokens hold a state of one layer, and that the state has parts.
pub(super) fn check(
    groups: &Groups,
    page_size: u32,
    page_bytes: impl Fn(u32) -> Option<u64>,
) -> Result<(), ConfigError> {
    let Some(group) = groups.state_group() else { return Ok(()) };
    if groups.state_parts().is_empty() {
        return Err(ConfigError::StateGroup { group });
    }
    let bytes = lane_bytes(groups).ok_or(ConfigError::Overflow { name: "bytes of a state" })?;
    let min = least_page_size(bytes, page_bytes);
    if page_size < min { Err(ConfigError::StatePage { page_size, min }) } else { Ok(()) }
}
