//! The settings in which the check serves, and the draws that it compares.

use kvarena::layout::Layout;
use kvarena_host::draft::Drafting;
use kvarena_host::gpu::forward::InjectedFault;
use kvarena_host::gpu::products::Choice;
use kvarena_host::sample::Sampling;

/// The number of positions of the check's longest stream.
pub const ALL: u32 = 147;
/// Fewer positions than most streams have.
pub const FEW: u32 = 24;
/// In settings with failures, every n-th step fails.
pub const FAIL_EVERY: u64 = 5;

/// The way in which the check serves the requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Schedule {
    AllAtOnce,
    /// Prompts in chunks of seven tokens.
    Chunked,
    /// A pool with memory for the longest request only.
    Preempting,
    /// Three samples of each request.
    Forked,
}

const SCHEDULES: [Schedule; 4] = [Schedule::AllAtOnce, Schedule::Chunked, Schedule::Preempting, Schedule::Forked];

/// One combination of settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setting {
    pub page_size: u32,
    pub layout: Layout,
    pub graphs: bool,
    pub overlap: bool,
    pub schedule: Schedule,
    pub choice: Choice,
    pub fault: InjectedFault,
    /// Every n-th step fails.
    pub fail_every: Option<u64>,
    /// A token that ends a stream.
    pub stop: Option<u32>,
    /// Drafts that steps check; not with `overlap`.
    pub drafts: Option<Drafting>,
    /// Positions that generating streams read, if not all.
    pub sparse: Option<u32>,
    /// Three of four requests edit their logits.
    pub shaped: bool,
    /// Layers that read a window form groups; not with `sparse`.
    pub groups: bool,
    /// K and V are fp8.
    pub fp8: bool,
    /// Evicted pages move to swap memory; with [`Schedule::Preempting`], most streams load theirs.
    pub swap_pages: bool,
}

impl Default for Setting {
    fn default() -> Self {
        Self {
            page_size: 16,
            layout: Layout::PageFirst,
            graphs: true,
            overlap: true,
            schedule: Schedule::AllAtOnce,
            choice: Choice::First,
            fault: InjectedFault::None,
            fail_every: None,
            stop: None,
            drafts: None,
            sparse: None,
            shaped: false,
            groups: true,
            fp8: false,
            swap_pages: false,
        }
    }
}

/// Returns every combination of page size, layout, graphs, overlap and schedule, then settings with drafts, sparse
/// reads and swap pages. They use every choice of products except `Choice::Fastest`.
pub fn settings() -> Vec<Setting> {
    let mut settings = Vec::new();
    for (page_size, layout) in [1, 16].into_iter().flat_map(|s| [Layout::PageFirst, Layout::LayerFirst].map(|l| (s, l)))
    {
        for (graphs, overlap) in [(true, true), (true, false), (false, true), (false, false)] {
            for schedule in SCHEDULES {
                let choice = match ((page_size == 1) == graphs, layout) {
                    (true, _) => Choice::First,
                    (false, Layout::PageFirst) => Choice::Skinny,
                    (false, Layout::LayerFirst) => Choice::Gemm,
                };
                let plain = Setting { graphs, overlap, schedule, choice, ..Setting::default() };
                settings.push(Setting { page_size, layout, ..plain });
            }
        }
    }
    settings.extend(drafted());
    settings.extend(sparse());
    settings.extend(hosted());
    settings
}

/// Returns settings with drafts, with and without graphs. A decode kernel takes chains. With heads of 128 on compute
/// capability 9.0 it also takes trees; otherwise the extend kernel takes trees.
fn drafted() -> impl Iterator<Item = Setting> {
    let pages = [(1, Layout::LayerFirst), (16, Layout::PageFirst)];
    let graphs = pages.into_iter().flat_map(|pages| [(pages, true), (pages, false)]);
    graphs.flat_map(|((page_size, layout), graphs)| {
        let tree = (page_size == 1) == graphs;
        let drafts = Some(Drafting { tokens: if tree { 9 } else { 4 }, tree });
        let choice = if graphs { Choice::First } else { Choice::Gemm };
        let plain = Setting { page_size, layout, graphs, choice, drafts, ..Setting::default() };
        SCHEDULES.map(move |schedule| Setting { schedule, overlap: false, ..plain })
    })
}

/// Returns settings with sparse reads. Some read as many positions as streams have, with every schedule. The others
/// read fewer positions. They compute each prompt once, in parts of several tokens, so that the reference can select
/// the same positions.
fn sparse() -> impl Iterator<Item = Setting> {
    let pages = [(1, Layout::LayerFirst), (16, Layout::PageFirst)];
    let launched = [(true, true), (false, false), (true, false)];
    let settings = pages.into_iter().zip([(true, true), (false, false)]);
    let all = settings.flat_map(|((page_size, layout), (graphs, overlap))| {
        let plain = Setting { page_size, layout, graphs, overlap, ..Setting::default() };
        SCHEDULES.map(move |schedule| Setting { schedule, sparse: Some(ALL), ..plain })
    });
    let few = launched.into_iter().zip(pages.into_iter().cycle());
    all.chain(few.flat_map(|((graphs, overlap), (page_size, layout))| {
        let plain = Setting { page_size, layout, graphs, overlap, ..Setting::default() };
        [Schedule::AllAtOnce, Schedule::Forked].map(|schedule| Setting { schedule, sparse: Some(FEW), ..plain })
    }))
}

/// Returns settings with swap pages and a pool for the longest request only.
fn hosted() -> [Setting; 6] {
    let plain = Setting { schedule: Schedule::Preempting, swap_pages: true, ..Setting::default() };
    let small = Setting { page_size: 1, layout: Layout::LayerFirst, ..plain };
    [
        plain,
        Setting { graphs: false, ..plain },
        Setting { overlap: false, ..plain },
        Setting { fail_every: Some(FAIL_EVERY), ..plain },
        small,
        Setting { graphs: false, overlap: false, ..small },
    ]
}

/// Returns samplings that exclude no tokens, all but 20, and all but the likely ones of 50.
pub fn samplings() -> [Sampling; 3] {
    let warm = Sampling { temperature: 0.8, seed: 5, ..Sampling::default() };
    [warm, Sampling { top_k: 20, ..warm }, Sampling { top_k: 50, top_p: 0.7, ..warm }]
}
