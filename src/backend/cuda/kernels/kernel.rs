//! One kernel: its PTX, its launch, and the attention that it supports. `ptx/build.py` generates the list of all
//! kernels (`table.rs`).

use super::archive::Archive;
use crate::layout::{Dtype, Scaling};

/// One entry point of a PTX text, and its launch. `kernels.toml` describes all entry points.
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
    items: (u32, u32),
    suffixes: u32,
}

/// A struct that a kernel takes after its parameter struct. Each is a field of `ExtraParams`. A kernel that takes
/// several such structs takes them in this order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) enum Extra {
    LayerScales,
    Lists,
    LayerRope,
    RowBoxes,
}

/// The part of a step that a kernel computes for pools and rows of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) enum Step {
    /// Sequences of few query rows.
    Decode,
    /// All other sequences.
    Extend,
    /// Decode that reads spans once.
    Shared,
    /// Decode over lists.
    Selected,
    /// All sequences over latent rows.
    Latent,
    /// The join of the partial sums of the latent kernel.
    LatentJoin,
    /// All sequences, computed in f32.
    Check,
    /// Scores of labels.
    Score,
    /// Norm and rotation of q and k.
    Rope,
}

/// The element types that a kernel supports in pools. `Rows` is the type of q. The fp8 variants differ in
/// the scales that they support: both kinds, static scales, or scales by token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) enum Cache {
    Any,
    Rows,
    Fp8,
    Fp8Static,
    Fp8Token,
}

impl Cache {
    /// Returns whether the kernel supports pools with these scales.
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

/// The part of a step, the pools and the rows that a kernel supports; a head_dim of 0 means any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) struct Serves {
    pub step: Step,
    pub cache: Cache,
    pub dtype: Dtype,
    pub head_dim: u32,
    pub rows: u32,
}

impl Kernel {
    /// Describes the entry point `name` in a text of the same name. A CTA has at most `threads` threads and at most
    /// `shared` bytes of dynamic shared memory.
    pub const fn new(name: &'static str, archive: &'static Archive, threads: u32, shared: u32) -> Self {
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
            items: (0, 0),
            suffixes: 0,
        }
    }

    /// Sets the name of the text, if it differs from the entry point's.
    pub const fn of(mut self, text: &'static str) -> Self {
        self.text = text;
        self
    }

    /// Restricts the kernel to compute capability 9.0.
    pub const fn sm90a(mut self) -> Self {
        self.sm90a = true;
        self
    }

    /// Declares that the kernel itself waits for earlier work (programmatic dependent launch) on compute capability 9.0
    /// and above.
    pub const fn pdl(mut self) -> Self {
        self.pdl = true;
        self
    }

    /// Sets the name of the kernel's parameter struct.
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

    /// Sets the maximum number of query rows of an item, and the number of tokens at whose multiples items are cut.
    pub(in super::super) const fn items(mut self, rows: u32, cut: u32) -> Self {
        self.items = (rows, cut);
        self
    }

    /// Sets the number of warps of a CTA that work on suffixes.
    pub(in super::super) const fn suffixes(mut self, warps: u32) -> Self {
        self.suffixes = warps;
        self
    }

    /// Returns the entry's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the name of the kernel's text. The text may contain other entry points.
    pub fn text(&self) -> &'static str {
        self.text
    }

    /// Returns the archive of the kernel's text.
    pub fn archive(&self) -> &'static Archive {
        self.archive
    }

    /// Returns the maximum number of threads in a CTA. Attention kernels have exactly this number.
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// Returns the maximum dynamic shared memory of a CTA in bytes.
    pub fn shared(&self) -> u32 {
        self.shared
    }

    /// Returns whether only compute capability 9.0 can run the kernel.
    pub fn is_sm90a(&self) -> bool {
        self.sm90a
    }

    /// Returns whether the kernel itself waits for earlier work on a device of this compute capability.
    pub fn waits(&self, capability: u32) -> bool {
        self.pdl && capability >= 90
    }

    /// Returns the name of the kernel's parameter struct.
    pub fn params(&self) -> &'static str {
        self.params
    }

    pub(in super::super) fn extra(&self) -> &'static [Extra] {
        self.extra
    }

    /// Returns whether the kernel supports draft trees.
    pub(in super::super) fn has_trees(&self) -> bool {
        self.trees
    }

    pub(in super::super) fn supported(&self) -> Option<Serves> {
        self.serves
    }

    /// Returns the maximum number of query rows of an item.
    pub(in super::super) fn item_rows(&self) -> u32 {
        self.items.0
    }

    /// Returns the number of tokens at whose multiples items are cut.
    pub(in super::super) fn cut_tokens(&self) -> u32 {
        self.items.1
    }

    /// Returns the number of warps of a CTA that work on suffixes.
    pub(in super::super) fn suffix_warps(&self) -> u32 {
        self.suffixes
    }

    /// Returns whether a device of this compute capability, as 10 * major + minor, can run the kernel. PTX for 8.0 is
    /// known to run up to 12.x.
    pub fn runs_on(&self, capability: u32) -> bool {
        if self.sm90a { capability == 90 } else { (80..130).contains(&capability) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::archive::find;
    use super::super::table::KERNELS;

    /// Returns the bytes of shared memory of a CTA, of which `dynamic` are requested at the launch. The static arrays
    /// come first, in the order of the text, then the dynamic array. Each is aligned.
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

    /// The limits are from the CUDA programming guide.
    #[test]
    fn every_kernel_fits_in_the_shared_memory_of_its_devices() {
        let (mut texts, mut most) = ((String::new(), ""), 0);
        for kernel in &KERNELS {
            let (name, archive) = (kernel.name(), kernel.archive());
            if texts.1 != archive.name() {
                texts = (archive.decompress().expect("an intact archive"), archive.name());
            }
            let ptx = find(&texts.0, kernel.text()).expect("the kernel's text");
            let target = if kernel.is_sm90a() { ".target sm_90a" } else { ".target sm_80" };
            assert!(ptx.contains(target) && kernel.is_sm90a() == name.ends_with("_sm90a"), "{name}");
            let (bytes, mut devices) = (shared_bytes(ptx, kernel.shared()), 0);
            for (capability, kib) in [(80, 163), (86, 99), (87, 163), (89, 99), (90, 227), (100, 227), (120, 99)] {
                if kernel.runs_on(capability) {
                    let max = kib << 10;
                    assert!(bytes <= max, "{capability}: {name} has {bytes} of {max} bytes");
                    devices += 1;
                }
            }
            assert_eq!(devices, if kernel.is_sm90a() { 1 } else { 7 }, "{name}");
            most = most.max(bytes);
        }
        assert!(most > 200 << 10, "no kernel above 200 KiB was checked; some sm_90a kernels are");
    }
}
