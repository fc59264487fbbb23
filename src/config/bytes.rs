//! The byte form of an [`EngineShape`], from which other ranks open their backends.

use std::error::Error;

use bytemuck::{Pod, Zeroable};

use super::{EngineConfig, EngineShape, PrefixMode};
use crate::error::{ConfigError, displayed};
use crate::hash::Hashing;
use crate::layout::{
    Capacity, GROUPS_MAX, GroupShape, Groups, KvDtype, KvShape, Layout, PlaneName, PoolConfig, STATE_PARTS_MAX,
    Scaling, StatePart,
};

/// Magic number and version of the byte form.
const MAGIC: u64 = u64::from_le_bytes(*b"kvshap04");

// The byte form stores the index of a value in these lists.
const DTYPES: [KvDtype; 4] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3];
const SCALINGS: [Scaling; 2] = [Scaling::Static, Scaling::ByToken];
const LAYOUTS: [Layout; 2] = [Layout::LayerFirst, Layout::PageFirst];
const PREFIXES: [PrefixMode; 2] = [PrefixMode::Radix, PrefixMode::None];
const BOOLS: [bool; 2] = [false, true];

displayed! {
    /// The reason why bytes are not the byte form of an [`EngineShape`].
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum ShapeBytesError {
        /// The first bytes are not the magic number of this version.
        Magic => "the bytes do not begin with this version's magic number";
        /// The length is not [`EngineShape::BYTES`].
        Length {
            /// Bytes given.
            actual: usize,
        } => "{actual} bytes are not the {} of an engine's shape", EngineShape::BYTES;
        /// The field has an invalid number.
        Field { name: &'static str, value: u64 } => "{name} cannot be {value}";
        /// The numbers form an invalid config.
        Config(error: ConfigError) => "no engine has this shape";
        /// Each number is valid, but no config has this combination.
        Mixed => "no engine has this combination of numbers";
    }
}

impl Error for ShapeBytesError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            _ => None,
        }
    }
}

/// The words of the byte form.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Words {
    magic: u64,
    layers: u64,
    /// 0: heads. 1: latent rows.
    shape: u64,
    /// Number of heads and elements of a head, or `rank` and `rope` of latent rows.
    sizes: [u64; 2],
    dtype: u64,
    scaling: u64,
    label_channels: u64,
    page_size: u64,
    page_count: u64,
    layout: u64,
    rows: u64,
    leaves_per_row: u64,
    leaf_pages: u64,
    leaf_count: u64,
    max_sequence_len: u64,
    max_steps: u64,
    prefix: u64,
    /// The pages, and 2^32 if cells have events.
    events: u64,
    prefault: u64,
    /// Number of the hash recipe (0 for none) and its seed.
    hashing: [u64; 5],
    promise_ahead: u64,
    groups: [u64; Groups::WORDS],
    swap_pages: u64,
    stage_pages: u64,
    max_step_tokens: u64,
    /// For each group other than 0: zeros without an own shape; else its kind and dtype, and its sizes.
    own_shapes: [[u64; 2]; GROUPS_MAX - 1],
    reserved_pages: u64,
    wide_slots: u64,
    /// Heads and bytes of a head of each part of a state.
    state_parts: [u64; STATE_PARTS_MAX],
    state_margin: u64,
    state_gap: u64,
    keep_used_states: u64,
    extra_bytes: u64,
    record_pages: u64,
}

impl EngineShape {
    /// Bytes of the byte form.
    pub const BYTES: usize = size_of::<Words>();

