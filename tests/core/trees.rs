//! Tests draft trees. Attention of a token in a tree must equal, bit by bit, its attention in a plan of its branch
//! alone. The same holds for the tokens after an accepted branch.

use kvarena::backend::Queries;
use kvarena::layout::{Layout, Scaling};
use kvarena::plan::{Branch, Draft, DraftTree};
use kvarena::testkit::rng::Rng;
use kvarena::{
    Attend, Backend, Capacity, Cpu, CpuOptions, Engine, EngineConfig, Extend, KvDtype, KvShape, LayerId, Namespace,
    PoolConfig, SeqKey, StepId, StepScratch, TokenId,
};

const LAYERS: u32 = 2;
const Q_HEADS: u32 = 6;

/// The result of attention for a token: the bits of its output rows in all layers, and of their log-sum-exp.
type Bits = Vec<u32>;

/// An engine whose K, V and queries depend only on token, position and layer.
struct Host {
    engine: Engine<Cpu>,
    scratch: StepScratch,
    attend: Attend,
    /// Number of elements in a row of k, of v, of q and of out.
    widths: [usize; 4],
}

impl Host {
    fn new(pool: PoolConfig) -> Self {
        let config = EngineConfig { max_sequences: 4, max_tokens: 4096, ..pool.into() };
        let engine = Engine::new(config, CpuOptions::with_threads(1)).expect("a sound config");
        let q_heads = Q_HEADS as usize;
        let (attend, widths) = match pool.shape {
            KvShape::Latent { rank, rope } => {
                let (row, rank) = ((rank + rope) as usize, rank as usize);
                (Attend::latent(Q_HEADS, 0.2), [row, 0, q_heads * row, q_heads * rank])
            }
            _ => {
                let (heads, dim) = (2, 16);
                let (kv, q) = (heads * dim, q_heads * dim);
                (Attend::new(Q_HEADS, dim as u32), [kv, kv, q, q])
            }
        };
        let attend = Attend { soft_cap: Some(20.0), ..attend };
        Self { engine, scratch: StepScratch::new(), attend, widths }
    }

    fn admit(&mut self, prompt: &[TokenId]) -> SeqKey {
        let seq = self.engine.admit(Namespace::default(), prompt, 0).expect("there is room");
        let (step, _) = self.compute(&[Extend { seq, len: prompt.len() as u32 }], &[]);
        self.engine.commit(step).expect("it is open");
        seq
    }

