//! Rules that both managers keep, each by name. Blocks have 4 tokens.

use super::manager::{BlockManager, NULL_BLOCK, RequestId, Scheduled, StepInputs};
use super::{engine_blocks, hash_blocks};

const SIZE: usize = 4;

/// Runs a test with each manager of `usable` blocks and the null block.
fn each(usable: usize, test: impl Fn(&mut dyn BlockManager)) {
    test(&mut hash_blocks(usable + 1, SIZE));
    let mut manager = engine_blocks(usable + 1, SIZE);
    test(&mut manager);
    manager.engine().verify().expect("all invariants hold");
}

fn text(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

fn ids(manager: &dyn BlockManager, id: RequestId) -> Vec<u32> {
    let mut ids = Vec::new();
    manager.get_block_ids(id, &mut ids);
    ids
}

/// Computes a request's tokens from `start` on in one step.
fn compute(manager: &mut dyn BlockManager, id: RequestId, tokens: &[u32], start: usize) -> StepInputs {
    let (mut inputs, batch) = (StepInputs::default(), [Scheduled { id, tokens, start, end: tokens.len() }]);
    manager.schedule(&batch, &mut inputs);
    manager.cache_blocks(&batch);
    inputs
}

/// Admits a request and computes its prompt. Returns the number of tokens that were cached.
fn run(manager: &mut dyn BlockManager, id: RequestId, prompt: &[u32]) -> usize {
    let hit = manager.get_computed_blocks(id, prompt);
    assert!(manager.allocate_slots(id, prompt, prompt.len()), "it fits");
    compute(manager, id, prompt, hit);
    hit
}

/// Runs a request and frees it.
fn pass(manager: &mut dyn BlockManager, id: RequestId, prompt: &[u32]) -> usize {
    let hit = run(manager, id, prompt);
    manager.free(id);
    hit
}

#[test]
fn a_request_gets_the_blocks_that_its_tokens_need() {
    each(15, |manager| {
        run(manager, 1, &text(0..10));
        assert_eq!(ids(manager, 1).len(), 3);
        assert_eq!(manager.num_free_blocks(), 12);
        assert!(manager.allocate_slots(1, &[], 12), "the third block has room");
        assert_eq!(manager.num_free_blocks(), 12);
        assert!(manager.allocate_slots(1, &[], 13));
        compute(manager, 1, &text(0..13), 10);
        assert_eq!(ids(manager, 1).len(), 4);
        assert_eq!(manager.num_free_blocks(), 11);
    });
}

#[test]
fn the_null_block_is_never_given_out() {
    each(6, |manager| {
        assert_eq!(manager.num_usable_blocks(), 6);
        for id in 0..20 {
            run(manager, id, &text(id as u32 * 100..id as u32 * 100 + 24));
            let mut blocks = ids(manager, id);
            blocks.sort_unstable();
            assert_eq!(blocks, text(NULL_BLOCK + 1..7), "a request of the pool's size has all other blocks");
            manager.free(id);
        }
    });
}

#[test]
fn an_allocation_is_all_or_nothing() {
    each(3, |manager| {
        run(manager, 1, &text(0..8));
        let before = ids(manager, 1);
        assert!(!manager.allocate_slots(2, &text(100..105), 5), "two blocks of one");
        assert!(!manager.allocate_slots(1, &[], 13), "more than the pool");
        assert_eq!(manager.num_free_blocks(), 1);
        assert_eq!(ids(manager, 1), before);
        assert!(manager.allocate_slots(2, &text(100..104), 4), "the refused id is free");
        assert!(!manager.allocate_slots(1, &[], 9), "the last block is taken, though not yet written");
        assert_eq!(manager.num_free_blocks(), 0);
    });
}

#[test]
fn a_hit_that_no_request_uses_counts_as_taken() {
    each(3, |manager| {
        pass(manager, 1, &text(0..8));
        assert_eq!(manager.num_free_blocks(), 3);
        let longer = [text(0..8), text(50..58)].concat();
        assert!(!manager.allocate_slots(2, &longer, 16), "two hits and two new blocks, of three");
        assert_eq!(manager.get_computed_blocks(2, &longer), 8, "nothing is evicted");
        assert!(manager.allocate_slots(3, &longer[..12], 12));
        assert_eq!(manager.num_free_blocks(), 0);
    });
}

#[test]
fn a_full_block_is_shared_a_partial_one_is_not() {
    each(15, |manager| {
        run(manager, 1, &text(0..10));
        assert_eq!(run(manager, 2, &text(0..10)), 8);
        let (first, second) = (ids(manager, 1), ids(manager, 2));
        assert_eq!(first[..2], second[..2]);
        assert_ne!(first[2], second[2]);
        assert_eq!(manager.num_free_blocks(), 11, "four blocks for both");
    });
}

#[test]
fn the_last_token_is_computed() {
    each(15, |manager| {
        pass(manager, 1, &text(0..8));
        assert_eq!(manager.get_computed_blocks(2, &text(0..8)), 4, "its query samples the next token");
        assert_eq!(manager.get_computed_blocks(3, &text(0..9)), 8);
        assert_eq!(manager.get_computed_blocks(4, &text(0..4)), 0);
    });
}

#[test]
fn only_computed_blocks_hit() {
    each(15, |manager| {
        let prompt = text(0..16);
        assert!(manager.allocate_slots(1, &prompt, 16));
        assert_eq!(manager.get_computed_blocks(2, &text(0..20)), 0, "allocated");
        let (mut inputs, chunk) = (StepInputs::default(), [Scheduled { id: 1, tokens: &prompt, start: 0, end: 10 }]);
        manager.schedule(&chunk, &mut inputs);
        assert_eq!(manager.get_computed_blocks(2, &text(0..20)), 0, "scheduled");
        manager.cache_blocks(&chunk);
        assert_eq!(manager.get_computed_blocks(2, &text(0..20)), 8, "whole blocks of a chunk");
        compute(manager, 1, &prompt, 10);
        assert_eq!(manager.get_computed_blocks(2, &text(0..20)), 16);
    });
}

#[test]
fn a_block_hits_only_after_the_same_tokens() {
    each(15, |manager| {
        pass(manager, 1, &text(0..9));
        let other = [text(90..94), text(4..9)].concat();
        assert_eq!(manager.get_computed_blocks(2, &other), 0);
        assert_eq!(manager.get_computed_blocks(3, &[text(0..7), vec![99; 4]].concat()), 4);
    });
}

#[test]
fn generated_tokens_are_cached_too() {
    each(15, |manager| {
        run(manager, 1, &text(0..6));
        for len in 7..=12 {
            assert!(manager.allocate_slots(1, &[], len as usize));
            compute(manager, 1, &text(0..len), len as usize - 1);
        }
        manager.free(1);
        assert_eq!(manager.get_computed_blocks(2, &text(0..13)), 12);
    });
}

#[test]
fn free_blocks_can_be_taken_and_hit_until_then() {
    each(3, |manager| {
        pass(manager, 1, &text(0..12));
        assert_eq!(manager.num_free_blocks(), 3);
        assert_eq!(manager.get_computed_blocks(2, &text(0..13)), 12);
        pass(manager, 3, &text(50..62));
        assert_eq!(manager.get_computed_blocks(4, &text(0..13)), 0);
        assert_eq!(manager.get_computed_blocks(5, &text(50..63)), 12);
    });
}

#[test]
fn a_shared_block_is_free_after_its_last_user() {
    each(4, |manager| {
        run(manager, 1, &text(0..8));
        run(manager, 2, &text(0..9));
        manager.free(1);
        assert_eq!(manager.num_free_blocks(), 1);
        assert!(!manager.allocate_slots(3, &text(50..58), 8), "the blocks of a running request stay");
        manager.free(2);
        assert_eq!(manager.num_free_blocks(), 4);
    });
}

#[test]
fn the_least_recently_freed_blocks_go_first_tails_before_prefixes() {
    each(6, |manager| {
        pass(manager, 1, &text(0..12));
        pass(manager, 2, &text(20..32));
        pass(manager, 3, &text(40..44));
        assert_eq!(manager.get_computed_blocks(4, &text(0..13)), 8, "the tail of the oldest");
        pass(manager, 5, &text(50..54));
        assert_eq!(manager.get_computed_blocks(6, &text(0..13)), 4);
        assert_eq!(manager.get_computed_blocks(7, &text(20..33)), 12);
    });
}

#[test]
fn a_use_makes_a_prefix_young() {
    each(6, |manager| {
        pass(manager, 1, &text(0..8));
        pass(manager, 2, &text(20..28));
        assert_eq!(pass(manager, 3, &text(0..12)), 8);
        assert_eq!(manager.get_computed_blocks(4, &text(20..29)), 8, "a look-up changes no order");
        pass(manager, 5, &[text(40..44), text(60..67)].concat());
        assert_eq!(manager.get_computed_blocks(6, &text(0..13)), 12);
        assert_eq!(manager.get_computed_blocks(7, &text(20..29)), 0);
    });
}

#[test]
fn a_freed_request_comes_back_under_its_id() {
    each(6, |manager| {
        run(manager, 1, &text(0..10));
        manager.free(1);
        assert_eq!(run(manager, 1, &text(0..13)), 8);
        assert_eq!(ids(manager, 1).len(), 4);
    });
}

#[test]
fn a_trim_returns_the_blocks_behind() {
    each(7, |manager| {
        run(manager, 1, &text(0..6));
        let drafts = text(0..15);
        assert!(manager.allocate_slots(1, &[], 15));
        let mut inputs = StepInputs::default();
        manager.schedule(&[Scheduled { id: 1, tokens: &drafts, start: 6, end: 15 }], &mut inputs);
        assert_eq!(inputs.slots.len(), 9);
        let before = ids(manager, 1);
        manager.trim(1, 7);
        assert_eq!(ids(manager, 1), before[..2]);
        manager.cache_blocks(&[Scheduled { id: 1, tokens: &drafts[..7], start: 6, end: 7 }]);
        assert_eq!(manager.num_free_blocks(), 5);
        assert_eq!(manager.get_computed_blocks(2, &text(0..15)), 4, "rejected drafts are not cached");
        let continued = [text(0..7), vec![70; 2]].concat();
        assert!(manager.allocate_slots(1, &[], 9));
        compute(manager, 1, &continued, 7);
        assert_eq!(manager.get_computed_blocks(3, &continued), 8);
    });
}

#[test]
fn a_trim_returns_blocks_that_no_step_wrote() {
    each(7, |manager| {
        run(manager, 1, &text(0..6));
        assert!(manager.allocate_slots(1, &[], 20));
        assert_eq!(manager.num_free_blocks(), 2);
        manager.trim(1, 7);
        assert_eq!(manager.num_free_blocks(), 5);
        assert_eq!(ids(manager, 1).len(), 2);
    });
}

#[test]
fn a_trimmed_prompt_continues_with_other_tokens() {
    each(7, |manager| {
        run(manager, 1, &text(0..12));
        assert!(manager.allocate_slots(2, &text(50..60), 10));
        let (mut inputs, prompt) = (StepInputs::default(), text(50..60));
        let chunk = [Scheduled { id: 2, tokens: &prompt, start: 0, end: 5 }];
        manager.schedule(&chunk, &mut inputs);
        manager.cache_blocks(&chunk);
        manager.trim(2, 5);
        assert_eq!(manager.num_free_blocks(), 2);
        let other = [text(50..55), text(90..94)].concat();
        assert!(manager.allocate_slots(2, &[], 9));
        compute(manager, 2, &other, 5);
        assert_eq!(manager.get_computed_blocks(3, &other), 8);
        assert_eq!(manager.get_computed_blocks(4, &text(50..60)), 4);
    });
}

#[test]
fn slots_and_tables_name_the_blocks() {
    each(15, |manager| {
        pass(manager, 1, &text(0..8));
        let (first, second) = (text(0..11), text(20..25));
        assert!(manager.allocate_slots(2, &first, 11) && manager.allocate_slots(3, &second, 5));
        let batch = [
            Scheduled { id: 3, tokens: &second, start: 0, end: 5 },
            Scheduled { id: 2, tokens: &first, start: 8, end: 11 },
        ];
        let mut inputs = StepInputs { slots: vec![7], copies: vec![[1, 2]] };
        manager.schedule(&batch, &mut inputs);
        let (two, three) = (ids(manager, 2), ids(manager, 3));
        let slot = |ids: &[u32], at: usize| i64::from(ids[at / SIZE]) * SIZE as i64 + (at % SIZE) as i64;
        let slots: Vec<i64> = (0..5).map(|at| slot(&three, at)).chain((8..11).map(|at| slot(&two, at))).collect();
        assert_eq!(inputs.slots, slots);
        assert!(inputs.copies.is_empty());
        let mut tables = vec![99; 2 * 5];
        manager.write_block_tables(5, &mut tables);
        let mut expected = vec![NULL_BLOCK; 2 * 5];
        expected[..2].copy_from_slice(&three);
        expected[5..8].copy_from_slice(&two);
        assert_eq!(tables, expected);
        manager.cache_blocks(&batch);
    });
}

#[test]
fn a_fork_shares_whole_blocks_and_copies_a_partial_one() {
    each(5, |manager| {
        run(manager, 1, &text(0..10));
        assert!(manager.fork(1, 2));
        assert_eq!(manager.num_free_blocks(), 1);
        assert!(manager.allocate_slots(2, &[], 11));
        let inputs = compute(manager, 2, &[text(0..10), vec![70]].concat(), 10);
        let (parent, child) = (ids(manager, 1), ids(manager, 2));
        assert_eq!(parent[..2], child[..2]);
        assert_eq!(inputs.copies, [[parent[2], child[2]]]);
        assert_eq!(inputs.slots, [i64::from(child[2]) * 4 + 2]);
        assert!(manager.fork(1, 3));
        assert!(!manager.fork(1, 4), "no block is free for the copy");
        manager.free(1);
        assert_eq!(manager.num_free_blocks(), 1, "the children keep the whole blocks");
        assert_eq!(compute(manager, 3, &text(0..11), 10).copies[0][0], parent[2]);
    });
}

#[test]
fn a_fork_at_the_end_of_a_block_copies_nothing() {
    each(3, |manager| {
        run(manager, 1, &text(0..8));
        assert!(manager.fork(1, 2));
        assert_eq!(manager.num_free_blocks(), 1);
        assert!(manager.allocate_slots(2, &[], 9));
        assert_eq!(compute(manager, 2, &text(0..9), 8).copies, [[0; 2]; 0]);
    });
}

#[test]
fn the_cache_is_reset_only_while_idle() {
    each(7, |manager| {
        run(manager, 1, &text(0..8));
        assert!(!manager.reset_prefix_cache());
        assert_eq!(manager.get_computed_blocks(2, &text(0..9)), 8);
        manager.free(1);
        assert!(manager.reset_prefix_cache());
        assert_eq!(manager.get_computed_blocks(3, &text(0..9)), 0);
        assert_eq!(manager.num_free_blocks(), 7);
        assert_eq!(pass(manager, 4, &text(0..9)), 0);
        assert_eq!(pass(manager, 5, &text(0..9)), 8);
    });
}
