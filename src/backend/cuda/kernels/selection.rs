//! Selects kernels for a pool and a device. Only this file selects by compute capability.
//!
//! Each part of a step uses the kernel in the table that matches the pool's contents, the type of rows and the
//! head_dim. If two kernels match, the step uses the one that runs only on this compute capability. The table's columns
//! `step` and `cache` select the family.

use super::kernel::{Kernel, Step};
use super::table::{DECODE_ROWS, KERNELS, SUFFIX_ROWS};
use crate::backend::cuda::attention::split::LatentItems;
use crate::layout::{Dtype, PoolLayout, Scaling};

/// The decode kernels of [`DECODE_ROWS`] that exist.
pub type Decodes = [Option<&'static Kernel>; DECODE_ROWS.len()];

/// The kernels that read spans once, for each of [`SUFFIX_ROWS`].
pub type Shared = [&'static Kernel; SUFFIX_ROWS.len()];

/// The kernels over latent rows.
#[derive(Clone, Copy, Debug)]
pub enum Latent {
    /// A kernel whose work the host splits into these items, and the kernel that joins parts.
    Split([&'static Kernel; 2], LatentItems),
    /// The kernel over f32 rows, whose work is not split.
    Plain(&'static Kernel),
}

/// The properties that select kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Selection {
    /// Compute capability, as 10 * major + minor.
    pub capability: u32,
    /// Scales of the pool, if quantised.
    pub scaling: Option<Scaling>,
    /// Type of the host's rows.
    pub rows: Dtype,
    pub head_dim: u32,
}

impl Selection {
    /// Returns the selection for a pool with these rows on a device of this capability.
    pub fn new(capability: u32, layout: &PoolLayout, rows: Dtype) -> Self {
        Self { capability, scaling: layout.scaling(), rows, head_dim: layout.head_dim() }
    }

    /// Returns the kernel of a step. `query_rows` is 0 for steps with one kernel for all numbers of query rows. With
    /// `own`, kernels that run only on this compute capability are allowed.
    fn find(&self, step: Step, query_rows: u32, own: bool) -> Option<&'static Kernel> {
        let serves = |kernel: &&Kernel| {
            kernel.supported().is_some_and(|serves| {
                serves.step == step
                    && serves.cache.has(self.scaling)
                    && serves.dtype == self.rows
                    && (serves.head_dim == 0 || serves.head_dim == self.head_dim)
                    && serves.rows == query_rows
            }) && kernel.runs_on(self.capability)
                && (own || !kernel.is_sm90a())
        };
        KERNELS.iter().filter(serves).max_by_key(|kernel| kernel.is_sm90a())
    }

    /// Returns the decode kernels for groups of `group` query heads.
    pub fn decodes(&self, group: u32) -> Decodes {
        let mut decodes = DECODE_ROWS.map(|rows| self.find(Step::Decode, rows, true));
        if decodes[2].is_some() && group <= DECODE_ROWS[0] {
            // The wider kernel is as fast, and supports trees.
            decodes[1] = None;
        }
        decodes
    }

    /// Returns the kernels over lists.
    pub fn selected(&self) -> Decodes {
        DECODE_ROWS.map(|rows| self.find(Step::Selected, rows, true))
    }

    /// Returns the extend kernel.
    pub fn extend(&self) -> Option<&'static Kernel> {
        self.find(Step::Extend, 0, true)
    }

    /// Returns the extend kernel for steps with draft trees, if it is a separate one. Both read the same plan.
    pub fn trees(&self) -> Option<&'static Kernel> {
        let has_trees = self.extend()?.has_trees();
        if has_trees { None } else { self.find(Step::Extend, 0, false) }
    }

    /// Returns the kernels that read spans once, for attention with this window or 0.
    pub fn shared(&self, window: u32) -> Option<Shared> {
        if window > 0 {
            return None;
        }
        let [narrow, wide] = SUFFIX_ROWS.map(|rows| self.find(Step::Shared, rows, true));
        Some([narrow?, wide?])
    }

    /// Returns the kernels over latent rows.
    pub fn latent(&self) -> Latent {
        let main = self.find(Step::Latent, 0, true).expect("every dtype has a latent kernel");
        let items = if main.is_sm90a() { LatentItems::Hopper } else { LatentItems::Tiles };
        match self.find(Step::LatentJoin, 0, true) {
            Some(join) => Latent::Split([main, join], items),
            None => Latent::Plain(main),
        }
    }

    /// Returns the kernel that computes scores of labels.
    pub fn score(&self) -> Option<&'static Kernel> {
        self.find(Step::Score, 0, true)
    }

    /// Returns the kernel that rotates rows.
    pub fn rope(&self) -> Option<&'static Kernel> {
        self.find(Step::Rope, 0, true)
    }

    /// Returns the kernel over f32 rows.
    pub fn check(&self) -> &'static Kernel {
        self.find(Step::Check, 0, true).expect("every pool has a check kernel")
    }
}

