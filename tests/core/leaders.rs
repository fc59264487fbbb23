//! The engine names the leader that computes a prompt's tokens, so that the prompt can wait; and no prompt waits
//! forever.

use kvarena::{
    Admission, Capacity, DraftTree, Engine, EngineConfig, Error, Extend, Keep, Leader, Namespace, Null, PoolConfig,
    PrefixMode, Prompt, SeqKey, StepId, StepScratch, TokenId,
};

fn engine(pages: u32) -> Engine<Null> {
    let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(pages), ..Default::default() };
    let config = EngineConfig { max_tokens: 1 << 16, max_sequences: 100, ..EngineConfig::from(pool) };
    Engine::new(config, Null).expect("a valid config")
}

/// Returns `len` tokens; from `cut` on they belong to a distinct text.
fn text(len: u32, cut: u32, own: u32) -> Vec<TokenId> {
    (0..len).map(|i| TokenId::new(if i < cut { i } else { 1000 * own + i })).collect()
}

fn admission(engine: &Engine<Null>, prompt: &[TokenId]) -> Admission {
    engine.admission(Namespace::default(), prompt, 0).expect("it is a prompt")
}

/// Returns the sequence that leads a prompt, and the number of the prompt's tokens that it will have cached.
fn leader(engine: &Engine<Null>, prompt: &[TokenId]) -> Option<(SeqKey, u32)> {
    admission(engine, prompt).leader.map(|leader| (leader.seq, leader.cached_len))
}

fn admit(engine: &mut Engine<Null>, prompt: &[TokenId]) -> SeqKey {
    engine.admit(Namespace::default(), prompt, 0).expect("there is room")
}

fn plan(engine: &mut Engine<Null>, seq: SeqKey, len: u32) -> StepId {
    let mut scratch = StepScratch::new();
    engine.plan_batch(&mut scratch, &[Extend { seq, len }]).expect("there is room").step()
}

fn compute(engine: &mut Engine<Null>, seq: SeqKey, len: u32) {
    let step = plan(engine, seq, len);
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    engine.verify().expect("all invariants hold");
}

#[test]
fn a_sequence_that_computes_the_prompt_is_its_leader() {
    let mut engine = engine(64);
    let prompt = text(30, 30, 0);
    assert_eq!(leader(&engine, &prompt), None);
    let first = admit(&mut engine, &prompt);
    // An equal prompt waits for the whole pages before its last token. Other prompts wait for the whole pages that they
    // share with the first sequence.
    assert_eq!(leader(&engine, &prompt), Some((first, 28)));
    assert_eq!(leader(&engine, &text(50, 50, 0)), Some((first, 28)));
    assert_eq!(leader(&engine, &text(50, 9, 1)), Some((first, 8)));
    assert_eq!(leader(&engine, &prompt[..5]), Some((first, 4)));
    assert_eq!(leader(&engine, &prompt[..4]), None, "its last token must be computed");
    assert_eq!(leader(&engine, &text(50, 3, 1)), None, "the first page differs");
    let elsewhere = engine.admission(Namespace::new(1), &prompt, 0).expect("it is a prompt");
    assert_eq!(elsewhere.leader, None);
    let named = admission(&engine, &prompt).leader.expect("it is named");
    for done in [8, 16, 24] {
        compute(&mut engine, first, 8);
        assert_eq!((admission(&engine, &prompt).cached_len, engine.is_leading(&named)), (done, true));
        assert_eq!(leader(&engine, &prompt), Some((first, 28)));
        assert_eq!(leader(&engine, &prompt[..done as usize + 1]), None, "all of it is cached");
    }
    compute(&mut engine, first, 6);
    assert_eq!((leader(&engine, &prompt), engine.is_leading(&named)), (None, false));
    assert_eq!(admission(&engine, &prompt).cached_len, 28);
    // A sequence does not lead with tokens that are appended one by one. It leads again once one call appends several,
    // such as a next turn.
    engine.append(first, &[TokenId::new(30)]).expect("room for tokens");
    engine.append(first, &[TokenId::new(31)]).expect("room for tokens");
    assert_eq!(leader(&engine, &text(50, 50, 0)), None);
    engine.append(first, &[32, 33].map(TokenId::new)).expect("room for tokens");
    assert_eq!(leader(&engine, &text(50, 50, 0)), Some((first, 32)));
}

