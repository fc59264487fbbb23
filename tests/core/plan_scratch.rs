//! `EngineShape::plan_bytes` bounds the bytes of a plan, and a scratch of this size never grows.

use kvarena::{
    BatchPlan, Capacity, DraftTree, Engine, EngineConfig, EngineShape, Extend, Groups, KvShape, Namespace, Null,
    PoolConfig, Reach, SeqKey, StepScratch, TokenId,
};

fn engine(page_size: u32, pages: u32, max_sequences: u32, max_tokens: u64) -> Engine<Null> {
    let pool = PoolConfig { page_size, capacity: Capacity::Pages(pages), ..Default::default() };
    let config = EngineConfig {
        max_sequences,
        max_tokens,
        max_step_tokens: 1 << 20,
        prefault: false,
        ..EngineConfig::from(pool)
    };
    Engine::new(config, Null).expect("a valid config")
}

fn scratch(shape: &EngineShape, rows: u32, tokens: u32) -> StepScratch {
    StepScratch::with_capacity(shape.plan_bytes(rows, tokens) as usize)
}

/// Returns the bytes of a plan's rows, tokens, positions, 32-bit slots and table writes.
fn bytes(plan: &BatchPlan<'_>) -> u64 {
    (size_of_val(plan.rows) + 12 * plan.token_count() + size_of_val(plan.table_writes)) as u64
}

/// Plans in a scratch of the shape's size, which must not grow; returns the plan's bytes.
fn plan(engine: &mut Engine<Null>, items: &[Extend]) -> u64 {
    let tokens = items.iter().map(|item| item.len).sum();
    let mut scratch = scratch(engine.shape(), items.len() as u32, tokens);
    let held = scratch.bytes();
    let plan = engine.plan_batch(&mut scratch, items).expect("there is room");
    let (step, bytes) = (plan.step(), bytes(&plan));
    assert_eq!(scratch.bytes(), held, "the scratch has grown");
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    bytes
}

fn prompt(len: u32) -> Vec<TokenId> {
    (0..len).map(TokenId::new).collect()
}

#[test]
fn children_of_a_long_parent_fit_the_scratch() {
    const LEN: u32 = 20_000;
    const CHILDREN: u32 = 32;
    for page_size in [1, 4, 341, 1024] {
        let pages = (LEN + 2 * CHILDREN * page_size).div_ceil(page_size) + 100;
        let tokens = u64::from((CHILDREN + 1) * (LEN + 1024));
        let mut engine = engine(page_size, pages, CHILDREN + 1, tokens);
        let parent = engine.admit(Namespace::default(), &prompt(LEN), 0).expect("there is room");
        plan(&mut engine, &[Extend { seq: parent, len: LEN }]);
        let mut seqs: Vec<SeqKey> = vec![parent];
        let forked = engine.fork(parent, CHILDREN, 0).expect("there is room");
        seqs.extend_from_slice(forked.children);
        let newest = engine.newest_step();
        engine.complete(newest).expect("copies are done at once");
        let mut items = Vec::new();
        for seq in seqs {
            engine.append(seq, &[TokenId::new(7)]).expect("there is room");
            items.push(Extend { seq, len: 1 });
        }
        // In its first plan, each child sends a word for each shared leaf, and the words of its own pages.
        let first = plan(&mut engine, &items);
        let table = engine.shape().table;
        let leaves = LEN.div_ceil(page_size * table.leaf_pages);
        let words = u64::from(CHILDREN) * u64::from(leaves);
        let most = engine.shape().plan_bytes(CHILDREN + 1, CHILDREN + 1);
        assert!(8 * words <= first && first <= most, "{first} bytes of at most {most}");
        let own = u64::from(CHILDREN) * u64::from(table.leaf_pages + 8);
        assert!(first <= 2 * (8 * (words + own) + 4096), "{first} bytes for {words} shared leaves");
        items.iter().for_each(|item| {
            engine.append(item.seq, &[TokenId::new(8)]).expect("there is room");
        });
        let second = plan(&mut engine, &items);
        assert!(second <= 64 * u64::from(CHILDREN + 1), "the next plan takes {second} bytes");
    }
}

#[test]
fn a_batch_of_prefills_fits_the_scratch() {
    for (page_size, len, rows) in [(1, 3000, 4), (16, 3000, 4), (16, 1, 60), (1, 1, 60)] {
        let mut engine = engine(page_size, 13_000, 64, 40_000);
        let items: Vec<Extend> = (0..rows)
            .map(|i| {
                let prompt: Vec<_> = (0..len).map(|j| TokenId::new(i * len + j)).collect();
                let seq = engine.admit(Namespace::default(), &prompt, 0).expect("there is room");
                Extend { seq, len }
            })
            .collect();
        plan(&mut engine, &items);
    }
}

