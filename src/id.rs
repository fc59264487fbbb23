//! Names of things: indices as newtypes, keys of the arenas, and the right to use a prefix.
//!
//! An index has no arithmetic: [`PoolLayout::slot`](crate::PoolLayout::slot) is the only way from a page to a slot.
//!
//! Not here: what the indices point into.

use std::fmt;

use bytemuck::{Pod, TransparentWrapper, Zeroable};

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

            /// The raw number.
            pub const fn raw(self) -> $raw {
                self.0
            }

            /// The number as an index into a table.
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
    /// A sequence's row in the page tables that backends hold.
    RowId,
    u32,
    "r"
);
id_type!(
    /// One pass over a batch, or one batch of page copies; numbered from 1, in the order of planning.
    #[doc(alias = "tick")]
    StepId,
    u64,
    "step"
);
id_type!(
    /// Keeps prefixes apart: equal tokens in different namespaces never share pages (tenant, LoRA, salt).
    #[doc(alias = "extra_key")]
    #[doc(alias = "cache_salt")]
    Namespace,
    u64,
    "ns"
);

impl TokenId {
    /// Stands in a plan for a token that is planned but not yet known. No sequence has it: prompts and appended tokens
    /// that name it are refused.
    pub const PENDING: TokenId = TokenId(u32::MAX);
}

slotmap::new_key_type! {
    /// A node of the prefix tree. Generational: the key of a node that is gone finds nothing.
    pub struct NodeKey;

    /// A sequence. Generational: the key of a finished sequence answers
    /// [`UnknownSequence`](crate::Error::UnknownSequence).
    pub struct SeqKey;
}

/// Which prefixes can see each other: a namespace within a generation.
///
/// A [reset](crate::Engine::reset) begins a new generation; prefixes of an old one never match again. With
/// [`PrefixMode::None`](crate::PrefixMode::None) every admitted sequence is a generation of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Zeroable)]
pub struct Scope {
    /// The host's namespace.
    pub namespace: Namespace,
    /// Counts resets, and families of sequences when prefix reuse is off.
    pub generation: u64,
}

/// The right to use a prefix: while it is held, none of the prefix's pages is evicted.
///
/// Neither `Copy` nor `Clone`. Only the prefix tree makes one, and only its `unlock` consumes it.
#[must_use = "a lock that is dropped protects its pages for ever"]
#[derive(Debug)]
pub struct PrefixLock {
    node: Option<NodeKey>,
    scope: Scope,
}

impl PrefixLock {
    /// Made by the prefix tree alone (`tests/tidy.rs` holds it).
    pub(crate) fn new(node: Option<NodeKey>, scope: Scope) -> Self {
        Self { node, scope }
    }

    /// The deepest node of the prefix; `None` for the empty prefix.
    pub fn node(&self) -> Option<NodeKey> {
        self.node
    }

    /// The namespace and generation that the prefix belongs to.
    pub fn scope(&self) -> Scope {
        self.scope
    }
}