/// The tree may already contain more of a prompt than a slower sequence has computed.
#[test]
fn a_slower_sequence_leads_if_it_will_compute_more() {
    let mut engine = engine(64);
    let (short, long) = (text(17, 17, 0), text(40, 40, 0));
    let [quick, slow] = [admit(&mut engine, &short), admit(&mut engine, &long)];
    let in_flight = plan(&mut engine, slow, 40);
    assert_eq!(leader(&engine, &long), Some((quick, 16)), "the first sequence");
    // Steps commit in order, so the slow sequence's step is aborted before the quick sequence computes.
    engine.abort(in_flight).expect("it is open");
    compute(&mut engine, quick, 17);
    assert_eq!(admission(&engine, &long).cached_len, 16);
    assert_eq!(leader(&engine, &long), Some((slow, 36)));
    assert_eq!(leader(&engine, &text(40, 16, 1)), None, "the sequence has no more of the prompt");
    compute(&mut engine, slow, 40);
    assert_eq!(leader(&engine, &long), None);
}

#[test]
fn a_stopped_sequence_leads_no_prompt() {
    let prompt = text(30, 30, 0);
    let stops: [fn(&mut Engine<Null>, SeqKey); 5] = [
        |engine, seq| engine.finish(seq).expect("it is live"),
        |engine, seq| engine.finish_with(seq, Keep::Drop).expect("it is live"),
        |engine, seq| engine.preempt(seq, Keep::Publish).expect("it runs"),
        |engine, seq| engine.rollback(seq, 3).expect("nothing is published"),
        |engine, _| engine.reset(),
    ];
    for stop in stops {
        let mut engine = engine(64);
        let first = admit(&mut engine, &prompt);
        let named = admission(&engine, &prompt).leader.expect("it is named");
        assert!(engine.is_leading(&named));
        stop(&mut engine, first);
        engine.verify().expect("all invariants hold");
        assert_eq!((leader(&engine, &prompt), engine.is_leading(&named)), (None, false));
        // The next admitted sequence leads.
        let second = admit(&mut engine, &prompt);
        assert_eq!(leader(&engine, &prompt), Some((second, 28)));
    }
    let mut engine = engine(64);
    let first = admit(&mut engine, &prompt);
    engine.preempt(first, Keep::Publish).expect("it runs");
    engine.resume(first, 0).expect("there is room");
    assert_eq!(leader(&engine, &prompt), Some((first, 28)), "it computes again");
    // A failed step is planned again.
    let step = plan(&mut engine, first, 30);
    engine.abort(step).expect("it is open");
    assert_eq!(leader(&engine, &prompt), Some((first, 28)));
}

#[test]
fn a_leader_rolled_back_below_its_match_stops_leading() {
    let mut engine = engine(64);
    let prompt = text(30, 30, 0);
    let first = admit(&mut engine, &prompt);
    let named = admission(&engine, &prompt).leader.expect("it is named");
    assert_eq!(named.cached_len, 28);
    for len in [30, 29, 28] {
        engine.rollback(first, len).expect("nothing is published");
        assert!(engine.is_leading(&named), "it was named for 28 tokens, and has {len}");
    }
    engine.rollback(first, 27).expect("nothing is published");
    assert!(!engine.is_leading(&named));
    engine.append(first, &text(40, 27, 1)[27..]).expect("room for tokens");
    assert!(!engine.is_leading(&named), "it continues with another text");
    let shorter = admission(&engine, &prompt).leader.expect("it is named");
    assert_eq!((shorter.seq, shorter.cached_len), (first, 24));
    engine.rollback(first, 24).expect("nothing is published");
    engine.append(first, &prompt[24..]).expect("room for tokens");
    assert_eq!([named, shorter].map(|leader| engine.is_leading(&leader)), [false, true]);
    let anew = admission(&engine, &prompt).leader.expect("it is named again");
    assert!(engine.is_leading(&anew) && anew.cached_len == 28);
    // Another sequence takes the row. It was not named, although it has the same text.
    engine.finish(first).expect("it is live");
    let second = admit(&mut engine, &prompt);
    assert_eq!([named, shorter, anew].map(|leader| engine.is_leading(&leader)), [false; 3]);
    let named = admission(&engine, &prompt).leader.expect("it is named");
    assert!(named.seq == second && engine.is_leading(&named));
    engine.verify().expect("all invariants hold");
}

