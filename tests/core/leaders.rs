//! The engine names the leader that computes a prompt's tokens, so that the prompt can wait; and no prompt waits
//! forever. `replay.rs` compares each leader with the model.

use kvarena::testkit::rng::Rng;
use kvarena::{EngineConfig, Extend, Groups, Keep, Leader, Prompt, SeqKey, Stats, StepId, TokenId};

use super::host::{ALL, Host, pool};

fn host(pages: u32) -> Host {
    Host::null(EngineConfig { max_tokens: 1 << 16, max_sequences: 100, ..pool(4, pages, Groups::ONE).into() })
}

/// Returns `len` tokens; from `cut` on they belong to a distinct text.
fn text(len: u32, cut: u32, own: u32) -> Vec<TokenId> {
    (0..len).map(|i| TokenId::new(if i < cut { i } else { 1000 * own + i })).collect()
}

/// Plans at most `len` tokens of each running sequence; `None` if pages run out.
fn plan(host: &mut Host, running: &[SeqKey], len: u32) -> Option<StepId> {
    let item = |&seq: &SeqKey| Extend { seq, len: host.extend_max(seq).expect("it is live").min(len) };
    let items: Vec<_> = running.iter().map(item).collect();
    host.engine.plan_batch(&mut host.scratch, &items).ok().map(|plan| plan.step())
}

/// Finishes the sequences all of whose tokens are computed. Returns their number.
fn finish_done(host: &mut Host, running: &mut Vec<SeqKey>) -> usize {
    let before = running.len();
    running.retain(|&seq| {
        let done = host.extend_max(seq) == Ok(0);
        if done {
            host.finish(seq).expect("it is live");
        }
        !done
    });
    before - running.len()
}

/// Eight equal prompts arrive at an empty cache; both ways of admission compute their prefix once.
#[test]
fn both_ways_of_admission_compute_a_prefix_once() {
    let text = text(120, 120, 0);
    let round = |host: &mut Host, running: &mut Vec<SeqKey>| {
        let step = plan(host, running, 50).expect("there is room");
        host.close(step);
        finish_done(host, running);
    };
    let one_by_one = || -> Stats {
        let mut host = host(300);
        let (mut waiting, mut running) = (vec![None; 8], Vec::new());
        while !(waiting.is_empty() && running.is_empty()) {
            waiting.retain_mut(|leader: &mut Option<Leader>| {
                if !leader.is_some_and(|leader| host.is_leading(&leader)) {
                    *leader = host.admission(ALL, &text, 0).expect("it is a prompt").leader;
                }
                if leader.is_none() {
                    running.push(host.begin(&text));
                }
                leader.is_some()
            });
            round(&mut host, &mut running);
        }
        host.stats()
    };
    let in_a_batch = || -> Stats {
        let mut host = host(300);
        let prompts = [Prompt { namespace: ALL, tokens: &text, admit: 0.into() }; 8];
        let (mut waiting, mut running) = (Vec::new(), Vec::new());
        for one in host.admit_batch(&prompts).expect("there is room").to_vec() {
            match one.leader {
                Some(leader) => waiting.push((one.seq, leader)),
                None => running.push(one.seq),
            }
        }
        waiting.iter().for_each(|&(seq, _)| host.preempt(seq, Keep::Drop).expect("it runs"));
        while !(waiting.is_empty() && running.is_empty()) {
            waiting.retain(|(seq, leader)| {
                let waits = host.is_leading(leader);
                if !waits {
                    host.resume(*seq, 0).expect("there is room");
                    running.push(*seq);
                }
                waits
            });
            round(&mut host, &mut running);
        }
        host.stats()
    };
    for (stats, preempted) in [(one_by_one(), 0), (in_a_batch(), 7)] {
        assert!(stats.hit_rate() >= 0.82, "{stats}");
        assert_eq!((stats.prompts, stats.prompt_tokens), (8, 8 * 120));
        assert_eq!((stats.hit_tokens, stats.computed_tokens), (7 * 116, 120 + 7 * 4));
        assert_eq!((stats.resume_hit_tokens, stats.preemptions), (0, preempted));
    }
}

/// A host lets followers wait. At random, it cancels or preempts requests and aborts steps. All requests end. A
/// follower waits only in rounds in which another request progresses, so the number of rounds is limited.
#[test]
fn every_follower_is_admitted() {
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let mut host = host(40 + rng.below(200) as u32);
        let mut prompt = |i: u32| text(20 + rng.below(3) as u32 * 20, 16 * rng.below(4) as u32, i % 5);
        let mut waiting: Vec<(Vec<TokenId>, Option<Leader>)> = (0..24).map(|i| (prompt(i), None)).collect();
        let (mut running, mut preempted) = (Vec::new(), Vec::<SeqKey>::new());
        let (mut served, mut rounds) = (0, 0);
        while served < 24 {
            rounds += 1;
            assert!(rounds < 2000, "seed {seed}: {served} of 24 are served, {} wait", waiting.len());
            if let Some(&seq) = preempted.last()
                && host.resume(seq, 0).is_ok()
            {
                running.extend(preempted.pop());
            }
            waiting.retain_mut(|(prompt, leader)| {
                if leader.as_ref().is_some_and(|leader| host.is_leading(leader)) {
                    return true;
                }
                let cost = host.admission(ALL, prompt, 0).expect("it is a prompt");
                *leader = cost.leader;
                if leader.is_some() || !cost.fits() {
                    return true;
                }
                running.push(host.begin(prompt));
                false
            });
            // A request is cancelled or preempted.
            if !running.is_empty() && rng.one_in(4) {
                let seq = running.remove(rng.below(running.len() as u64) as usize);
                if rng.one_in(2) {
                    host.finish_with(seq, Keep::Drop).expect("it is live");
                    served += 1;
                } else {
                    host.preempt(seq, Keep::Drop).expect("it runs");
                    preempted.insert(0, seq);
                }
            }
            if running.is_empty() {
                continue;
            }
            let Some(step) = plan(&mut host, &running, 9) else {
                let seq = running.pop().expect("it is not empty");
                host.preempt(seq, Keep::Publish).expect("it runs");
                preempted.push(seq);
                continue;
            };
            if rng.one_in(5) {
                host.abort(step).expect("it is open");
            } else {
                host.commit(step).expect("it is open");
            }
            host.complete(step).expect("it is closed");
            served += finish_done(&mut host, &mut running);
        }
        host.check();
        assert_eq!(host.stats().sequences, 0);
    }
}
