//! The byte form of a plan: [`OwnedPlan`], one buffer that other threads and processes can read.

use bytemuck::{Pod, Zeroable};

use super::{BatchPlan, BatchRow, SharedSpan, SharedSpans, SlotMapping, SpanCheck, check_masks};
use crate::error::displayed;
use crate::id::StepId;

/// Magic number and version of the byte form.
const MAGIC: u64 = u64::from_le_bytes(*b"kvplan03");

/// First words of the byte form. The arrays follow in the order in which [`OwnedPlan::copy_from`] pushes them, each
/// padded to a multiple of 8 bytes.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Header {
    magic: u64,
    step: u64,
    rows: u64,
    tokens: u64,
    table_writes: u64,
    /// Low 32 bits: bytes of a slot. High 32 bits: number of tracks except the first.
    slots: u64,
    spans: u64,
    members: u64,
    masks: u64,
}

const HEADER_WORDS: usize = size_of::<Header>() / 8;

impl Header {
    fn slot_bytes(&self) -> u64 {
        self.slots & u64::from(u32::MAX)
    }

    /// Returns the number of slots of all tracks except the first, or `None` on overflow.
    fn track_slots(&self) -> Option<u64> {
        (self.slots >> 32).checked_mul(self.tokens)
    }
}

displayed! {
    /// The reason why bytes are not a plan or another record for ranks.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum PlanBytesError {
        /// The first bytes are not the magic number of this record and version.
        Magic => "the bytes do not begin with this version's magic number";
        /// The length does not match the header.
        Length {
            /// Bytes given.
            actual: usize,
        } => "{actual} bytes do not match the header";
        /// A slot is neither 4 nor 8 bytes.
        SlotBytes {
            /// Bytes of a slot according to the header.
            slot_bytes: u64,
        } => "a slot has {slot_bytes} bytes, neither 4 nor 8";
        /// The sequences' query rows are not consecutive or do not add up to the tokens, or a sequence has fewer tokens
        /// than query rows.
        Rows {
            /// The first wrong sequence; the number of sequences if the sum is wrong.
            row: usize,
        } => "the query rows of sequence {row} or their total are wrong";
        /// A shared span is empty, is not nested correctly, has fewer than two members or covers tokens of this step.
        /// Or the list of members is wrong: it contains a missing row, a row twice, or a row in no span.
        Span {
            /// The first wrong span; the number of spans if the list of members is wrong.
            span: usize,
        } => "shared span {span} or its members are wrong";
        /// The number of masks differs from the number of tokens, or a mask of a draft tree is wrong. Such a mask lacks
        /// its token's own bit, or has bits of missing or later slots. Or the tree has more than 64 new tokens.
        Mask {
            /// The first token with a wrong mask; the number of tokens if the number of masks is wrong.
            token: usize,
        } => "the mask of token {token} or the number of masks is wrong";
        /// The kind of a [`StepEnd`](super::StepEnd) is neither completion nor abort.
        StepEnd {
            /// The unknown kind of end.
            kind: u64,
        } => "an end of steps of kind {kind} neither completes nor aborts";
        /// The kind of a piece of [`Work`](crate::Work) is none of its variants, or its track exceeds 32 bits. `number` is
        /// the track or the id of the move.
        Work { kind: u64, number: u64 } => "there is no work of kind {kind} for {number}";
        /// A [`Compaction`](super::Compaction) has places beyond 32 bits.
        Compaction {
            /// The compaction's index in the list.
            index: usize,
        } => "compaction {index} ends past 2^32 places";
    }
}

impl std::error::Error for PlanBytesError {}

/// A plan in one reusable buffer. It is `Send`, and its bytes can go to other processes, such as tensor-parallel ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnedPlan {
    /// The buffer, in words, so that every array is aligned. Empty without a plan.
    words: Vec<u64>,
}

impl OwnedPlan {
    /// Creates a buffer without a plan.
    pub fn new() -> Self {
        Self::default()
    }

