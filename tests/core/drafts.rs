//! Trees of drafts, and the counters of drafts. `replay.rs` compares plans and branches of drafts with the model, valid
//! and invalid ones. `trees.rs` tests attention within a tree.

use kvarena::layout::Groups;
use kvarena::plan::{Draft, DraftTree};
use kvarena::{EngineConfig, Error, Extend};

use super::host::{Host, pool, text};

#[test]
fn a_refused_tree_is_unchanged() {
    let mut tree = DraftTree::new();
    tree.set(5, &[0, 0, 1]).expect("parents precede children");
    let before = (tree.masks().to_vec(), tree.positions().to_vec());
    for (parents, error) in [
        (&[1, 0][..], Error::DraftParent { token: 0, parent: 1 }),
        (&[0, 0, 7], Error::DraftParent { token: 2, parent: 7 }),
        (&[0; 65], Error::DraftLen { len: 65, max: 64 }),
    ] {
        assert_eq!(tree.set(9, parents), Err(error));
        assert_eq!((tree.masks().to_vec(), tree.positions().to_vec()), before);
    }
}

/// A drafter that is right once in three times: 30 verifications of 3 guesses after the sampled token.
#[test]
fn guesses_are_counted_and_shown() {
    let mut host = Host::null(EngineConfig { max_tokens: 1024, ..pool(4, 64, Groups::ONE).into() });
    let seq = host.prefill(&text(0..5));
    host.append(seq, &text(50..51)).expect("room for tokens");
    for turn in 0..30 {
        host.append(seq, &text(7..10)).expect("room for tokens");
        let plan = host.engine.plan_drafts(&mut host.scratch, &[Extend { seq, len: 4 }], &[Draft::chain(seq)]);
        let step = plan.expect("there is room").step();
        host.accept(step, seq, &[0, 1][..1 + usize::from(turn % 3 == 0)]).expect("it is a branch");
        host.close(step);
        host.append(seq, &text(50..51)).expect("room for tokens");
    }
    let stats = host.stats();
    assert_eq!((stats.drafts, stats.draft_tokens, stats.accepted_tokens), (30, 90, 10));
    assert!(stats.to_string().contains(", 10 of 90 draft tokens accepted in 30 drafts\n"), "{stats}");
    let text = stats.prometheus().to_string();
    for line in ["drafts_total 30", "draft_tokens_total 90", "accepted_tokens_total 10"] {
        assert!(text.contains(&format!("\nkvarena_{line}\n")), "{line} is not in:\n{text}");
    }
    let since = stats - stats;
    assert_eq!((since.drafts, since.draft_tokens, since.accepted_tokens), (0, 0, 0));
}
