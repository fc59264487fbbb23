//! Identifiers: indices as newtypes, keys of the arenas, and locks on prefixes.
//!
//! Indices have no arithmetic. Code that computes one index from another, such as
//! [`PoolLayout::slot`](crate::layout::PoolLayout::slot), uses their raw numbers.

use std::fmt;

use bytemuck::{Pod, TransparentWrapper, Zeroable};
use slotmap::{Key, KeyData};

macro_rules! id_type {
    ($(#[$doc:meta])* $name:ident, $raw:ty, $letter:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[derive(Pod, Zeroable, TransparentWrapper)]
        #[repr(transparent)]
        pub struct $name($raw);

        impl $name {
            /// Wraps a raw number.
            pub const fn new(raw: $raw) -> Self {
                Self(raw)
            }

            /// Returns the raw number.
            pub const fn raw(self) -> $raw {
                self.0
            }

            /// Returns the number as an index into a table.
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// Views raw numbers as ids, without copying.
            pub fn from_raw(raw: &[$raw]) -> &[Self] {
                TransparentWrapper::wrap_slice(raw)
            }

            /// Views ids as raw numbers, without copying.
            pub fn as_raw(ids: &[Self]) -> &[$raw] {
                TransparentWrapper::peel_slice(ids)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($letter, "{}"), self.0)
            }
        }
    };
}

id_type!(
    /// A unit of KV memory of [`page_size`](crate::PoolConfig::page_size) tokens.
    #[doc(alias = "block")]
    PageId,
    u32,
    "p"
);
id_type!(
    /// A page of swap memory. It has as many bytes as a page of the pool.
    SwapPageId,
    u32,
    "swap"
);
id_type!(
    /// A batch of saves or a batch of loads. Batches of both kinds are numbered together, from 1, in the order of the
    /// calls.
    MoveId,
    u64,
    "move"
);
id_type!(
    /// One token's place in the pool: `page * page_size + offset`.
    #[doc(alias = "out_cache_loc")]
    SlotId,
    u64,
    "s"
);
id_type!(
    /// A token of the model's vocabulary.
    TokenId,
    u32,
    "t"
);
id_type!(
    /// A layer of the model, counted from 0.
    LayerId,
    u32,
    "l"
);
id_type!(
    /// A sequence's row in the page tables of the backends.
    RowId,
    u32,
    "r"
);
id_type!(
    /// A step: one forward pass over a batch, or one batch of page copies. Numbered from 1, in the order of planning.
    #[doc(alias = "tick")]
    StepId,
    u64,
    "step"
);
id_type!(
    /// A namespace of prefixes, such as a tenant, a LoRA adapter or a salt. Sequences of different namespaces share no
    /// pages.
    #[doc(alias = "extra_key")]
    #[doc(alias = "cache_salt")]
    Namespace,
    u64,
    "ns"
);

id_type!(
    /// A cell: the cached pages of one group of layers at one entry of the prefix tree. Group 0 has no cells. The id 0
    /// means no cell.
    CellId,
    u32,
    "c"
);

impl CellId {
    /// No cell.
    pub(crate) const NONE: CellId = CellId(0);

    pub(crate) fn is_some(self) -> bool {
        self != Self::NONE
    }
}

impl TokenId {
    /// Placeholder in a plan for a token that is not known yet. The engine rejects it in prompts and appended tokens.
    /// Its raw value is `u32::MAX`, which is -1 as i32.
    pub const PENDING: TokenId = TokenId(u32::MAX);
}

slotmap::new_key_type! {
    /// A node of the prefix tree. Generational: the key of a removed node finds no node.
    pub struct NodeKey;

    /// A sequence. Generational: calls with the key of a finished sequence return
    /// [`UnknownSequence`](crate::Error::UnknownSequence).
    pub struct SeqKey;
}

/// Names the end of a cached prefix of a [`Tree`](crate::tree::Tree). 16 bytes. The [guide](crate::guide::tree#handles)
/// lists what a handle survives.
///
/// A tree never uses a value twice, so a handle to a prefix that is gone never names another one. The default names the
/// empty prefix, which always exists. A handle means nothing to another tree.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Handle {
    serial: u64,
    node: NodeKey,
}

impl Handle {
    /// Returns the handle that [`Handle::to_raw`] turned into these numbers. Other numbers give a handle that names
    /// nothing.
    pub fn from_raw([serial, node]: [u64; 2]) -> Self {
        if [serial, node] == [0, 0] {
            return Self::default();
        }
        let handle = Self { serial, node: KeyData::from_ffi(node).into() };
        // A key has fewer bits than its number, so other numbers may give the key of a handle.
        let names_nothing = Self { serial: u64::MAX, node: NodeKey::default() };
        if handle.to_raw() == [serial, node] { handle } else { names_nothing }
    }

    /// Returns the handle as two numbers, for callers in other languages. The default handle is two zeros.
    pub fn to_raw(self) -> [u64; 2] {
        if self == Self::default() { [0, 0] } else { [self.serial, self.node.data().as_ffi()] }
    }

    pub(crate) fn new(serial: u64, node: NodeKey) -> Self {
        Self { serial, node }
    }

    pub(crate) fn serial(self) -> u64 {
        self.serial
    }

    pub(crate) fn node(self) -> NodeKey {
        self.node
    }
}

const _: () = assert!(size_of::<Handle>() == 16);

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "handle{}", self.serial)
    }
}

/// A set of prefixes that can match each other: one namespace in one generation.
///
/// A [reset](crate::Engine::reset) begins a new generation; prefixes of an old one never match again. With
/// [`PrefixMode::None`](crate::config::PrefixMode::None) every admitted sequence has its own generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Zeroable)]
pub struct Scope {
    /// The host's namespace.
    pub namespace: Namespace,
    /// Generation: counts resets. Without prefix reuse, each admitted sequence has its own.
    pub generation: u64,
}

/// A lock on a prefix: while it exists, no page of the prefix is evicted.
///
/// Neither `Copy` nor `Clone`. Only the prefix tree creates and releases locks.
#[must_use = "a dropped lock protects its pages for ever"]
#[derive(Debug)]
pub struct PrefixLock {
    node: Option<NodeKey>,
    scope: Scope,
}

impl PrefixLock {
    /// Creates a lock. Only the prefix tree and tests call it, which `tests/tidy.rs` checks.
    pub(crate) fn new(node: Option<NodeKey>, scope: Scope) -> Self {
        Self { node, scope }
    }

    /// Returns the deepest node of the prefix; `None` for the empty prefix.
    pub fn node(&self) -> Option<NodeKey> {
        self.node
    }

    /// Returns the namespace and generation that the prefix belongs to.
    pub fn scope(&self) -> Scope {
        self.scope
    }
}

/// The places of a row (`sequence/states.rs`) that an item reads and writes, plus 1. Both are 0 for a row that was
/// steady, whose item updates the current place, and without states.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct StateUse {
    /// The place to read, plus 1; 0 for zeros.
    pub reads: u8,
    /// The place to write, plus 1.
    pub writes: u8,
}

impl StateUse {
    /// Returns the place that the item reads and the one that it writes.
    pub(crate) fn parts(self) -> [u8; 2] {
        [self.reads, self.writes]
    }
}