/// The tokens of a leader may be drafts.
#[test]
fn a_sequence_that_accepts_another_branch_stops_leading() {
    for (branch, leads) in [(&[0, 1, 2, 3, 4][..], true), (&[0, 1, 2], true), (&[0, 1], false), (&[0, 5, 6, 7], false)]
    {
        let mut engine = engine(64);
        let seq = admit(&mut engine, &text(5, 5, 0));
        compute(&mut engine, seq, 5);
        engine.append(seq, &text(13, 13, 0)[5..]).expect("room for tokens");
        let prompt = text(9, 9, 0);
        let named = admission(&engine, &prompt).leader.expect("a sequence computes the prompt");
        assert_eq!((named.seq, named.cached_len), (seq, 8));
        let mut tree = DraftTree::new();
        tree.set(5, &[0, 0, 1, 2, 3, 0, 5, 6]).expect("parents precede children");
        let (mut scratch, items) = (StepScratch::new(), [Extend { seq, len: 8 }]);
        let plan = engine.plan_drafts(&mut scratch, &items, &[tree.draft(seq)]);
        let step = plan.expect("there is room").step();
        assert!(engine.is_leading(&named));
        engine.accept(step, seq, branch).expect("it is a branch");
        assert_eq!(engine.is_leading(&named), leads, "{branch:?}");
        engine.verify().expect("all invariants hold");
        engine.append(seq, &text(20, 0, 9)[..9]).expect("room for tokens");
        assert_eq!(engine.is_leading(&named), leads, "{branch:?}");
    }
}

/// Several sequences compute the same page next, and two have another text after it.
#[test]
fn a_sequence_with_another_text_neither_leads_nor_hides_a_leader() {
    let mut engine = engine(128);
    let prompt = text(40, 40, 0);
    // Two sequences differ from the prompt before the end of its cached part: one in all later tokens, one in a single
    // token.
    let [mut early, mut once] = [text(40, 13, 1), prompt.clone()];
    early[39] = TokenId::new(7);
    once[13] = TokenId::new(999);
    let early = admit(&mut engine, &early);
    let once = admit(&mut engine, &once);
    let second = admit(&mut engine, &prompt);
    let third = admit(&mut engine, &prompt);
    let quick = admit(&mut engine, &text(17, 17, 0));
    compute(&mut engine, quick, 17);
    assert_eq!(admission(&engine, &prompt).cached_len, 16);
    assert_eq!(leader(&engine, &prompt), Some((second, 36)));
    // One of the sequences has computed more, and differs later.
    compute(&mut engine, once, 4);
    assert_eq!(leader(&engine, &prompt), Some((second, 36)));
    engine.finish_with(second, Keep::Drop).expect("it is live");
    assert_eq!(leader(&engine, &prompt), Some((third, 36)));
    compute(&mut engine, third, 4);
    assert_eq!(leader(&engine, &prompt), Some((third, 36)));
    engine.finish_with(third, Keep::Drop).expect("it is live");
    assert_eq!(leader(&engine, &prompt), None);
    assert_eq!(leader(&engine, &text(40, 13, 1)), Some((early, 36)));
}

#[test]
fn without_shared_prefixes_no_prompt_has_a_leader() {
    let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(64), ..Default::default() };
    let config = EngineConfig { prefix: PrefixMode::None, ..EngineConfig::from(pool) };
    let mut engine = Engine::new(config, Null).expect("a valid config");
    let prompt = text(30, 30, 0);
    admit(&mut engine, &prompt);
    assert_eq!(leader(&engine, &prompt), None);
    engine.verify().expect("all invariants hold");
}

