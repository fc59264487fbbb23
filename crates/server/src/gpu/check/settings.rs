//! The settings in which `generate --check` serves, and the draws that it compares.

use kvarena::Layout;

use kvarena_host::draft::Drafting;
use kvarena_host::gpu::forward::Fault;
use kvarena_host::gpu::products::Choice;
use kvarena_host::sample::Sampling;

/// As many positions as the longest stream of the check has.
pub const ALL: u32 = 147;
/// Fewer than most streams have.
pub const FEW: u32 = 24;

/// How requests come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// All at once.
    AllAtOnce,
    /// Prompts in chunks of seven tokens.
    Chunked,
    /// A pool with room for the longest request and no more.
    Preempting,
    /// Three samples of each.
    Forked,
}

/// All ways.
pub const WAYS: [Way; 4] = [Way::AllAtOnce, Way::Chunked, Way::Preempting, Way::Forked];

/// One combination of settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setting {
    /// Tokens of a page.
    pub page_size: u32,
    /// Order of K and V.
    pub layout: Layout,
    /// Decode steps are replayed.
    pub graphs: bool,
    /// Steps are launched ahead.
    pub overlap: bool,
    /// How requests come.
    pub way: Way,
    /// How products are made.
    pub choice: Choice,
    /// What is wrong on purpose.
    pub fault: Fault,
    /// Every so manieth step fails.
    pub fail_every: Option<u64>,
    /// A token that ends a stream.
    pub stop: Option<u32>,
    /// Drafts that steps check; not with `overlap`.
    pub drafts: Option<Drafting>,
    /// Positions that streams that generate read, if not all.
    pub sparse: Option<u32>,
    /// Three of four requests change their logits.
    pub shaped: bool,
}

impl Default for Setting {
    fn default() -> Self {
        Self {
            page_size: 16,
            layout: Layout::PageFirst,
            graphs: true,
            overlap: true,
            way: Way::AllAtOnce,
            choice: Choice::First,
            fault: Fault::None,
            fail_every: None,
            stop: None,
            drafts: None,
            sparse: None,
            shaped: false,
        }
    }
}

/// Every combination, each kind of product with some of them.
pub fn settings() -> Vec<Setting> {
    let mut settings = Vec::new();
    for (page_size, layout) in
        [1, 16].into_iter().flat_map(|s| [Layout::PageFirst, Layout::LayerFirst].map(|l| (s, l)))
    {
        for (graphs, overlap) in [(true, true), (true, false), (false, true), (false, false)] {
            for way in WAYS {
                let choice = match ((page_size == 1) == graphs, layout) {
                    (true, _) => Choice::First,
                    (false, Layout::PageFirst) => Choice::Skinny,
                    (false, Layout::LayerFirst) => Choice::Gemm,
                };
                let plain = Setting { graphs, overlap, way, choice, ..Setting::default() };
                settings.push(Setting { page_size, layout, ..plain });
            }
        }
    }
    settings.extend(drafted());
    settings.extend(sparse());
    settings
}

/// Drafts in every way, with graphs and without: chains, which a decode kernel takes, and trees, which the same one
/// takes with heads of 128 on compute capability 9.0, and the extend kernel else.
fn drafted() -> impl Iterator<Item = Setting> {
    let pages = [(1, Layout::LayerFirst), (16, Layout::PageFirst)];
    let graphs = pages.into_iter().flat_map(|pages| [(pages, true), (pages, false)]);
    graphs.flat_map(|((page_size, layout), graphs)| {
        let tree = (page_size == 1) == graphs;
        let drafts = Some(Drafting { tokens: if tree { 9 } else { 4 }, tree });
        let choice = if graphs { Choice::First } else { Choice::Gemm };
        let plain = Setting { page_size, layout, graphs, choice, drafts, ..Setting::default() };
        WAYS.map(move |way| Setting { way, overlap: false, ..plain })
    })
}

/// Sparse reads of as many positions as streams have, in every way; and of fewer, where each prompt is computed once and
/// in parts of more than a token, so that the reference knows who read what.
fn sparse() -> impl Iterator<Item = Setting> {
    let pages = [(1, Layout::LayerFirst), (16, Layout::PageFirst)];
    let launched = [(true, true), (false, false), (true, false)];
    let settings = pages.into_iter().zip([(true, true), (false, false)]);
    let all = settings.flat_map(|((page_size, layout), (graphs, overlap))| {
        let plain = Setting { page_size, layout, graphs, overlap, ..Setting::default() };
        WAYS.map(move |way| Setting { way, sparse: Some(ALL), ..plain })
    });
    let few = launched.into_iter().zip(pages.into_iter().cycle());
    all.chain(few.flat_map(|((graphs, overlap), (page_size, layout))| {
        let plain = Setting { page_size, layout, graphs, overlap, ..Setting::default() };
        [Way::AllAtOnce, Way::Forked].map(|way| Setting { way, sparse: Some(FEW), ..plain })
    }))
}

/// Draws that leave out none, some, and most tokens.
pub fn samplings() -> [Sampling; 3] {
    let warm = Sampling { temperature: 0.8, seed: 5, ..Sampling::default() };
    [warm, Sampling { top_k: 20, ..warm }, Sampling { top_k: 50, top_p: 0.7, ..warm }]
}
