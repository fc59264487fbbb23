//! Forks share leaves of the page table: a child's first plan sends few words, and all that the backend lacks.

use kvarena::layout::Groups;
use kvarena::{Cpu, CpuOptions, EngineConfig, Extend, KvShape, PageId, PoolConfig, TokenId};

use super::host::{Host, pool, text};

fn config(page_size: u32, pages: u32) -> EngineConfig {
    let pool = PoolConfig { shape: KvShape::heads(1, 1), ..pool(page_size, pages, Groups::ONE) };
    EngineConfig { max_sequences: 80, max_tokens: 8 << 20, max_step_tokens: 1 << 20, ..pool.into() }
}

#[test]
fn a_long_parent_costs_one_word_for_each_leaf() {
    let mut host = Host::null(config(1, 110_000));
    let parent = host.prefill(&text(0..100_000));
    for i in 0..64 {
        let child = host.fork(parent, 1, 0).expect("room").children[0];
        host.append(child, &[TokenId::new(i)]).expect("room");
        let plan = host.engine.plan_batch(&mut host.scratch, &[Extend { seq: child, len: 1 }]).expect("room");
        // One word for each of 97 shared leaves of 1,024 pages. One for the child's own leaf, one for each of its 672
        // pages, and one for the new page.
        assert_eq!(plan.table_writes.len(), 97 + 1 + 672 + 1);
        host.engine.commit(plan.step()).expect("it is open");
        host.complete_all();
    }
}

#[test]
fn grandchildren_share_what_their_parents_inherited() {
    let mut host = Host::null(config(2, 4000));
    let parent = host.prefill(&text(0..4099));
    let child = host.fork(parent, 1, 0).expect("room").children[0];
    let grandchild = host.fork(child, 1, 0).expect("room").children[0];
    [parent, child].iter().for_each(|&seq| host.finish(seq).expect("it is live"));
    host.append(grandchild, &text(0..1)).expect("room");
    let plan = host.engine.plan_batch(&mut host.scratch, &[Extend { seq: grandchild, len: 1 }]).expect("room");
    assert_eq!(plan.table_writes.len(), 4 + 1 + 2, "one of 5 leaves has the copied tail");
    host.check();
}

/// Children share the computed pages, and a token of an open step is not computed.
#[test]
fn children_compute_the_tokens_of_open_steps_again() {
    let mut host = Host::null(config(4, 20));
    let parent = host.begin(&text(0..9));
    let step = host.plan(parent, 9);
    let early = host.fork(parent, 1, 0).expect("room").children[0];
    assert_eq!((host.cached_len(early), host.extend_max(early)), (Ok(0), Ok(9)));
    host.engine.commit(step).expect("it is open");
    let late = host.fork(parent, 1, 0).expect("room").children[0];
    assert_eq!((host.cached_len(late), host.planned_len(late)), (Ok(9), Ok(9)));
    host.check();
}

/// The words of a shared leaf were in a plan that is aborted after the fork, so the child sends them itself.
#[test]
fn words_of_an_aborted_plan_are_sent_again() {
    let mut host: Host<Cpu> = Host::new(config(1, 8000), CpuOptions::with_threads(1));
    // The second sequence publishes pages that the first has published meanwhile, so its page table is rewritten.
    let pair = [(); 2].map(|()| host.begin(&text(0..3000)));
    let step = host.plan_all(&pair.map(|seq| Extend { seq, len: 2999 }));
    host.commit(step).expect("it is open");
    let rewritten = host.plan(pair[1], 1);
    let child = host.fork(pair[1], 1, 0).expect("room").children[0];
    host.abort(rewritten).expect("it is open");
    let plan = host.engine.plan_batch(&mut host.scratch, &[Extend { seq: child, len: 1 }]).expect("room");
    assert!(plan.table_writes.len() > 2999, "the backend may lack the parent's words");
    let (row, table) = (plan.rows[0].row, host.engine.shape().table);
    let mirrored = |(index, page): (u32, PageId)| table.page(host.engine.backend().table_words(), row, index) == page;
    assert!((0..).zip(host.engine.page_table(child).expect("it is live")).all(mirrored));
    host.check();
}
