//! Drafts through the public API: each error leaves the state unchanged, and the counters are right. `replay.rs`
//! compares random programs of drafts with the model. `trees.rs` tests attention within a tree.

use kvarena::{
    Branch, Capacity, Draft, DraftTree, Engine, EngineConfig, EngineError, Error, Extend, Keep, Namespace, Null,
    PoolConfig, SeqKey, StepId, StepScratch, TokenId,
};

/// An engine with sequences of some known tokens, of which the first `COMPUTED` are computed.
struct Host {
    engine: Engine<Null>,
    scratch: StepScratch,
    seqs: Vec<SeqKey>,
}

const COMPUTED: u32 = 5;

impl Host {
    /// Creates a sequence for each number of `known` tokens beyond the computed ones.
    fn new(known: &[u32]) -> Self {
        let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(64), ..Default::default() };
        let config = EngineConfig { max_tokens: 1024, max_steps: 4, ..pool.into() };
        let mut engine = Engine::new(config, Null).expect("a valid config");
        let mut scratch = StepScratch::new();
        let mut items = Vec::new();
        for i in 0..known.len() as u32 {
            let prompt: Vec<_> = (0..COMPUTED).map(|n| TokenId::new(100 * i + n)).collect();
            let seq = engine.admit(Namespace::default(), &prompt, 0).expect("there is room");
            items.push(Extend { seq, len: COMPUTED });
        }
        let step = engine.plan_batch(&mut scratch, &items).expect("there is room").step();
        for (item, &more) in items.iter().zip(known) {
            let more: Vec<_> = (0..more).map(|n| TokenId::new(50 + n)).collect();
            engine.append(item.seq, &more).expect("there is room");
        }
        engine.commit(step).expect("it is open");
        engine.complete(step).expect("it is committed");
        Self { engine, scratch, seqs: items.iter().map(|item| item.seq).collect() }
    }

    /// Plans sequences with these numbers of new tokens.
    fn plan(&mut self, items: &[(usize, u32)], drafts: &[Draft<'_>]) -> Result<StepId, Error> {
        let items: Vec<_> = items.iter().map(|&(i, len)| Extend { seq: self.seqs[i], len }).collect();
        let planned = self.engine.plan_drafts(&mut self.scratch, &items, drafts);
        planned.map(|plan| plan.step()).map_err(core)
    }

    /// Returns the visible state, except the count of calls that were rejected for lack of room.
    fn state(&self) -> impl PartialEq + std::fmt::Debug + use<> {
        let of = |&seq: &SeqKey| {
            let engine = &self.engine;
            let tokens = engine.tokens(seq).map(|tokens| tokens.collect::<Vec<_>>());
            let table = engine.page_table(seq).map(|table| table.collect::<Vec<_>>());
            let lens = [engine.cached_len(seq), engine.planned_len(seq), engine.extend_max(seq)];
            (tokens, table, lens)
        };
        self.engine.verify().expect("all invariants hold");
        let mut stats = self.engine.stats();
        stats.refusals = 0;
        (stats, self.engine.newest_step(), self.seqs.iter().map(of).collect::<Vec<_>>())
    }

    /// Checks that a call fails with `want` and changes nothing.
    #[track_caller]
    fn refuses<T: std::fmt::Debug>(&mut self, want: Error, call: impl FnOnce(&mut Self) -> Result<T, Error>) {
        let before = self.state();
        assert_eq!(call(self).expect_err("the call is rejected"), want);
        assert_eq!(self.state(), before, "after {want}");
    }
}

fn core<E: std::fmt::Debug>(error: EngineError<E>) -> Error {
    match error {
        EngineError::Core(error) => error,
        other => panic!("{other:?}"),
    }
}

fn set(parents: &[u32]) -> DraftTree {
    let mut tree = DraftTree::new();
    tree.set(COMPUTED, parents).expect("parents precede children");
    tree
}