/// Returns the minimum number of query rows of an extend item over all devices; `None` without kernels for the
/// head_dim.
pub fn extend_rows_min(head_dim: u32) -> Option<u32> {
    let serves = |kernel: &&Kernel| {
        kernel.supported().is_some_and(|serves| serves.step == Step::Extend && serves.head_dim == head_dim)
    };
    KERNELS.iter().filter(serves).map(Kernel::item_rows).min()
}

#[cfg(test)]
mod tests {
    use super::super::archive::find;
    use super::super::table::HEAD_DIMS;
    use super::*;

    const CAPABILITIES: [u32; 7] = [80, 86, 89, 90, 100, 103, 120];
    const SCALINGS: [Option<Scaling>; 3] = [None, Some(Scaling::Static), Some(Scaling::ByToken)];

    fn each(mut check: impl FnMut(Selection)) {
        for capability in CAPABILITIES {
            for (scaling, rows) in SCALINGS.into_iter().flat_map(|s| [(s, Dtype::Bf16), (s, Dtype::F16)]) {
                for head_dim in HEAD_DIMS {
                    check(Selection { capability, scaling, rows, head_dim });
                }
            }
        }
    }

    /// Returns a kernel's name for a selection.
    fn name(selection: &Selection, step: &str, query_rows: u32, own: bool) -> String {
        let fp8 = if selection.scaling.is_some() { "_fp8" } else { "" };
        let dtype = format!("{:?}", selection.rows).to_lowercase();
        let rows = if query_rows > 0 { format!("_r{query_rows}") } else { String::new() };
        let target = if own { "_sm90a" } else { "" };
        format!("attend_{step}{fp8}_{dtype}_d{}{rows}{target}", selection.head_dim)
    }

    #[test]
    fn every_served_pool_has_kernels_by_name() {
        each(|selection| {
            let is_hopper = selection.capability == 90 && selection.head_dim == 128;
            let own = is_hopper && selection.scaling.is_none();
            for group in [1, 8, 9, 16] {
                let [narrow, middle, wide] = selection.decodes(group).map(|k| k.map(Kernel::name));
                assert_eq!(narrow, Some(&*name(&selection, "decode", 8, false)));
                let has_middle = !(own && group <= 8);
                let middle_name = name(&selection, "decode", 16, false);
                assert_eq!(middle, has_middle.then_some(&*middle_name));
                assert_eq!(wide, own.then_some(&*name(&selection, "decode", 64, true)));
                let shared = selection.shared(0).expect("spans are served");
                assert_eq!(
                    shared.map(Kernel::name),
                    [8, 16].map(|rows| name(&selection, "shared", rows, own)).each_ref().map(|n| &**n)
                );
            }
            let extend = selection.extend().expect("a served shape").name();
            let token = selection.scaling == Some(Scaling::ByToken) && is_hopper;
            let step = if token { "extend_fp8_token" } else { "extend" };
            let wanted = name(&selection, step, 0, is_hopper).replace("token_fp8", "token");
            assert_eq!(extend, wanted);
            let trees = is_hopper && selection.scaling.is_some();
            let general = name(&selection, "extend", 0, false);
            assert_eq!(selection.trees().map(Kernel::name), trees.then_some(&*general));
            let lists = selection.selected().map(|kernel| kernel.map(Kernel::name));
            let listed = [8, 16].map(|rows| name(&selection, "selected", rows, false));
            match selection.scaling {
                None => assert_eq!(lists, [Some(&*listed[0]), Some(&*listed[1]), None]),
                Some(_) => assert_eq!(lists, [None; 3]),
            }
        });
    }

    /// F32 rows, and attention with a window, read spans separately for each row.
    #[test]
    fn spans_are_read_once_for_rows_of_16_bits_alone() {
        each(|selection| {
            assert!(selection.shared(64).is_none());
            let selection = Selection { rows: Dtype::F32, ..selection };
            assert!(selection.shared(0).is_none());
            assert!(selection.check().name().ends_with("_f32") && selection.extend().is_none());
        });
    }

