//! One kernel: where its PTX is, how it is launched, and what of attention it serves.
//!
//! Not here: all of them (`table.rs`, which `ptx/build.py` generates), which one serves (`selection.rs`).

use super::archive::Archive;
use crate::layout::{Dtype, Scaling};

/// One entry of a PTX text, and its launch. Rows of a `kernels.toml` become these.
#[derive(Debug)]
pub struct Kernel {
    name: &'static str,
    text: &'static str,
    archive: &'static Archive,
    threads: u32,
    shared: u32,
    sm90a: bool,
    pdl: bool,
    params: &'static str,
    extra: &'static [Extra],
    trees: bool,
    serves: Option<Serves>,
}

/// What a kernel takes behind its struct, in this order: a field of `ExtraParams` each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) enum Extra {
    LayerScales,
    Lists,
    LayerRope,
    RowBoxes,
}

/// What of a step a kernel of attention is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) enum Step {
    /// Sequences of few query rows.
    Decode,
    /// All others.
    Extend,
    /// In place of decode, reading spans once.
    Shared,
    /// Decode over lists.
    Selected,
    /// All sequences over latent rows.
    Latent,
    /// What that leaves in parts.
    LatentJoin,
    /// All sequences, in f32.
    Check,
}

/// What a pool that a kernel serves contains.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) enum Cache {
    Any,
    Rows,
    Fp8,
    Fp8Static,
    Fp8Token,
}

impl Cache {
    /// Whether it is that of pools with such scales.
    pub const fn has(self, scaling: Option<Scaling>) -> bool {
        match self {
            Self::Any => true,
            Self::Rows => scaling.is_none(),
            Self::Fp8 => scaling.is_some(),
            Self::Fp8Static => matches!(scaling, Some(Scaling::Static)),
            Self::Fp8Token => matches!(scaling, Some(Scaling::ByToken)),
        }
    }
}

/// The attention that a kernel is for; a head_dim of 0: whatever it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Serves {
    pub step: Step,
    pub cache: Cache,
    pub dtype: Dtype,
    pub head_dim: u32,
    pub rows: u32,
}

impl Kernel {
    /// Entry `name`, in the text of that name. A CTA has at most `threads` threads and `shared` bytes of dynamic shared
    /// memory.
    pub const fn new(
        name: &'static str,
        archive: &'static Archive,
        threads: u32,
        shared: u32,
    ) -> Self {
        Self {
            name,
            text: name,
            archive,
            threads,
            shared,
            sm90a: false,
            pdl: false,
            params: "",
            extra: &[],
            trees: true,
            serves: None,
        }
    }

    /// Its text has another name.
    pub const fn of(mut self, text: &'static str) -> Self {
        self.text = text;
        self
    }

    /// Only compute capability 9.0 runs it.
    pub const fn sm90a(mut self) -> Self {
        self.sm90a = true;
        self
    }

    /// From compute capability 9.0 on it waits by itself for the work before it.
    pub const fn pdl(mut self) -> Self {
        self.pdl = true;
        self
    }

    /// It takes the struct of this name by value.
    pub const fn takes(mut self, params: &'static str) -> Self {
        self.params = params;
        self
    }

    pub(in super::super) const fn then(mut self, extra: &'static [Extra]) -> Self {
        self.extra = extra;
        self
    }

    pub(in super::super) const fn without_trees(mut self) -> Self {
        self.trees = false;
        self
    }

    pub(in super::super) const fn serves(
        mut self,
        step: Step,
        cache: Cache,
        dtype: Dtype,
        head_dim: u32,
        rows: u32,
    ) -> Self {
        self.serves = Some(Serves { step, cache, dtype, head_dim, rows });
        self
    }

    /// The entry's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The name of its text, which may have other entries too.
    pub fn text(&self) -> &'static str {
        self.text
    }

    /// Where its text is.
    pub fn archive(&self) -> &'static Archive {
        self.archive
    }

    /// Most threads of a CTA; of a kernel of attention all.
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// Bytes of dynamic shared memory of a CTA, at most.
    pub fn shared(&self) -> u32 {
        self.shared
    }

    /// Whether only compute capability 9.0 runs it.
    pub fn is_sm90a(&self) -> bool {
        self.sm90a
    }

    /// Whether it waits by itself on such a device.
    pub fn waits(&self, capability: u32) -> bool {
        self.pdl && capability >= 90
    }

    /// The name of the struct that it takes by value.
    pub fn params(&self) -> &'static str {
        self.params
    }

    pub(in super::super) fn extra(&self) -> &'static [Extra] {
        self.extra
    }

    /// Whether it serves trees of drafts.
    pub(in super::super) fn has_trees(&self) -> bool {
        self.trees
    }

    pub(super) fn attention(&self) -> Option<Serves> {
        self.serves
    }

    /// Whether a device of this compute capability, as 10 * major + minor, runs it. PTX for 8.0 is known to run up to
    /// 12.x.
    pub fn runs_on(&self, capability: u32) -> bool {
        if self.sm90a { capability == 90 } else { (80..130).contains(&capability) }
    }
}