/// Every token has a slot in each track.
#[test]
fn prefills_of_many_tracks_fit_the_scratch() {
    let reaches = [Reach::All, Reach::Window(40), Reach::Window(100), Reach::Chunk(64)];
    let pool = PoolConfig {
        layers: 4,
        groups: Groups::new(&reaches, &[0, 1, 2, 3]).expect("four groups"),
        capacity: Capacity::Pages(4_000),
        ..Default::default()
    };
    let (rows, len) = (4, 3_000);
    let config = EngineConfig {
        max_sequences: rows,
        max_sequence_len: len,
        max_step_tokens: rows * len,
        prefault: false,
        ..pool.into()
    };
    let mut engine = Engine::new(config, Null).expect("a valid config");
    let items: Vec<_> = (0..rows)
        .map(|own| {
            let namespace = Namespace::new(own.into());
            let seq = engine.admit(namespace, &prompt(len), 0).expect("there is room");
            Extend { seq, len }
        })
        .collect();
    plan(&mut engine, &items);
}

/// A draft tree gives every token of the batch a mask.
#[test]
fn prefills_beside_a_draft_tree_fit_the_scratch() {
    let mut engine = engine(16, 13_000, 64, 40_000);
    let mut tree = DraftTree::new();
    tree.set(9, &[0, 0, 1]).expect("parents precede children");
    let seq = engine.admit(Namespace::default(), &prompt(9), 0).expect("there is room");
    plan(&mut engine, &[Extend { seq, len: 9 }]);
    engine.append(seq, &prompt(3)).expect("there is room");
    let mut items = vec![Extend { seq, len: 3 }];
    for own in 1..=4 {
        let len = 3_000;
        let seq = engine.admit(Namespace::new(own), &prompt(len), 0).expect("there is room");
        items.push(Extend { seq, len });
    }
    let mut scratch = scratch(engine.shape(), 5, 12_003);
    let held = scratch.bytes();
    let plan = engine.plan_drafts(&mut scratch, &items, &[tree.draft(seq)]).expect("room");
    assert_eq!(plan.masks.len(), 12_003);
    assert_eq!(scratch.bytes(), held, "the scratch has grown");
}

#[test]
fn any_numbers_have_a_size() {
    let largest = PoolConfig {
        page_size: 1,
        shape: KvShape::heads(1, 1),
        capacity: Capacity::Pages(u32::MAX - 1),
        ..Default::default()
    };
    for pool in [largest, PoolConfig { page_size: 1024, ..largest }, PoolConfig::default()] {
        let config = EngineConfig { max_sequence_len: u32::MAX, ..EngineConfig::from(pool) };
        let shape = config.shape().expect("a valid config");
        for rows in [0, 1, 256, u32::MAX] {
            for tokens in [0, 1, 1 << 20, u32::MAX] {
                assert!(shape.plan_bytes(rows, tokens) < 1 << 40);
            }
        }
    }
}

#[test]
fn plans_of_several_tracks_fit_the_scratch() {
    let groups = Groups::new(&[Reach::All, Reach::Window(40)], &[1, 0, 1]).expect("two groups");
    for page_size in [1, 4, 16, 341] {
        let pool = PoolConfig {
            layers: 3,
            groups,
            page_size,
            capacity: Capacity::Pages(9 * 1000 / page_size + 90),
            ..Default::default()
        };
        let config = EngineConfig { max_sequences: 8, max_tokens: 1 << 14, ..pool.into() };
        let mut engine = Engine::new(config, Null).expect("a valid config");
        let items: Vec<_> = (0..8)
            .map(|own| {
                let prompt = prompt(100 + 7 * own);
                let seq = engine.admit(Namespace::new(own.into()), &prompt, 0).expect("room");
                Extend { seq, len: 60 + own }
            })
            .collect();
        plan(&mut engine, &items);
        let left: Vec<_> = items
            .iter()
            .map(|&Extend { seq, .. }| Extend { seq, len: engine.extend_max(seq).expect("it is live") })
            .collect();
        plan(&mut engine, &left);
        for &Extend { seq, .. } in &items {
            engine.append(seq, &[TokenId::new(7)]).expect("there is room");
        }
        let decode: Vec<_> = items.iter().map(|item| Extend { len: 1, ..*item }).collect();
        plan(&mut engine, &decode);
        engine.verify().expect("all invariants hold");
    }
}