    #[test]
    fn latent_rows_of_16_bits_have_split_work_on_every_device() {
        for (capability, scaling) in CAPABILITIES.into_iter().flat_map(|c| [(c, None), (c, Some(Scaling::ByToken))]) {
            for (rows, dtype) in [(Dtype::F32, "f32"), (Dtype::F16, "f16"), (Dtype::Bf16, "bf16")] {
                let selection = Selection { capability, scaling, rows, head_dim: 576 };
                let fp8 = if scaling.is_some() { "fp8_" } else { "" };
                let (main, join, items) = match selection.latent() {
                    Latent::Plain(kernel) => (kernel, None, None),
                    Latent::Split([main, join], items) => (main, Some(join), Some(items)),
                };
                let (name, wanted) = match (rows, capability) {
                    (Dtype::F32, _) => (format!("attend_latent_{fp8}f32"), None),
                    (_, 90) => (format!("attend_latent_{fp8}{dtype}_sm90a"), Some(LatentItems::Hopper)),
                    _ => (format!("attend_latent_tiles_{fp8}{dtype}"), Some(LatentItems::Tiles)),
                };
                assert_eq!((main.name(), items), (&*name, wanted));
                let join_name = wanted.map(|_| format!("attend_latent_join_{dtype}"));
                assert_eq!(join.map(Kernel::name), join_name.as_deref());
            }
        }
    }

    #[test]
    fn a_text_of_attention_has_one_entry() {
        let mut texts = (String::new(), "");
        for kernel in KERNELS.iter().filter(|kernel| kernel.supported().is_some()) {
            if texts.1 != kernel.archive().name() {
                let text = kernel.archive().decompress().expect("an intact archive");
                texts = (text, kernel.archive().name());
            }
            let text = find(&texts.0, kernel.text()).expect("the kernel's text");
            assert_eq!(text.matches(".entry ").count(), 1, "{}", kernel.name());
        }
    }

    fn list(kernels: &[Option<&'static Kernel>]) -> String {
        let short = |kernel: &&Kernel| format!("`{}`", kernel.name().replace("attend_", "").replace("_bf16", ""));
        let names: Vec<_> = kernels.iter().flatten().map(short).collect();
        if names.is_empty() { "-".into() } else { names.join(", ") }
    }

    /// Returns the kernels of decode, extend and trees, spans, and lists for bf16 rows.
    fn cells(selection: Selection) -> [String; 4] {
        if selection.head_dim == 576 {
            let kernels = match selection.latent() {
                Latent::Split(kernels, _) => kernels.map(Some),
                Latent::Plain(kernel) => [Some(kernel), None],
            };
            return [list(&kernels), "the same".into(), list(&[]), list(&[])];
        }
        let spans = selection.shared(0).map_or([None; 2], |k| k.map(Some));
        let extend = [selection.extend(), selection.trees()];
        [list(&selection.decodes(16)), list(&extend), list(&spans), list(&selection.selected())]
    }

    /// Returns the lines of the table in `ptx/README.md`, with the kernels of each compute capability.
    fn table() -> String {
        let mut text =
            String::from("| pool, head_dim | compute capability | decode | extend, trees | spans | lists |\n")
                + "|---|---|---|---|---|---|\n";
        let of_heads = SCALINGS.into_iter().flat_map(|s| HEAD_DIMS.map(|d| (s, d)));
        let latent = [(None, 576), (Some(Scaling::ByToken), 576)];
        for (scaling, head_dim) in of_heads.chain(latent) {
            let pool = match scaling {
                None => "16 bits",
                Some(Scaling::Static) => "fp8, static scales",
                Some(Scaling::ByToken) => "fp8, scales by token",
            };
            let mut groups: Vec<([String; 4], Vec<String>)> = Vec::new();
            for capability in [80, 86, 89, 90, 100, 120] {
                let selection = Selection { capability, scaling, rows: Dtype::Bf16, head_dim };
                let (cells, shown) = (cells(selection), format!("{}.{}", capability / 10, capability % 10));
                match groups.iter_mut().find(|group| group.0 == cells) {
                    Some(group) => group.1.push(shown),
                    None => groups.push((cells, vec![shown])),
                }
            }
            for (cells, capabilities) in groups {
                let (shown, cells) = (capabilities.join(", "), cells.join(" | "));
                text += &format!("| {pool}, {head_dim} | {shown} | {cells} |\n");
            }
        }
        text
    }

    /// With `KVARENA_WRITE` in the environment, the test writes the lines.
    #[test]
    fn the_readme_lists_the_kernels_of_each_capability() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/ptx/README.md");
        let readme = std::fs::read_to_string(path).expect("the README");
        let (begin, end) = ("<!-- selection -->\n", "<!-- end of selection -->\n");
        let (before, rest) = readme.split_once(begin).expect("the mark of the begin");
        let (lines, after) = rest.split_once(end).expect("the mark of the end");
        if std::env::var_os("KVARENA_WRITE").is_some() {
            let text = format!("{before}{begin}{}{end}{after}", table());
            return std::fs::write(path, text).expect("the README can be written");
        }
        assert_eq!(lines, table(), "run this test with KVARENA_WRITE=1 to write the lines");
    }
}
