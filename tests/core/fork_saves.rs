//! A fork first evicts pages for its copies, then publishes pages that the same call may have evicted.

use std::collections::BTreeSet;

use kvarena::backend::OpenBackend;
use kvarena::event::{Event, Medium, Stored};
use kvarena::hash::{Hashing, NamespaceNames, PageHash};
use kvarena::layout::{Groups, PlaneName, Reach};
use kvarena::testkit::faults::{Failing, Fault};
use kvarena::testkit::replay::Inspect;
use kvarena::*;

const PAGE_SIZE: u32 = 2;

fn config(pages: u32, swap_pages: u32, groups: Groups) -> EngineConfig {
    let pool = PoolConfig {
        layers: 2,
        groups,
        shape: KvShape::heads(1, 1),
        dtype: KvDtype::F32,
        page_size: PAGE_SIZE,
        capacity: Capacity::Pages(pages),
        swap_pages,
        ..PoolConfig::default()
    };
    let hashing = Hashing::ALL.first().copied();
    EngineConfig { hashing, event_pages: 64, max_tokens: 256, ..pool.into() }
}

fn tokens(text: &[u32]) -> Vec<TokenId> {
    text.iter().copied().map(TokenId::new).collect()
}

/// An engine, and a host that stores the number of each token as its K and V.
struct Host<B: Backend> {
    engine: Engine<B>,
    scratch: StepScratch,
    live: Vec<SeqKey>,
    /// The pages that events report, each with its medium.
    reported: BTreeSet<(PageHash, bool)>,
}

impl<B: Inspect> Host<B> {
    fn new(config: EngineConfig, options: impl OpenBackend<Backend = B>) -> Self {
        let engine = Engine::new(config, options).expect("a valid config");
        let (scratch, live, reported) = (StepScratch::new(), Vec::new(), BTreeSet::new());
        Self { engine, scratch, live, reported }
    }

    fn admit(&mut self, text: &[u32]) -> SeqKey {
        let seq = self.engine.admit(Namespace::default(), &tokens(text), 0);
        self.live.push(seq.expect("there is room"));
        self.live[self.live.len() - 1]
    }

    /// Plans the next tokens of a sequence, stores their K and V, and commits the step.
    fn commit(&mut self, seq: SeqKey, next: &[u32]) {
        let item = Extend { seq, len: next.len() as u32 };
        let plan = self.engine.plan_batch(&mut self.scratch, &[item]).expect("there is room");
        let rows: Vec<f32> = next.iter().map(|&token| token as f32).collect();
        for layer in (0..2).map(LayerId::new) {
            let stored = self.engine.backend_mut().store(&plan, layer, &rows, &rows);
            stored.expect("a valid plan");
        }
        self.engine.commit(plan.step()).expect("it is open");
        self.verify();
    }

    fn compute(&mut self, seq: SeqKey, next: &[u32]) {
        self.commit(seq, next);
        self.complete();
    }

    fn complete(&mut self) {
        self.engine.complete(self.engine.newest_step()).expect("it is committed");
        self.verify();
    }

    /// Computes the tokens of a prompt that are not cached.
    fn start(&mut self, prompt: &[u32]) -> SeqKey {
        let seq = self.admit(prompt);
        let cached = self.engine.cached_len(seq).expect("it is live");
        self.compute(seq, &prompt[cached as usize..]);
        seq
    }

    fn finish(&mut self) {
        for seq in std::mem::take(&mut self.live) {
            self.engine.finish(seq).expect("it is live");
            self.verify();
        }
    }

    /// Forks a sequence for two children. Returns whether the backend made the copies.
    fn fork(&mut self, seq: SeqKey) -> bool {
        let forked = self.engine.fork(seq, 2, 0).map(|forked| forked.children.to_vec());
        assert!(!matches!(forked, Err(EngineError::Core(_))), "there are idle pages");
        self.live.extend(forked.iter().flatten());
        // A fork whose copies fail also begins a step.
        self.complete();
        forked.is_ok()
    }

    /// Checks the invariants, and that events report each page as it is.
    fn verify(&mut self) {
        self.engine.verify().expect("all invariants hold");
        let reported = &mut self.reported;
        self.engine.drain_events(|event| match event {
            Event::Stored(Stored { medium, hashes, .. }) => {
                reported.extend(hashes.iter().map(|page| (page, medium == Medium::Swap)));
            }
            Event::Removed { medium, hashes, .. } => hashes.iter().for_each(|page| {
                assert!(reported.remove(&(page, medium == Medium::Swap)), "it was stored");
            }),
            _ => reported.clear(),
        });
    }

    /// Fills a pool of five pages. Returns a sequence whose second page repeats an idle page. A fork for two children
    /// then evicts the oldest idle page and this one.
    fn before_fork(&mut self) -> SeqKey {
        self.start(&[50, 60, 70]);
        self.finish();
        self.start(&[1, 2, 3, 4, 5]);
        self.finish();
        let seq = self.admit(&[1, 2, 3]);
        assert_eq!(self.engine.cached_len(seq), Ok(2));
        (3..6).for_each(|token| self.commit(seq, &[token]));
        self.complete();
        self.engine.append(seq, &tokens(&[4, 5])).expect("there is room");
        seq
    }