    /// Plans and computes a step; returns the result of each token.
    fn compute(&mut self, items: &[Extend], drafts: &[Draft<'_>]) -> (StepId, Vec<Bits>) {
        let plan = self.engine.plan_drafts(&mut self.scratch, items, drafts).expect("it fits");
        let mut bits = vec![Bits::new(); plan.token_count()];
        for layer in 0..LAYERS {
            let rows = |kind: usize| -> Vec<f32> {
                let tokens = plan.tokens.iter().zip(plan.positions);
                let row = |(token, position): (&TokenId, &u32)| {
                    let seed = [token.raw(), *position, layer, kind as u32];
                    let seed = seed.iter().fold(0, |seed, &part| seed * 1_009 + u64::from(part));
                    let mut rng = Rng::new(seed);
                    (0..self.widths[kind]).map(move |_| rng.below(4001) as f32 / 1000.0 - 2.0)
                };
                tokens.flat_map(row).collect()
            };
            let [k, v, q] = [0, 1, 2].map(rows);
            let (id, sinks) = (LayerId::new(layer), [0.5, -1.0, 2.0, f32::NEG_INFINITY, 0.0, 1.0]);
            let mut out = vec![0.0; plan.token_count() * self.widths[3]];
            let mut lse = vec![0.0; plan.token_count() * Q_HEADS as usize];
            let backend = self.engine.backend_mut();
            backend.store_cache(&plan, id, k[..].into(), v[..].into()).expect("a store");
            let queries = Queries { rows: q[..].into(), sinks: Some(&sinks[..]) };
            let (rows, sums) = (out[..].as_mut().into(), Some(&mut lse[..]));
            backend.attend_queries(&plan, id, &self.attend, queries, rows, sums).expect("attention");
            let sums = lse.chunks_exact(Q_HEADS as usize);
            for ((bits, out), lse) in bits.iter_mut().zip(out.chunks_exact(self.widths[3])).zip(sums) {
                bits.extend(out.iter().chain(lse).map(|x| x.to_bits()));
            }
        }
        (plan.step(), bits)
    }
}

/// Returns a tree of some tokens, and a branch of it from the root on.
fn tree(rng: &mut Rng) -> (Vec<u32>, Vec<u32>) {
    let len = rng.pick(&[2, 5, 9, 20, 64]);
    let parent = |token: u32| match rng.below(3) {
        0 => rng.below(u64::from(token) + 1) as u32,
        _ => token.saturating_sub(1 + rng.below(2) as u32),
    };
    let parents: Vec<u32> = (0..len).map(parent).collect();
    let mut branch = vec![rng.below(len.into()) as u32];
    while let Some(&last) = branch.last()
        && parents[last as usize] != last
    {
        branch.push(parents[last as usize]);
    }
    branch.reverse();
    (parents, branch)
}

fn check(pool: PoolConfig, seed: u64) {
    let mut rng = Rng::new(seed);
    let (mut tree_host, mut branch_host) = (Host::new(pool), Host::new(pool));
    let mut seqs = Vec::new();
    for i in 0..2 {
        let prompt: Vec<_> = (0..rng.pick(&[1, 3, 40, 90])).map(|n| TokenId::new(n + 7 * i)).collect();
        seqs.push([tree_host.admit(&prompt), branch_host.admit(&prompt)]);
    }
    for round in 0..4 {
        let what = || format!("{pool:?}, seed {seed}, round {round}");
        let drawn: Vec<_> = seqs.iter().map(|_| tree(&mut rng)).collect();
        let (mut trees, mut items, mut alone) = (Vec::new(), Vec::new(), Vec::new());
        for (&[seq, other], (parents, branch)) in seqs.iter().zip(&drawn) {
            let tokens: Vec<_> = parents.iter().map(|_| TokenId::new(rng.below(50) as u32)).collect();
            let mut tree = DraftTree::new();
            let start = tree_host.engine.planned_len(seq).expect("it is live");
            tree.set(start, parents).expect("parents precede children");
            trees.push(tree);
            tree_host.engine.append(seq, &tokens).expect("there is room");
            let kept: Vec<_> = branch.iter().map(|&token| tokens[token as usize]).collect();
            branch_host.engine.append(other, &kept).expect("there is room");
            items.push(Extend { seq, len: tokens.len() as u32 });
            alone.push(Extend { seq: other, len: kept.len() as u32 });
        }
        let drafts: Vec<_> = trees.iter().zip(&seqs).map(|(tree, &[seq, _])| tree.draft(seq)).collect();
        let (step, of_trees) = tree_host.compute(&items, &drafts);
        let (other, of_branches) = branch_host.compute(&alone, &[]);
        let starts = drawn.iter().scan(0, |start, (parents, _)| {
            *start += parents.len();
            Some(*start - parents.len())
        });
        let on_branches =
            starts.zip(&drawn).flat_map(|(start, (_, branch))| branch.iter().map(move |&token| start + token as usize));
        let kept: Vec<_> = on_branches.map(|row| &of_trees[row]).collect();
        assert!(kept.iter().copied().eq(&of_branches), "{}", what());

        // The next tokens read K and V of the accepted branch, which `accept_batch` has moved.
        let branches: Vec<_> =
            seqs.iter().zip(&drawn).map(|(&[seq, _], (_, branch))| Branch { seq, tokens: branch }).collect();
        tree_host.engine.accept_batch(step, &branches).expect("branches");
        for (host, step, which) in [(&mut tree_host, step, 0), (&mut branch_host, other, 1)] {
            host.engine.commit(step).expect("it is open");
            host.engine.complete(step).expect("it is committed");
            for seqs in &seqs {
                host.engine.append(seqs[which], &[TokenId::new(99)]).expect("there is room");
            }
        }
        let next = |which: usize, host: &mut Host| {
            let items: Vec<_> = seqs.iter().map(|seqs| Extend { seq: seqs[which], len: 1 }).collect();
            let (step, bits) = host.compute(&items, &[]);
            host.engine.commit(step).expect("it is open");
            bits
        };
        assert!(next(0, &mut tree_host) == next(1, &mut branch_host), "after the branch: {}", what());
        tree_host.engine.verify().expect("all invariants hold");
    }
}

#[test]
fn an_accepted_branch_has_the_bits_of_the_branch_alone() {
    let heads = KvShape::heads(2, 16);
    let latent = KvShape::Latent { rank: 16, rope: 8 };
    let dtypes = [
        (KvDtype::F32, Scaling::Static),
        (KvDtype::F16, Scaling::Static),
        (KvDtype::Bf16, Scaling::Static),
        (KvDtype::Fp8E4M3, Scaling::Static),
        (KvDtype::Fp8E4M3, Scaling::ByToken),
    ];
    let mut served = 0;
    for (shape, (dtype, scaling)) in [heads, latent].into_iter().flat_map(|shape| dtypes.map(|dtype| (shape, dtype))) {
        for (page_size, layout) in [(1, Layout::PageFirst), (3, Layout::LayerFirst), (16, Layout::PageFirst)] {
            let capacity = Capacity::Pages(1500_u32.div_ceil(page_size));
            let pool =
                PoolConfig { layers: LAYERS, shape, dtype, scaling, page_size, layout, capacity, ..Default::default() };
            // Latent rows have no static scales.
            if pool.layout().is_err() {
                assert!(shape == latent && scaling == Scaling::Static, "{pool:?}");
                continue;
            }
            served += 1;
            for seed in 0..6 {
                check(pool, seed);
            }
        }
    }
    assert_eq!(served, 3 * (5 + 4));
}