    /// Returns the byte form: 58 little-endian words of 64 bits.
    ///
    /// | words | |
    /// |---|---|
    /// | 0 | the ASCII letters `kvshap04`; the digits are the version |
    /// | 1 | layers |
    /// | 2 to 4 | 0, heads, their elements; or 1, `rank`, `rope` of latent rows |
    /// | 5, 6 | dtype (0 f32, 1 f16, 2 bf16, 3 fp8); scaling (0 static or none, 1 by token) |
    /// | 7 to 9 | label channels, page size, pages |
    /// | 10 | layout (0 layer first, 1 page first) |
    /// | 11 to 14 | [`TableShape`](crate::layout::TableShape): `rows`, `leaves_per_row`, `leaf_pages`, `leaf_count` |
    /// | 15, 16 | `max_sequence_len`, `max_steps` |
    /// | 17 to 19 | prefix mode (0 radix, 1 none), `event_pages` + 2^32 * `event_cells`, `prefault` |
    /// | 20 | hashing (0 none, 1 Dynamo, 2 nano-vllm, 3 MinivLLM, 4 and 5 vLLM without and with a seed, 6 SGLang) |
    /// | 21 to 24 | the seed: a byte of its length, then its bytes and zeros |
    /// | 25 | `promise_ahead` |
    /// | 26 | number of groups + 2^32 * number of layers in groups; the latter is 0 if there is one group |
    /// | 27 to 29 | for each group but group 0: its size + 2^32 * (1 window, 2 chunk, 3 state), else 0 |
    /// | 30 to 37 | bit 0 of the group number of each of 256 layers, then bit 1 |
    /// | 38, 39 | `swap_pages`, `stage_pages` |
    /// | 40 | `max_step_tokens` |
    /// | 41 to 46 | for each group but group 0: its shape in two words |
    /// | 47, 48 | `reserved_pages`, `wide_slots` |
    /// | 49 to 52 | for each part of a state: its heads + 2^32 * bytes of a head; 0 for no part |
    /// | 53 to 57 | `state_margin`, `state_gap`, `keep_used_states`, `extra_bytes`, `record_pages` |
    ///
    /// A group with the pool's shape has two words of 0. Otherwise the first word is
    /// `1 + 2 * dtype + 8 * (0 for heads, 1 for latent rows)`. The second word contains the two sizes, in 32 bits each
    /// and in the order of words 3 and 4. The numbers of heads are those of one rank, so all ranks have equal bytes.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let Self { layout, table, .. } = self;
        let (shape, sizes) = sizes_of(layout.shape());
        let scaling = layout.views().find_map(|layout| layout.scaling());
        let labels = layout.planes().iter().find(|plane| plane.name == PlaneName::Labels);
        let words = Words {
            magic: MAGIC,
            layers: layout.layers().into(),
            shape,
            sizes: sizes.map(u64::from),
            dtype: number(&DTYPES, layout.dtype()),
            scaling: number(&SCALINGS, scaling.unwrap_or_default()),
            label_channels: labels.map_or(0, |labels| labels.elements.into()),
            page_size: layout.page_size().into(),
            page_count: layout.page_count().into(),
            layout: number(&LAYOUTS, layout.layout()),
            rows: table.rows.into(),
            leaves_per_row: table.leaves_per_row.into(),
            leaf_pages: table.leaf_pages.into(),
            leaf_count: table.leaf_count.into(),
            max_sequence_len: self.max_sequence_len.into(),
            max_steps: self.max_steps.into(),
            prefix: number(&PREFIXES, self.prefix),
            events: u64::from(self.event_pages) | number(&BOOLS, self.event_cells) << 32,
            prefault: number(&BOOLS, self.prefault),
            hashing: self.hashing.map_or([0; 5], Hashing::to_words),
            promise_ahead: self.promise_ahead.into(),
            groups: layout.groups().to_words(),
            swap_pages: layout.swap_pages().into(),
            stage_pages: layout.stage_pages().into(),
            max_step_tokens: self.max_step_tokens.into(),
            own_shapes: [1, 2, 3].map(|group| own_words(layout.groups().shape(group))),
            reserved_pages: self.reserved_pages.into(),
            wide_slots: number(&BOOLS, self.wide_slots),
            state_parts: part_words(layout.groups().state_parts()),
            state_margin: self.state_margin.into(),
            state_gap: self.state_gap.into(),
            keep_used_states: number(&BOOLS, self.keep_used_states),
            extra_bytes: layout.extra_bytes().into(),
            record_pages: self.record_pages.into(),
        };
        let mut bytes = [0; Self::BYTES];
        bytes.copy_from_slice(bytemuck::bytes_of(&words));
        bytes
    }

    /// Reads the byte form.
    ///
    /// # Errors
    /// [`ShapeBytesError::Length`] or [`ShapeBytesError::Magic`] for bytes that are not this form.
    /// [`ShapeBytesError::Field`] for a number that is invalid in its field, such as a hash recipe without its feature.
    /// [`ShapeBytesError::Config`] for an invalid config. [`ShapeBytesError::Mixed`] for valid numbers in a combination
    /// that no config has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ShapeBytesError> {
        if bytes.len() != Self::BYTES {
            return Err(ShapeBytesError::Length { actual: bytes.len() });
        }
        let words: Words = bytemuck::pod_read_unaligned(bytes);
        if words.magic != MAGIC {
            return Err(ShapeBytesError::Magic);
        }
        let sizes = [narrow("shape sizes", words.sizes[0])?, narrow("shape sizes", words.sizes[1])?];
        let shape = shape_of(words.shape, sizes)?;
        let no_groups = ShapeBytesError::Field { name: "groups", value: words.groups[0] };
        let mut groups = Groups::from_words(words.groups).ok_or(no_groups)?;
        for (group, own) in (1..).zip(words.own_shapes) {
            if let Some(GroupShape { shape, dtype }) = own_shape(own)? {
                groups = groups.with_shape(group, shape, dtype).map_err(ShapeBytesError::Config)?;
            }
        }
        if let Some(group) = groups.state_group() {
            let parts = words.state_parts.map(|word| StatePart { heads: word as u32, head_bytes: (word >> 32) as u32 });
            let count = parts.iter().take_while(|part| part.heads > 0).count();
            groups = groups.with_state(group, &parts[..count]).map_err(ShapeBytesError::Config)?;
        }
        let pool = PoolConfig {
            layers: narrow("layers", words.layers)?,
            groups,
            shape,
            dtype: one_of("dtype", &DTYPES, words.dtype)?,
            scaling: one_of("scaling", &SCALINGS, words.scaling)?,
            label_channels: narrow("label_channels", words.label_channels)?,
            page_size: narrow("page_size", words.page_size)?,
            capacity: Capacity::Pages(narrow("page_count", words.page_count)?),
            swap_pages: narrow("swap_pages", words.swap_pages)?,
            stage_pages: narrow("stage_pages", words.stage_pages)?,
            extra_bytes: narrow("extra_bytes", words.extra_bytes)?,
            layout: one_of("layout", &LAYOUTS, words.layout)?,
            tp_size: 1,
            tp_rank: 0,
        };
        let hashing = match words.hashing {
            [0, 0, 0, 0, 0] => None,
            [value, ..] => {
                let hashing = Hashing::from_words(words.hashing);
                Some(hashing.ok_or(ShapeBytesError::Field { name: "hashing", value })?)
            }
        };
        // Inverts `TableShape::of`. A table of fewer tokens than a leaf has one leaf for each row.
        let max_tokens = words
            .leaf_count
            .checked_sub(words.rows)
            .and_then(|leaves| leaves.checked_mul(words.leaf_pages)?.checked_mul(words.page_size));
        let config = EngineConfig {
            pool,
            prefix: one_of("prefix", &PREFIXES, words.prefix)?,
            hashing,
            event_pages: words.events as u32,
            event_cells: one_of("event_cells", &BOOLS, words.events >> 32)?,
            max_sequences: narrow("rows", words.rows)?,
            max_sequence_len: narrow("max_sequence_len", words.max_sequence_len)?,
            max_tokens: max_tokens.ok_or(ShapeBytesError::Mixed)?.max(1),
            max_steps: narrow("max_steps", words.max_steps)?,
            max_step_tokens: narrow("max_step_tokens", words.max_step_tokens)?,
            promise_ahead: narrow("promise_ahead", words.promise_ahead)?,
            reserved_pages: narrow("reserved_pages", words.reserved_pages)?,
            wide_slots: one_of("wide_slots", &BOOLS, words.wide_slots)?,
            state_margin: narrow("state_margin", words.state_margin)?,
            state_gap: narrow("state_gap", words.state_gap)?,
            keep_used_states: one_of("keep_used_states", &BOOLS, words.keep_used_states)?,
            record_pages: narrow("record_pages", words.record_pages)?,
            prefault: one_of("prefault", &BOOLS, words.prefault)?,
        };
        let shape = config.shape().map_err(ShapeBytesError::Config)?;
        if shape.to_bytes() == bytes { Ok(shape) } else { Err(ShapeBytesError::Mixed) }
    }
}

