//! A host over CPU backends whose K and V are a function of token, position and layer.
#![allow(dead_code, reason = "every test program uses a part")]

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use kvarena::backend::OpenBackend;
use kvarena::hash::{Hashing, NamespaceNames};
use kvarena::id::{LayerId, Namespace, PageId, SeqKey, TokenId};
use kvarena::layout::{Groups, PlaneName, Reach};
use kvarena::*;
use kvarena_tiers::check::Secret;
use kvarena_tiers::disk::{Disk, DiskOptions};
use kvarena_tiers::name::Fingerprint;
use kvarena_tiers::store::Store;
use kvarena_tiers::tier::{Find, RankMemory, StoreOptions, Tier, TierOptions};

pub const PAGE_SIZE: u32 = 4;
const WAIT: Duration = Duration::from_secs(60);

/// A config of a small model with 64 pages.
pub fn model(groups: Groups, record_pages: u32) -> EngineConfig {
    let capacity = Capacity::Pages(64);
    let layers = groups.layers().max(2);
    let shape = KvShape::heads(1, 8);
    let pool = PoolConfig {
        layers,
        groups,
        shape,
        page_size: PAGE_SIZE,
        capacity,
        swap_pages: 64,
        stage_pages: 16,
        ..PoolConfig::default()
    };
    EngineConfig { hashing: Some(Hashing::SglangSha256), max_tokens: 512, record_pages, ..pool.into() }
}

/// Models with one group, with records of several pages, with windows over several tracks, with a chunk of another
/// shape.
pub fn models() -> Vec<EngineConfig> {
    let groups = |reach, layers: &[u8]| Groups::new(&[Reach::All, reach], layers).expect("valid groups");
    let window = groups(Reach::Window(6), &[0, 1, 1, 1, 0, 1, 1]);
    let chunk = groups(Reach::Chunk(8), &[0, 1, 1]).with_shape(1, KvShape::heads(2, 8), None).expect("a valid shape");
    vec![model(Groups::ONE, 1), model(Groups::ONE, 4), model(window, 1), model(chunk, 1)]
}

pub fn text(numbers: std::ops::Range<u32>) -> Vec<TokenId> {
    numbers.map(TokenId::new).collect()
}

/// A backend with a pool on each rank.
pub trait Pools: RankMemory {
    /// Returns the pool of each rank, and the factor of its K and V.
    fn pools(&mut self) -> Vec<(&mut Cpu, f32)>;
}

impl Pools for Cpu {
    fn pools(&mut self) -> Vec<(&mut Cpu, f32)> {
        vec![(self, 1.0)]
    }
}

pub struct Host<B: Pools = Cpu> {
    pub engine: Engine<B>,
    pub tier: Tier<B>,
    scratch: StepScratch,
    woken: Receiver<()>,
}

/// Returns the value of an element of K; that of V is its negative.
fn value(token: TokenId, position: u32, layer: u32, element: usize) -> f32 {
    (token.raw() * 64 + position) as f32 + layer as f32 / 8.0 + element as f32 / 256.0
}

pub fn options(stores: Vec<StoreOptions>) -> TierOptions {
    TierOptions { deadline: WAIT, ..TierOptions::new(vec![Fingerprint([7; 32])], stores) }
}

/// A disk in a folder, whatever is free.
pub fn disk(folder: &Path) -> Arc<Disk> {
    let options = DiskOptions { free_percent: 0, ..DiskOptions::new(folder, 1 << 30) };
    Arc::new(Disk::open(options).expect("the folder is ours"))
}

/// Options of a store with this number of threads.
pub fn of(store: &Arc<impl Store>, threads: usize) -> StoreOptions {
    StoreOptions { threads, ..StoreOptions::new("store", store.clone()) }
}

impl Host {
    pub fn new(config: &EngineConfig, store: Arc<impl Store>, secret: Option<Secret>) -> Self {
        Self::with(config, TierOptions { secret, ..options(vec![of(&store, 2)]) })
    }

    /// A host of the model with one group.
    pub fn plain(store: &Arc<impl Store>) -> Self {
        Self::plain_with(options(vec![of(store, 2)]))
    }

    /// The same with these options.
    pub fn plain_with(options: TierOptions) -> Self {
        Self::with(&model(Groups::ONE, 1), options)
    }

    pub fn with(config: &EngineConfig, options: TierOptions) -> Self {
        Self::over(CpuOptions::with_threads(1), config, options)
    }
}

impl<B: Pools> Host<B> {
    pub fn over(backend: impl OpenBackend<Backend = B>, config: &EngineConfig, options: TierOptions) -> Self {
        let (sender, woken) = channel();
        let wake = Arc::new(move || sender.send(()).unwrap_or(()));
        let engine = Engine::new(*config, backend).expect("a valid config");
        let tier = Tier::new(TierOptions { wake, ..options }, &engine).expect("hashes of 32 bytes");
        Self { engine, tier, scratch: StepScratch::new(), woken }
    }