#[test]
fn a_refused_tree_is_unchanged() {
    let mut tree = set(&[0, 0, 1]);
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

#[test]
fn drafts_of_other_items_are_refused() {
    let mut host = Host::new(&[3, 3, 3]);
    let [a, b, c] = [0, 1, 2].map(|i| host.seqs[i]);
    let stranger = SeqKey::default();
    for (drafts, seq) in [
        (vec![c], c), // The sequence is not in the batch.
        (vec![stranger], stranger),
        (vec![b, a], a),
        (vec![a, a], a),
    ] {
        let drafts: Vec<_> = drafts.into_iter().map(Draft::chain).collect();
        host.refuses(Error::DraftOrder { seq }, |host| host.plan(&[(0, 3), (1, 3)], &drafts));
    }
    // Drafts are in the order of the items.
    host.plan(&[(1, 3), (0, 3)], &[Draft::chain(b), Draft::chain(a)]).expect("it is in order");
}

#[test]
fn drafts_of_tokens_that_are_not_known_or_too_many_are_refused() {
    let mut host = Host::new(&[1, 65]);
    let [a, b] = [0, 1].map(|i| host.seqs[i]);
    let len = Error::ExtendLen { seq: a, len: 2, max: 1 };
    host.refuses(len, |host| host.plan(&[(0, 2)], &[Draft::chain(a)]));
    let long = Error::DraftLen { len: 65, max: 64 };
    host.refuses(long, |host| host.plan(&[(1, 65)], &[Draft::chain(b)]));
    // The next token of a step in flight may be planned, but it is not a draft, because it is unknown.
    host.plan(&[(0, 1)], &[]).expect("there is room");
    let pending = Error::ExtendLen { seq: a, len: 1, max: 0 };
    host.refuses(pending, |host| host.plan(&[(0, 1)], &[Draft::chain(a)]));
    host.plan(&[(0, 1), (1, 64)], &[Draft::chain(b)]).expect("64 are not too many");
}

#[test]
fn invalid_masks_and_positions_are_refused() {
    let mut host = Host::new(&[3]);
    let seq = host.seqs[0];
    let tree = set(&[0, 0, 0]);
    let (masks, positions) = (tree.masks(), tree.positions());
    assert_eq!((masks, positions), (&[0b1111_1100, 0b1111_1110, 0b1111_1101][..], &[5, 6, 6][..]));
    let arrays = |masks, positions| Error::DraftArrays { seq, masks, positions, len: 3 };
    for (m, p) in [(3, 2), (2, 3), (3, 0), (0, 3), (2, 2)] {
        let draft = Draft { seq, masks: &masks[..m], positions: &positions[..p] };
        host.refuses(arrays(m, p), |host| host.plan(&[(0, 3)], &[draft]));
    }
    // A tree without tokens is not a chain.
    let mut empty = DraftTree::new();
    host.refuses(arrays(0, 1), |host| host.plan(&[(0, 3)], &[empty.draft(seq)]));
    empty.set(5, &[]).expect("an empty tree");
    host.refuses(arrays(0, 1), |host| host.plan(&[(0, 3)], &[empty.draft(seq)]));
    let (long_masks, long_positions) = ([1; 4], [5; 4]);
    let draft = Draft { seq, masks: &long_masks, positions: &long_positions };
    host.refuses(arrays(4, 4), |host| host.plan(&[(0, 3)], &[draft]));

    // Masks without their own bit, with the bit of a later token, and with that of a missing slot.
    let most = [0b1111_1100, 0b1111_1110, 0b1111_1111];
    for (token, mask) in [
        (0, 0b1111_1000),
        (0, 0b1111_1110),
        (0, 0b1_1111_1100),
        (1, 0b1111_1100),
        (1, 0b1111_1111),
        (2, 0),
        (2, 1 << 63 | 1),
    ] {
        let mut masks = masks.to_vec();
        masks[token] = mask;
        let (own, most) = (4 >> token, most[token]);
        let error = Error::DraftMask { seq, token: token as u32, mask, own, most };
        let draft = Draft { seq, masks: &masks, positions };
        host.refuses(error, |host| host.plan(&[(0, 3)], &[draft]));
    }

    for (token, position) in [(0, 4), (0, 6), (1, 4), (1, 7), (2, 0), (2, 8), (2, u32::MAX)] {
        let mut positions = positions.to_vec();
        positions[token] = position;
        let (token, min) = (token as u32, COMPUTED);
        let error = Error::DraftPosition { seq, token, position, min, max: min + token };
        let draft = Draft { seq, masks, positions: &positions };
        host.refuses(error, |host| host.plan(&[(0, 3)], &[draft]));
    }
    host.plan(&[(0, 3)], &[tree.draft(seq)]).expect("the draft is valid");
}

#[test]
fn drafts_that_do_not_fit_take_nothing() {
    let mut host = Host::new(&[40, 60, 60, 60, 60]);
    let items: Vec<_> = (0..5).map(|i| (i, [40, 60, 60, 60, 60][i])).collect();
    let drafts: Vec<_> = host.seqs.iter().map(|&seq| Draft::chain(seq)).collect();
    // Each sequence has 2 of the 64 pages, with space for 3 more tokens. The other 37 tokens of one sequence need 10
    // pages; the other 57 tokens of four sequences need 15 pages each.
    let error = Error::OutOfPages { wanted: 70, available: 54, after: None };
    host.refuses(error, |host| host.plan(&items, &drafts));
}

#[test]
fn drafts_that_wait_keep_their_sequence_as_it_is() {
    let mut host = Host::new(&[3, 3]);
    let [seq, other] = [0, 1].map(|i| host.seqs[i]);
    let step = host.plan(&[(0, 3), (1, 3)], &[Draft::chain(seq)]).expect("there is room");
    assert_eq!(host.engine.extend_max(seq), Ok(0));
    host.engine.append(seq, &[TokenId::new(9)]).expect("after the drafts");
    let error = Error::NotAccepted { seq, step };
    host.refuses(error, |host| host.plan(&[(0, 1)], &[]));
    host.refuses(error, |host| host.plan(&[(0, 1)], &[Draft::chain(seq)]));
    host.refuses(error, |host| host.engine.commit(step));
    host.refuses(error, |host| host.engine.preempt(seq, Keep::Publish));
    host.refuses(error, |host| host.engine.rollback(seq, 6));
    host.refuses(error, |host| host.engine.fork(seq, 1, 0).map(|_| ()).map_err(core));
    // After an abort, drafts are ordinary tokens.
    host.engine.abort(step).expect("it is open");
    assert_eq!(host.engine.extend_max(seq), Ok(4));
    host.engine.rollback(seq, 6).expect("the abort ended the drafts");
    let step = host.plan(&[(0, 1), (1, 3)], &[Draft::chain(other)]).expect("there is room");
    // A finish ends the drafts of its sequence.
    host.engine.finish(other).expect("it is live");
    host.engine.commit(step).expect("no drafts wait");
    host.engine.verify().expect("all invariants hold");
    assert_eq!(host.engine.stats().drafts, 0, "no branch was kept");
}

#[test]
fn invalid_branches_are_refused() {
    let mut host = Host::new(&[5, 3, 3, 1]);
    let [a, b, c, plain] = [0, 1, 2, 3].map(|i| host.seqs[i]);
    let tree = set(&[0, 0, 0, 1, 2]);
    let drafts = [tree.draft(a), Draft::chain(b)];
    let step = host.plan(&[(0, 5), (1, 3), (3, 1)], &drafts).expect("there is room");
    let later = host.plan(&[(2, 3)], &[Draft::chain(c)]).expect("there is room");
    let refuses = |host: &mut Host, error, step, branches: &[Branch<'_>]| {
        let accept = |host: &mut Host| host.engine.accept_batch(step, branches).map(<[_]>::to_vec).map_err(core);
        host.refuses(error, accept);
    };
    let branch = |seq, tokens| Branch { seq, tokens };

    for unknown in [StepId::new(1), StepId::new(4), StepId::new(0)] {
        refuses(&mut host, Error::UnknownStep { step: unknown }, unknown, &[branch(a, &[0])]);
    }
    let stranger = SeqKey::default();
    let unknown = Error::UnknownSequence { seq: stranger };
    refuses(&mut host, unknown, step, &[branch(a, &[0]), branch(stranger, &[0])]);
    // Drafts that do not exist, and those of another step.
    let none = |seq| Error::NotDrafted { seq, step };
    refuses(&mut host, none(plain), step, &[branch(plain, &[0])]);
    refuses(&mut host, none(c), step, &[branch(a, &[0]), branch(c, &[0])]);
    refuses(&mut host, Error::NotDrafted { seq: a, step: later }, later, &[branch(a, &[0])]);
    // Repeated sequences, and sequences out of order.
    let twice = [branch(a, &[0]), branch(a, &[0])];
    refuses(&mut host, Error::RepeatedSequence { seq: a }, step, &twice);
    let turned = [branch(b, &[0]), branch(a, &[0])];
    refuses(&mut host, Error::RepeatedSequence { seq: a }, step, &turned);
    // The tree is 0 - 1 - 3 and 0 - 2 - 4.
    for (tokens, place) in [
        (&[1][..], 0),
        (&[5], 0),
        (&[u32::MAX], 0),
        (&[0, 0], 1),
        (&[0, 3], 1),
        (&[0, 1, 4], 2),
        (&[0, 2, 3], 2),
        (&[0, 1, 3, 4], 3),
        (&[0, 1, 3, 64], 3),
    ] {
        let error = Error::NotABranch { seq: a, place, token: tokens[place] };
        refuses(&mut host, error, step, &[branch(a, tokens), branch(b, &[0, 1, 2])]);
    }
    let error = Error::NotABranch { seq: b, place: 1, token: 2 };
    refuses(&mut host, error, step, &[branch(a, &[0, 2, 4]), branch(b, &[0, 2])]);

    let good = [branch(a, &[0, 2, 4]), branch(b, &[])];
    let moved = host.engine.accept_batch(step, &good).expect("two branches").to_vec();
    assert_eq!((moved.len(), moved[0].first, moved[0].keep), (1, COMPUTED, 0b10101));
    let lens = [a, b].map(|seq| host.engine.token_count(seq));
    assert_eq!(lens, [Ok(COMPUTED + 3), Ok(COMPUTED)]);
    // A branch is accepted once.
    refuses(&mut host, none(a), step, &[branch(a, &[0])]);
    host.engine.commit(step).expect("all branches are kept");
    refuses(&mut host, Error::UnknownStep { step }, step, &[branch(b, &[])]);
    // A preempted sequence has no drafts.
    host.engine.preempt(plain, Keep::Publish).expect("it runs");
    refuses(&mut host, Error::Preempted { seq: plain }, later, &[branch(plain, &[0])]);
    host.engine.accept(later, c, &[0, 1]).expect("a branch");
    host.engine.commit(later).expect("it is accepted");

    let stats = host.engine.stats();
    // The root of each draft is the last sampled token, not a guess.
    assert_eq!((stats.drafts, stats.draft_tokens, stats.accepted_tokens), (3, 4 + 2 + 2, 2 + 1));
    assert!(stats.to_string().contains(", 3 of 8 draft tokens accepted in 3 drafts\n"), "{stats}");
    let text = stats.prometheus().to_string();
    for line in ["drafts_total 3", "draft_tokens_total 8", "accepted_tokens_total 3"] {
        assert!(text.contains(&format!("\nkvarena_{line}\n")), "{line} is not in:\n{text}");
    }
    let since = stats - stats;
    assert_eq!((since.drafts, since.draft_tokens, since.accepted_tokens), (0, 0, 0));
}

/// Plans the last `len` known tokens as a draft, accepts a branch and commits.
fn verify_draft(host: &mut Host, draft: &Draft<'_>, len: u32, branch: &[u32]) {
    let step = host.plan(&[(0, len)], &[*draft]).expect("there is room");
    host.engine.accept(step, draft.seq, branch).expect("it is a branch");
    host.engine.commit(step).expect("it is accepted");
    host.engine.complete(step).expect("it is committed");
    host.engine.verify().expect("all invariants hold");
}

/// A drafter that is never right: 29 verifications of 3 guesses after the sampled token.
#[test]
fn a_sampled_token_is_no_guess() {
    let mut host = Host::new(&[1]);
    let seq = host.seqs[0];
    for _ in 0..29 {
        host.engine.append(seq, &[7, 8, 9].map(TokenId::new)).expect("room for tokens");
        verify_draft(&mut host, &Draft::chain(seq), 4, &[0]);
        host.engine.append(seq, &[TokenId::new(50)]).expect("room for tokens");
    }
    let stats = host.engine.stats();
    assert!(stats.to_string().contains(", 0 of 87 draft tokens accepted in 29 drafts\n"), "{stats}");
    assert_eq!((stats.drafts, stats.draft_tokens, stats.accepted_tokens), (29, 87, 0));
}

/// In trees, a single root is the sampled token, accepted or not; several roots are guesses of that token.
#[test]
fn guesses_of_trees_are_counted() {
    for (parents, branch, counted) in [
        (&[0, 0, 0, 1, 2][..], &[0, 2, 4][..], (1, 4, 2)),
        (&[0, 0, 0, 1, 2], &[0], (1, 4, 0)),
        (&[0, 0, 0, 1, 2], &[], (1, 4, 0)),
        (&[0], &[0], (1, 0, 0)),
        (&[0, 1, 1], &[1, 2], (1, 3, 2)),
        (&[0, 1, 1], &[0], (1, 3, 1)),
        (&[0, 1, 1], &[], (1, 3, 0)),
    ] {
        let len = parents.len() as u32;
        let mut host = Host::new(&[len]);
        let tree = set(parents);
        let seq = host.seqs[0];
        verify_draft(&mut host, &tree.draft(seq), len, branch);
        let stats = host.engine.stats();
        let got = (stats.drafts, stats.draft_tokens, stats.accepted_tokens);
        assert_eq!(got, counted, "{parents:?}, branch {branch:?}");
    }
}

#[test]
fn a_sequence_keeps_a_token() {
    let pool = PoolConfig { page_size: 4, ..Default::default() };
    let engine = Engine::new(pool, Null).expect("a valid config");
    let mut host = Host { engine, scratch: StepScratch::new(), seqs: Vec::new() };
    // All tokens of the prompt are drafts.
    let prompt = [1, 2, 3].map(TokenId::new);
    let seq = host.engine.admit(Namespace::default(), &prompt, 0).expect("there is room");
    host.seqs.push(seq);
    let step = host.plan(&[(0, 3)], &[Draft::chain(seq)]).expect("there is room");
    host.refuses(Error::RollbackLen { len: 0, min: 1, max: 3 }, |host| {
        host.engine.accept(step, seq, &[]).map(<[_]>::to_vec).map_err(core)
    });
    host.engine.accept(step, seq, &[0]).expect("one is left");
    host.engine.commit(step).expect("it is accepted");
}

#[test]
fn refusals_are_in_plain_words() {
    let (seq, step) = (SeqKey::default(), StepId::new(7));
    for (error, words) in [
        (Error::DraftLen { len: 65, max: 64 }, "a draft of 65 tokens is larger than 64"),
        (Error::DraftParent { token: 1, parent: 2 }, "draft 1 cannot follow draft 2, which is later"),
        (Error::DraftOrder { seq }, "of a draft is not in the batch, or out of order"),
        (Error::DraftArrays { seq, masks: 1, positions: 0, len: 1 }, "1 masks and 0 positions for 1 draft of"),
        (
            Error::DraftMask { seq, token: 1, mask: 4, own: 2, most: 62 },
            "mask 0x4 of draft 1 of sequence SeqKey(null) lacks bit 0x2 or has bits outside 0x3e",
        ),
        (
            Error::DraftPosition { seq, token: 1, position: 9, min: 5, max: 6 },
            "position 9 of draft 1 of sequence SeqKey(null) is outside 5 to 6",
        ),
        (Error::NotAccepted { seq, step }, "in step 7 is accepted yet"),
        (Error::NotDrafted { seq, step }, "step 7 has no waiting drafts of"),
        (Error::NotABranch { seq, place: 0, token: 3 }, "accepted at place 0, is not a root"),
        (Error::NotABranch { seq, place: 1, token: 3 }, "does not follow the one before it"),
        (Error::RepeatedSequence { seq }, "is repeated in a batch, or out of order"),
    ] {
        assert!(error.to_string().contains(words), "{error}");
        assert!(!error.is_shortage(), "{error}: waiting does not help");
    }
}
