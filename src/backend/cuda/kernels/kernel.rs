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

#[cfg(test)]
mod tests {
    use super::super::archive::find;
    use super::super::table::KERNELS;

    /// Bytes of shared memory of a CTA, of which `dynamic` are asked for at its launch: arrays stand in the order of
    /// the text, the dynamic one behind them, each at a multiple of its alignment.
    fn shared_bytes(ptx: &str, dynamic: u32) -> u32 {
        let aligned = |line: &str, declared: &str| -> Option<(u32, String)> {
            let (align, rest) = line.trim().strip_prefix(declared)?.split_once(' ')?;
            Some((align.parse().expect("a number"), rest.to_owned()))
        };
        let (mut bytes, mut dynamic_align) = (0_u32, 1);
        for line in ptx.lines() {
            if let Some((align, rest)) = aligned(line, ".shared .align ") {
                let (_, size) = rest.split_once('[').expect("an array");
                let size: u32 = size.trim_end_matches("];").parse().expect("a number");
                bytes = bytes.next_multiple_of(align) + size;
            } else if let Some((align, _)) = aligned(line, ".extern .shared .align ") {
                dynamic_align = align.max(dynamic_align);
            } else {
                assert!(!line.contains(".shared ."), "{line}");
            }
        }
        if dynamic > 0 { bytes.next_multiple_of(dynamic_align) + dynamic } else { bytes }
    }

    /// Bytes of shared memory that a CTA may have are those of the CUDA programming guide.
    #[test]
    fn every_kernel_has_the_shared_memory_that_its_devices_have() {
        let (mut texts, mut most) = ((String::new(), ""), 0);
        for kernel in &KERNELS {
            let (name, archive) = (kernel.name(), kernel.archive());
            if texts.1 != archive.name() {
                texts = (archive.decompress().expect("an intact archive"), archive.name());
            }
            let ptx = find(&texts.0, kernel.text()).expect("the kernel's text");
            let target = if kernel.is_sm90a() { ".target sm_90a" } else { ".target sm_80" };
            assert!(
                ptx.contains(target) && kernel.is_sm90a() == name.ends_with("_sm90a"),
                "{name}"
            );
            let (bytes, mut devices) = (shared_bytes(ptx, kernel.shared()), 0);
            for (capability, kib) in
                [(80, 163), (86, 99), (87, 163), (89, 99), (90, 227), (100, 227), (120, 99)]
            {
                if kernel.runs_on(capability) {
                    let max = kib << 10;
                    assert!(bytes <= max, "{capability}: {name} has {bytes} of {max} bytes");
                    devices += 1;
                }
            }
            assert_eq!(devices, if kernel.is_sm90a() { 1 } else { 7 }, "{name}");
            most = most.max(bytes);
        }
        assert!(most > 200 << 10, "kernels of Hopper were looked at");
    }
}