    /// Checks the K of a prompt's hits. Returns their number.
    fn check_hits(&mut self, prompt: &[u32]) -> u32 {
        let seq = self.admit(prompt);
        let cached = self.engine.cached_len(seq).expect("it is live");
        self.compute(seq, &prompt[cached as usize..]);
        let pages: Vec<PageId> = self.engine.page_table(seq).expect("it is live").collect();
        let (layout, layer) = (self.engine.shape().layout, LayerId::new(0));
        for at in 0..cached {
            let slot = layout.slot(pages[(at / PAGE_SIZE) as usize], at % PAGE_SIZE);
            let k = self.engine.backend().load(PlaneName::K, layer, slot);
            assert_eq!(k, Some(vec![prompt[at as usize] as f32]), "token {at} of {prompt:?}");
        }
        self.finish();
        cached
    }
}

#[test]
fn pages_that_a_fork_evicts_keep_their_bytes() {
    let mut host = Host::new(config(5, 8, Groups::ONE), CpuOptions::with_threads(1));
    let seq = host.before_fork();
    assert!(host.fork(seq));
    assert_eq!(host.engine.stats().failed_saves, 0);
    host.finish();
    assert_eq!(host.check_hits(&[50, 60, 71]), 2);
    assert_eq!(host.check_hits(&[1, 2, 3, 4, 9]), 4);
}

/// The page that the fork restores is on the device, and the other evicted page in swap memory.
#[test]
fn events_report_the_medium_of_each_page() {
    let mut host = Host::new(config(5, 8, Groups::ONE), Null);
    let seq = host.before_fork();
    assert!(host.fork(seq));
    let hashing = host.engine.shape().hashing.expect("pages have hashes");
    let pages = |text: &[u32]| hashing.chain(&NamespaceNames::default(), &tokens(text), PAGE_SIZE).into_iter();
    let on_device = pages(&[1, 2, 3, 4]).map(|page| (page, false));
    let in_memory = pages(&[50, 60]).map(|page| (page, true));
    assert_eq!(host.reported, on_device.chain(in_memory).collect());
}

/// The second eviction takes the swap page of the first one, whose save is cancelled.
#[test]
fn a_fork_drops_a_page_for_another() {
    let mut host = Host::new(config(5, 1, Groups::ONE), CpuOptions::with_threads(1));
    let seq = host.before_fork();
    assert!(host.fork(seq));
    host.finish();
    assert_eq!(host.check_hits(&[50, 60, 71]), 0);
    assert_eq!(host.check_hits(&[1, 2, 3, 4, 9]), 4);
}

/// A page matches only if its save did not fail, for each call of the fork that fails.
#[test]
fn a_page_whose_save_fails_in_a_fork_does_not_match() {
    let open = |fault, n| {
        let backend = Failing::at(CpuOptions::with_threads(1), fault, n);
        let mut host = Host::new(config(5, 8, Groups::ONE), backend);
        let seq = host.before_fork();
        (host, seq)
    };
    let first = open(Fault::Before, u64::MAX).0.engine.backend().calls();
    for fault in [Fault::Before, Fault::After] {
        let failed = [0, 1].map(|n| {
            let (mut host, seq) = open(fault, first + n);
            let copied = host.fork(seq);
            host.finish();
            let hits = [host.check_hits(&[50, 60, 71]), host.check_hits(&[1, 2, 3, 4, 9])];
            (host.engine.stats().failed_saves, copied, hits)
        });
        assert_eq!(failed, [(2, true, [0, 4]), (0, false, [2, 4])]);
    }
}

/// One of two equal requests ends, the other forks. The fork evicts old pages, and cells that it then restores. No page
/// is lost while swap pages are free.
#[test]
fn a_fork_loses_no_cells() {
    let groups = Groups::new(&[Reach::All, Reach::Window(4)], &[0, 1]).expect("two groups");
    let mut saved = 0;
    for (len, old) in (5_u32..14).step_by(2).flat_map(|len| (0..5).map(move |old| (len, old))) {
        let pages = 4 * len.div_ceil(PAGE_SIZE) + 2 * old;
        let mut host = Host::new(config(pages, 50, groups), CpuOptions::with_threads(1));
        (0..old).for_each(|i| _ = host.start(&[100 + i, 0]));
        host.finish();
        let text: Vec<u32> = (0..len).collect();
        let seqs = [host.start(&text[..1]), host.start(&text[..1])];
        for at in 1..len {
            for seq in seqs {
                host.engine.append(seq, &tokens(&[at])).expect("there is room");
                host.compute(seq, &[at]);
            }
        }
        host.engine.finish(host.live.remove(0)).expect("it is live");
        let free = host.engine.stats().free_pages;
        (0..free / 2).for_each(|i| _ = host.start(&[200 + i, 0]));
        if host.engine.available() >= 4 {
            let before = host.engine.stats().saved_pages;
            host.fork(seqs[1]);
            let stats = host.engine.stats();
            assert_eq!((stats.failed_saves, stats.lost_pages), (0, 0), "{len} tokens, {pages}");
            saved += stats.saved_pages - before;
            host.finish();
        }
    }
    assert!(saved > 20, "forks saved {saved} pages");
}