    pub fn turn(&mut self) {
        self.tier.turn(&mut self.engine, |_, _| ()).expect("no fault");
    }

    pub fn name(&mut self, namespace: Namespace, salt: &str) {
        let names = NamespaceNames { salt: Some(salt.to_owned()), ..NamespaceNames::default() };
        self.engine.name_namespace(namespace, names).expect("the name is free");
    }

    /// Searches the stores, and waits until the tier reports. Returns the pages by which the hit has grown.
    pub fn find(&mut self, namespace: Namespace, prompt: &[TokenId]) -> u32 {
        match self.tier.find(1, &self.engine, namespace, prompt) {
            Find::Ready => 0,
            Find::Waiting => self.reports(1)[0].1,
        }
    }

    /// Waits for reports, only as the tier wakes the host.
    pub fn reports(&mut self, count: usize) -> Vec<(u64, u32)> {
        let mut all = Vec::new();
        while all.len() < count {
            self.woken.recv_timeout(WAIT).expect("the tier wakes the host");
            self.tier.turn(&mut self.engine, |id, pages| all.push((id, pages))).expect("no fault");
            self.engine.verify().expect("all invariants hold");
        }
        all
    }

    /// Turns, as the tier wakes the host, until a condition holds.
    pub fn until(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        while !done(self) {
            self.woken.recv_timeout(WAIT).expect("the tier wakes the host");
            self.turn();
        }
    }

    /// Admits a prompt, computes what is not cached, and checks all K and V that the engine keeps. Returns the number
    /// of cached tokens.
    pub fn serve(&mut self, namespace: Namespace, prompt: &[TokenId]) -> u32 {
        let seq = self.engine.admit(namespace, prompt, 0).expect("there is room");
        let cached = self.engine.cached_len(seq).expect("it is live");
        loop {
            let len = self.engine.extend_max(seq).expect("it is live");
            if len == 0 {
                break;
            }
            self.compute(seq, len);
        }
        self.check(seq, prompt);
        self.engine.finish(seq).expect("it is live");
        self.engine.verify().expect("all invariants hold");
        cached
    }

    fn compute(&mut self, seq: SeqKey, len: u32) {
        let plan = self.engine.plan_batch(&mut self.scratch, &[Extend { seq, len }]).expect("there is room");
        let layout = self.engine.shape().layout;
        for layer in (0..layout.layers()).map(LayerId::new) {
            let width = layout.of_group(layout.place(layer).group).kv_heads() as usize * 8;
            let tokens = plan.tokens.iter().zip(plan.positions);
            let k: Vec<_> = tokens
                .flat_map(|(&token, &at)| (0..width).map(move |element| value(token, at, layer.raw(), element)))
                .collect();
            for (pool, factor) in self.engine.backend_mut().pools() {
                let [k, v] = [factor, -factor].map(|factor| k.iter().map(|x| factor * x).collect::<Vec<_>>());
                pool.store_cache(&plan, layer, k[..].into(), v[..].into()).expect("no fault");
            }
        }
        let step = plan.step();
        self.engine.commit(step).expect("it is open");
        self.engine.complete(step).expect("it is committed");
    }

    /// Compares all K and V of a sequence, in every track's pages.
    fn check(&mut self, seq: SeqKey, prompt: &[TokenId]) {
        let layout = self.engine.shape().layout;
        let width = prompt.len().div_ceil(PAGE_SIZE as usize);
        for layer in (0..layout.layers()).map(LayerId::new) {
            let place = layout.place(layer);
            let mut table = vec![0; width];
            self.engine.write_tables(&[seq], place.track, width, u32::MAX, &mut table).expect("it is live");
            for (at, &token) in (0..).zip(prompt) {
                let page = table[(at / PAGE_SIZE) as usize];
                if page == u32::MAX {
                    continue;
                }
                let slot = layout.slot(PageId::new(page), at % PAGE_SIZE);
                for (pool, factor) in self.engine.backend_mut().pools() {
                    for (plane, factor) in [(PlaneName::K, factor), (PlaneName::V, -factor)] {
                        let read = pool.read_slot(plane, layer, slot).expect("it is there");
                        let expected = (0..read.len()).map(|i| factor * value(token, at, layer.raw(), i));
                        assert_eq!(read, expected.collect::<Vec<_>>(), "layer {layer:?}, position {at}");
                    }
                }
            }
        }
    }

    /// Puts all records. Returns whether nothing is left.
    pub fn flush(&mut self) -> bool {
        let flushed = self.tier.flush(&mut self.engine, WAIT).expect("no fault");
        self.engine.verify().expect("all invariants hold");
        flushed
    }

    pub fn misses(&self) -> Vec<(kvarena_tiers::miss::Miss, u64)> {
        self.tier.misses().iter().collect()
    }
}