#[test]
fn a_batch_is_admitted_in_whole_and_names_its_leaders() {
    let mut engine = engine(20);
    let namespace = Namespace::default();
    let texts = [text(30, 30, 0), text(30, 30, 0), text(30, 13, 1), text(9, 0, 2)];
    let prompt = |tokens| Prompt { namespace, tokens, promise: 0 };
    let prompts = [0, 1, 2, 3].map(|i| prompt(&texts[i][..]));
    // Prompts of eight, eight, eight and three pages.
    let refused = engine.admit_batch(&prompts);
    assert_eq!(refused, Err(Error::OutOfPages { wanted: 27, available: 20, after: None }));
    assert_eq!((engine.stats().sequences, engine.stats().refusals), (0, 1));
    let wrong = [prompts[0], prompt(&[]), prompts[1]];
    assert_eq!(engine.admit_batch(&wrong), Err(Error::EmptyPrompt));
    assert_eq!(engine.stats().sequences, 0);
    let two = engine.admit_batch(&prompts[1..3]).expect("sixteen pages").to_vec();
    let leaders: Vec<_> = two.iter().map(|one| one.leader.map(|leader| (leader.seq, leader.cached_len))).collect();
    assert_eq!(leaders, [None, Some((two[0].seq, 12))]);
    assert_eq!(engine.admit_batch(&[]), Ok(&[][..]));
    engine.verify().expect("all invariants hold");
    // The follower releases its pages until its leader is done, and then finds the leader's pages.
    engine.preempt(two[1].seq, Keep::Drop).expect("it runs");
    compute(&mut engine, two[0].seq, 30);
    let named = two[1].leader.expect("it was named");
    assert!(!engine.is_leading(&named));
    engine.resume(two[1].seq, 0).expect("there is room");
    assert_eq!(engine.cached_len(two[1].seq), Ok(12));
}

/// Eight equal prompts arrive at an empty cache; both ways of admission compute their prefix once.
#[test]
fn both_ways_of_admission_compute_a_prefix_once() {
    let text = text(120, 120, 0);
    // Computes all running sequences, a chunk each, and finishes those that are done.
    let round = |engine: &mut Engine<Null>, running: &mut Vec<SeqKey>| {
        let mut scratch = StepScratch::new();
        let len = |&seq: &SeqKey| engine.extend_max(seq).expect("it is live").min(50);
        let items: Vec<_> = running.iter().map(|seq| Extend { seq: *seq, len: len(seq) }).collect();
        let step = engine.plan_batch(&mut scratch, &items).expect("there is room").step();
        engine.commit(step).expect("it is open");
        engine.complete(step).expect("it is committed");
        running.retain(|&seq| {
            let runs = engine.extend_max(seq).expect("it is live") > 0;
            if !runs {
                engine.finish(seq).expect("it is live");
            }
            runs
        });
    };
    let one_by_one = || {
        let mut engine = engine(300);
        let (mut waiting, mut running) = (vec![None; 8], Vec::new());
        while !(waiting.is_empty() && running.is_empty()) {
            waiting.retain_mut(|leader: &mut Option<Leader>| {
                if !leader.is_some_and(|leader| engine.is_leading(&leader)) {
                    *leader = admission(&engine, &text).leader;
                }
                if leader.is_none() {
                    running.push(admit(&mut engine, &text));
                }
                leader.is_some()
            });
            round(&mut engine, &mut running);
        }
        engine.stats()
    };
    let in_a_batch = || {
        let mut engine = engine(300);
        let prompts = [Prompt { namespace: Namespace::default(), tokens: &text, promise: 0 }; 8];
        let (mut waiting, mut running) = (Vec::new(), Vec::new());
        for one in engine.admit_batch(&prompts).expect("there is room").to_vec() {
            match one.leader {
                Some(leader) => waiting.push((one.seq, leader)),
                None => running.push(one.seq),
            }
        }
        for &(seq, _) in &waiting {
            engine.preempt(seq, Keep::Drop).expect("it runs");
        }
        while !(waiting.is_empty() && running.is_empty()) {
            waiting.retain(|(seq, leader)| {
                let waits = engine.is_leading(leader);
                if !waits {
                    engine.resume(*seq, 0).expect("there is room");
                    running.push(*seq);
                }
                waits
            });
            round(&mut engine, &mut running);
        }
        engine.stats()
    };
    for (stats, preempted) in [(one_by_one(), 0), (in_a_batch(), 7)] {
        assert!(stats.hit_rate() >= 0.82, "{stats}");
        assert_eq!((stats.prompts, stats.prompt_tokens), (8, 8 * 120));
        assert_eq!((stats.hit_tokens, stats.computed_tokens), (7 * 116, 120 + 7 * 4));
        assert_eq!((stats.resume_hit_tokens, stats.preemptions), (0, preempted));
    }
}