    /// Copies a plan, reusing the buffer.
    pub fn copy_from(&mut self, plan: &BatchPlan<'_>) {
        let slot_bytes = match plan.slot_mapping {
            SlotMapping::I32(_) => 4,
            SlotMapping::I64(_) => 8,
        };
        let more_tracks = plan.track_slots.len().checked_div(plan.token_count()).unwrap_or(0) as u64;
        let header = Header {
            magic: MAGIC,
            step: plan.step.raw(),
            rows: plan.rows.len() as u64,
            tokens: plan.token_count() as u64,
            table_writes: plan.table_writes.len() as u64,
            slots: slot_bytes | more_tracks << 32,
            spans: plan.shared.spans.len() as u64,
            members: plan.shared.members.len() as u64,
            masks: plan.masks.len() as u64,
        };
        self.words.clear();
        self.words.extend_from_slice(bytemuck::cast_slice(&[header]));
        self.push(bytemuck::cast_slice(plan.rows));
        self.push(bytemuck::cast_slice(plan.tokens));
        self.push(bytemuck::cast_slice(plan.positions));
        match plan.slot_mapping {
            SlotMapping::I32(slots) => self.push(bytemuck::cast_slice(slots)),
            SlotMapping::I64(slots) => self.push(bytemuck::cast_slice(slots)),
        }
        self.push(bytemuck::cast_slice(plan.table_writes));
        self.push(bytemuck::cast_slice(plan.shared.spans));
        self.push(bytemuck::cast_slice(plan.shared.members));
        self.push(bytemuck::cast_slice(plan.masks));
        match plan.track_slots {
            SlotMapping::I32(slots) => self.push(bytemuck::cast_slice(slots)),
            SlotMapping::I64(slots) => self.push(bytemuck::cast_slice(slots)),
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        let start = self.words.len();
        self.words.resize(start + bytes.len().div_ceil(8), 0);
        bytemuck::cast_slice_mut(&mut self.words[start..])[..bytes.len()].copy_from_slice(bytes);
    }

    /// Returns the byte form, little-endian. [`guide::ranks`](crate::guide::ranks) specifies the format.
    pub fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    /// Reads the byte form.
    ///
    /// # Errors
    /// [`PlanBytesError`] for bytes that are not the byte form of a plan. The backend checks whether rows, pages and
    /// slots exist in its pool.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PlanBytesError> {
        let length = PlanBytesError::Length { actual: bytes.len() };
        if !bytes.len().is_multiple_of(8) || bytes.len() < HEADER_WORDS * 8 {
            return Err(length);
        }
        let mut words = vec![0_u64; bytes.len() / 8];
        bytemuck::cast_slice_mut(&mut words).copy_from_slice(bytes);
        let header = *header(&words);
        if header.magic != MAGIC {
            return Err(PlanBytesError::Magic);
        }
        let slot_bytes = header.slot_bytes();
        if slot_bytes != 4 && slot_bytes != 8 {
            return Err(PlanBytesError::SlotBytes { slot_bytes });
        }
        let wanted = words_of(&header).ok_or(length)?;
        if wanted != words.len() as u64 {
            return Err(length);
        }
        let plan = Self { words };
        check_rows(&plan.plan())?;
        let (shared, rows) = (&plan.plan().shared, plan.plan().rows);
        let spans = SpanCheck::default().check(shared, rows);
        spans.map_err(|span| PlanBytesError::Span { span })?;
        check_masks(&plan.plan()).map_err(|token| PlanBytesError::Mask { token })?;
        Ok(plan)
    }

    /// Returns the plan.
    ///
    /// # Panics
    /// If there is no plan yet.
    pub fn plan(&self) -> BatchPlan<'_> {
        let header = header(&self.words);
        let (rows, tokens) = (header.rows as usize, header.tokens as usize);
        let mut rest: &[u8] = &self.as_bytes()[HEADER_WORDS * 8..];
        let mut take = |len: usize| {
            let (array, after) = rest.split_at(len.next_multiple_of(8));
            rest = after;
            &array[..len]
        };
        BatchPlan {
            step: StepId::new(header.step),
            rows: bytemuck::cast_slice(take(rows * size_of::<BatchRow>())),
            tokens: bytemuck::cast_slice(take(tokens * 4)),
            positions: bytemuck::cast_slice(take(tokens * 4)),
            slot_mapping: if header.slot_bytes() == 4 {
                SlotMapping::I32(bytemuck::cast_slice(take(tokens * 4)))
            } else {
                SlotMapping::I64(bytemuck::cast_slice(take(tokens * 8)))
            },
            table_writes: bytemuck::cast_slice(take(header.table_writes as usize * 8)),
            shared: SharedSpans {
                spans: bytemuck::cast_slice(take(header.spans as usize * size_of::<SharedSpan>())),
                members: bytemuck::cast_slice(take(header.members as usize * 4)),
            },
            masks: bytemuck::cast_slice(take(header.masks as usize * 8)),
            track_slots: match (header.slot_bytes(), (header.slots >> 32) as usize * tokens) {
                (4, slots) => SlotMapping::I32(bytemuck::cast_slice(take(slots * 4))),
                (_, slots) => SlotMapping::I64(bytemuck::cast_slice(take(slots * 8))),
            },
        }
    }
}

impl From<&BatchPlan<'_>> for OwnedPlan {
    fn from(plan: &BatchPlan<'_>) -> Self {
        let mut owned = Self::new();
        owned.copy_from(plan);
        owned
    }
}

fn header(words: &[u64]) -> &Header {
    assert!(words.len() >= HEADER_WORDS, "the OwnedPlan contains no plan");
    &bytemuck::cast_slice::<u64, Header>(&words[..HEADER_WORDS])[0]
}

/// Returns the words of the whole byte form, or `None` on overflow.
fn words_of(header: &Header) -> Option<u64> {
    let arrays = [
        (header.rows, size_of::<BatchRow>() as u64),
        (header.tokens, 4),
        (header.tokens, 4),
        (header.tokens, header.slot_bytes()),
        (header.table_writes, 8),
        (header.spans, size_of::<SharedSpan>() as u64),
        (header.members, 4),
        (header.masks, 8),
        (header.track_slots()?, header.slot_bytes()),
    ];
    arrays
        .iter()
        .try_fold(HEADER_WORDS as u64, |sum, &(count, size)| sum.checked_add(count.checked_mul(size)?.div_ceil(8)))
}

fn check_rows(plan: &BatchPlan<'_>) -> Result<(), PlanBytesError> {
    let mut next = 0_u64;
    for (i, row) in plan.rows.iter().enumerate() {
        let padding = row.kv_len == 0;
        if u64::from(row.qo_start) != next || (row.kv_len < row.extend_len && !padding) {
            return Err(PlanBytesError::Rows { row: i });
        }
        next += u64::from(row.extend_len);
    }
    if next == plan.token_count() as u64 { Ok(()) } else { Err(PlanBytesError::Rows { row: plan.rows.len() }) }
}