fn sizes_of(shape: KvShape) -> (u64, [u32; 2]) {
    match shape {
        KvShape::Heads { kv_heads, head_dim } => (0, [kv_heads, head_dim]),
        KvShape::Latent { rank, rope } => (1, [rank, rope]),
    }
}

fn shape_of(kind: u64, sizes: [u32; 2]) -> Result<KvShape, ShapeBytesError> {
    match (kind, sizes) {
        (0, [kv_heads, head_dim]) => Ok(KvShape::Heads { kv_heads, head_dim }),
        (1, [rank, rope]) => Ok(KvShape::Latent { rank, rope }),
        (value, _) => Err(ShapeBytesError::Field { name: "shape", value }),
    }
}

/// Returns the words of a state's parts.
fn part_words(parts: &[StatePart]) -> [u64; STATE_PARTS_MAX] {
    let mut words = [0; STATE_PARTS_MAX];
    let word = |part: &StatePart| u64::from(part.heads) | u64::from(part.head_bytes) << 32;
    words.iter_mut().zip(parts).for_each(|(out, part)| *out = word(part));
    words
}

/// Returns the two words of a group's shape.
fn own_words(own: Option<GroupShape>) -> [u64; 2] {
    // The shapes of groups in a checked layout have a dtype.
    let Some(GroupShape { shape, dtype: Some(dtype) }) = own else { return [0; 2] };
    let (kind, [first, second]) = sizes_of(shape);
    let sizes = u64::from(first) | u64::from(second) << 32;
    [1 | number(&DTYPES, dtype) << 1 | kind << 3, sizes]
}

fn own_shape([kind, sizes]: [u64; 2]) -> Result<Option<GroupShape>, ShapeBytesError> {
    if [kind, sizes] == [0; 2] {
        return Ok(None);
    }
    if kind & 1 == 0 || kind >> 3 > 1 {
        return Err(ShapeBytesError::Field { name: "group shape", value: kind });
    }
    let shape = shape_of(kind >> 3, [sizes as u32, (sizes >> 32) as u32])?;
    let dtype = one_of("dtype", &DTYPES, kind >> 1 & 3)?;
    Ok(Some(GroupShape { shape, dtype: Some(dtype) }))
}

fn number<T: PartialEq>(all: &[T], one: T) -> u64 {
    all.iter().position(|other| *other == one).expect("the list is complete") as u64
}

fn one_of<T: Copy>(name: &'static str, all: &[T], value: u64) -> Result<T, ShapeBytesError> {
    let found = usize::try_from(value).ok().and_then(|at| all.get(at));
    found.copied().ok_or(ShapeBytesError::Field { name, value })
}

fn narrow(name: &'static str, value: u64) -> Result<u32, ShapeBytesError> {
    u32::try_from(value).map_err(|_| ShapeBytesError::Field { name, value })
}