/// Idle pages that several prompts of a batch share are counted once.
#[test]
fn a_batch_counts_shared_pages_once() {
    let mut engine = engine(10);
    let prompt = text(24, 24, 0);
    let first = admit(&mut engine, &prompt);
    compute(&mut engine, first, 24);
    engine.finish(first).expect("it is live");
    assert_eq!((engine.stats().free_pages, engine.stats().evictable_pages), (4, 6));
    // The first two prompts match five idle pages and lack one each. The third matches six and lacks two.
    let longer = text(32, 24, 1);
    let namespace = Namespace::default();
    let prompts = [&prompt, &prompt, &longer].map(|tokens| Prompt { namespace, tokens, promise: 0 });
    let admitted = engine.admit_batch(&prompts).expect("six are shared, four are lacking").to_vec();
    engine.verify().expect("all invariants hold");
    assert_eq!(engine.available(), 4);
    for one in admitted {
        engine.finish_with(one.seq, Keep::Drop).expect("it is live");
    }
    let promised = prompts.map(|prompt| Prompt { promise: 32, ..prompt });
    // Three, three and two pages are promised, and six are idle.
    let refused = engine.admit_batch(&promised);
    assert_eq!(refused, Err(Error::OutOfPages { wanted: 8, available: 4, after: None }));
}

/// A host lets followers wait. At random, it cancels or preempts requests and aborts steps. All requests end. A
/// follower waits only in rounds in which another request progresses, so the number of rounds is limited.
#[test]
fn every_follower_is_admitted() {
    for seed in 0..60_u64 {
        let mut random = seed;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (random >> 33) % below
        };
        let mut engine = engine(40 + draw(200) as u32);
        let prompts: Vec<_> = (0..24).map(|i| text(20 + draw(3) as u32 * 20, 16 * draw(4) as u32, i % 5)).collect();
        let mut waiting: Vec<(usize, Option<Leader>)> = (0..24).map(|i| (i, None)).collect();
        let (mut running, mut preempted) = (Vec::new(), Vec::<SeqKey>::new());
        let (mut served, mut rounds) = (0, 0);
        while served < 24 {
            rounds += 1;
            assert!(rounds < 2000, "seed {seed}: {served} of 24 are served, {waiting:?} wait");
            if let Some(&seq) = preempted.last()
                && engine.resume(seq, 0).is_ok()
            {
                running.extend(preempted.pop());
            }
            waiting.retain_mut(|(i, leader)| {
                if leader.as_ref().is_some_and(|leader| engine.is_leading(leader)) {
                    return true;
                }
                let cost = admission(&engine, &prompts[*i]);
                *leader = cost.leader;
                if leader.is_some() || !cost.fits() {
                    return true;
                }
                running.push(admit(&mut engine, &prompts[*i]));
                false
            });
            // A request is cancelled or preempted.
            if !running.is_empty() && draw(4) == 0 {
                let seq = running.remove(draw(running.len() as u64) as usize);
                if draw(2) == 0 {
                    engine.finish_with(seq, Keep::Drop).expect("it is live");
                    served += 1;
                } else {
                    engine.preempt(seq, Keep::Drop).expect("it runs");
                    preempted.insert(0, seq);
                }
            }
            let mut scratch = StepScratch::new();
            let items: Vec<_> = running
                .iter()
                .map(|&seq| Extend { seq, len: engine.extend_max(seq).expect("it is live").min(9) })
                .collect();
            let items = items.as_slice();
            if items.is_empty() {
                continue;
            }
            let Ok(step) = engine.plan_batch(&mut scratch, items).map(|plan| plan.step()) else {
                let seq = running.pop().expect("it is not empty");
                engine.preempt(seq, Keep::Publish).expect("it runs");
                preempted.push(seq);
                continue;
            };
            if draw(5) == 0 {
                engine.abort(step).expect("it is open");
            } else {
                engine.commit(step).expect("it is open");
            }
            engine.complete(step).expect("it is closed");
            running.retain(|&seq| {
                let done = engine.extend_max(seq) == Ok(0);
                if done {
                    engine.finish(seq).expect("it is live");
                    served += 1;
                }
                !done
            });
        }
        engine.verify().expect("all invariants hold");
        assert_eq!(engine.stats().sequences, 0);
    }
}
