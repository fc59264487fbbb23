//! The calls of a replay: the replay makes each call on the engine and on the model, and compares the results.

use slotmap::KeyData;

use super::agree;
use super::bytes::Inspect;
use super::host::Host;
use crate::error::EngineError;
use crate::id::{Namespace, SeqKey, StepId, TokenId};
use crate::plan::{self, Admitted, Extend, Forked, Keep};
use crate::testkit::model::{AdmissionWant, ForkWant};
use crate::testkit::op::{Limit, Op, Promise, Prompt};

impl<B: Inspect> Host<B> {
    /// Makes an op's call on the engine and on the model.
    pub(super) fn apply(&mut self, op: Op) -> Result<(), String> {
        self.ops += 1;
        match op {
            Op::Admit(prompt) => self.admit(&prompt),
            Op::AdmitBatch { prompt, count } => self.admit_batch(&prompt, count % 5),
            Op::Match(prompt) => self.match_prefix(&prompt),
            Op::Plan { first, count, lens, twist } => {
                let items = self.batch(first, count, lens, twist);
                self.plan(&items)
            }
            Op::Append { pick, count, seed } => self.append(pick, count, seed),
            Op::Commit { pick } => self.commit(pick),
            Op::Complete { pick } => self.complete(pick),
            Op::Abort { pick } => self.abort(pick),
            Op::Finish { pick, publish } => self.finish(pick, keep(publish)),
            Op::Preempt { pick, publish } => self.preempt(pick, keep(publish)),
            Op::Resume { pick, promise, limit } => self.resume(pick, promise, limit),
            Op::Mark { pick, more } => self.mark(pick, more),
            Op::Load { first, count } => self.load(first, count),
            Op::SaveAhead { pages } => self.save_ahead(pages),
            Op::Puts { most } => self.puts(most),
            Op::PutDone { pick, ok } => self.put_done(pick, ok),
            Op::Fetch { prompt, most } => self.fetch(&prompt, most),
            Op::Fetched { pick, count } => self.fetched(pick, count),
            Op::RestatePuts { prompt, lost } => self.restate_puts(&prompt, lost),
            Op::Promise { pick, promise } => self.promise_more(pick, promise),
            Op::Fork { pick, count, promise } => self.fork(pick, count % 4, promise),
            Op::Rollback { pick, fewer } => self.rollback(pick, fewer),
            Op::Draft { first, count, seed, twist } => self.draft(first, count, seed, twist),
            Op::Accept { pick, seed } => self.accept(pick, seed),
            Op::Reset => {
                self.engine.reset();
                self.model.reset();
                self.store.generation += 1;
                self.summary.count("reset Ok".to_owned());
                Ok(())
            }
        }
    }

    /// Ends every sequence and step, and checks that nothing remains in use.
    pub(super) fn close(&mut self) -> Result<(), String> {
        self.close_store()?;
        while !self.live.is_empty() {
            self.apply(Op::Finish { pick: 0, publish: true })?;
            self.listen().and_then(|()| self.compare())?;
        }
        while !self.model.open_steps().is_empty() {
            self.apply(Op::Commit { pick: 0 })?;
            self.listen().and_then(|()| self.compare())?;
        }
        self.apply(Op::Complete { pick: 0 })?;
        self.drain_every = 1;
        self.listen().and_then(|()| self.compare())?;
        let stats = self.engine.stats();
        let left = [stats.private_pages, stats.fenced_pages, stats.protected_pages];
        agree("pages left in use", &left, &[0; 3])?;
        agree("sequences and steps left", &[stats.sequences, stats.steps], &[0; 2])
    }

    fn admit(&mut self, spec: &Prompt) -> Result<(), String> {
        let (namespace, prompt) = self.prompt(spec);
        let admit = self.terms(spec.promise, spec.limit, prompt.len());
        let asked = plan::Prompt { namespace, tokens: &prompt, admit };
        self.compare_admission(&asked)?;
        let got = self.engine.admit(namespace, &prompt, admit);
        let want = self.model.admit(got.unwrap_or_default(), &asked);
        let want = self.model.counted(want);
        self.check_result("admit", &got.map(|_| ()), &want)?;
        if let Ok(seq) = got {
            self.add_live(seq, prompt.clone())?;
        }
        self.remember(prompt);
        Ok(())
    }

    /// Compares `Engine::admission`, which returns the cost before an admission.
    fn compare_admission(&mut self, prompt: &plan::Prompt<'_>) -> Result<(), String> {
        let got = self.engine.admission(prompt.namespace, prompt.tokens, prompt.admit);
        let named = got.ok().and_then(|got| got.leader);
        let got = got.map(|got| AdmissionWant {
            cached_len: got.cached_len,
            swap_pages: got.swap_pages,
            idle_pages: got.idle_pages,
            lacking_pages: got.lacking_pages,
            available_pages: got.available_pages,
            after: got.after,
            leader: got.leader.map(|leader| (leader.seq, leader.cached_len)),
        });
        let want = self.model.admission(prompt);
        agree("admission", &got, &want)?;
        if let Some(leader) = named {
            self.summary.count("admission with a leader".to_owned());
            let text = prompt.tokens[..leader.cached_len as usize].to_vec();
            self.leaders.push_front((leader, self.model.cut_count(leader.seq), text));
            self.leaders.truncate(4);
        }
        Ok(())
    }

    fn admit_batch(&mut self, spec: &Prompt, count: u8) -> Result<(), String> {
        let (namespace, first) = self.prompt(spec);
        let admit = self.terms(spec.promise, spec.limit, first.len());
        let max = self.engine.shape().max_sequence_len as usize;
        // Texts 1 to 3 are longer than text 0 by half a page, by a page, and by nothing. Text 3 is in the other
        // namespace.
        let texts: Vec<Vec<_>> = (0..usize::from(count))
            .map(|i| {
                let more = (i % 3) * self.page_size() / 2;
                let more = if first.is_empty() { 0 } else { more.min(max.saturating_sub(first.len())) };
                let new = (0..more).map(|at| self.token(i as u64 / 2, at));
                first.iter().copied().chain(new).collect()
            })
            .collect();
        let prompts: Vec<_> = texts
            .iter()
            .enumerate()
            .map(|(i, tokens)| plan::Prompt {
                namespace: if i == 3 { Namespace::new(1 - namespace.raw()) } else { namespace },
                tokens,
                admit,
            })
            .collect();
        let got = self.engine.admit_batch(&prompts).map(<[_]>::to_vec);
        let keys: Vec<_> = match &got {
            Ok(admitted) => admitted.iter().map(|one| one.seq).collect(),
            // The model rejects the call for any keys.
            Err(_) => some_keys(count.into()),
        };
        let got = got.map(|admitted| {
            let leader = |one: &Admitted| one.leader.map(|leader| (leader.seq, leader.cached_len));
            admitted.iter().map(leader).collect::<Vec<_>>()
        });
        let want = self.model.admit_batch(&keys, &prompts);
        let want = self.model.counted(want);
        self.check_result("admit_batch", &got, &want)?;
        if got.is_ok() {
            for (key, text) in keys.into_iter().zip(&texts) {
                self.add_live(key, text.clone())?;
            }
        }
        texts.into_iter().for_each(|text| self.remember(text));
        Ok(())
    }

    fn match_prefix(&mut self, spec: &Prompt) -> Result<(), String> {
        let (namespace, prompt) = self.prompt(spec);
        let admit = self.terms(spec.promise, spec.limit, prompt.len());
        self.compare_admission(&plan::Prompt { namespace, tokens: &prompt, admit })?;
        let found = self.engine.match_prefix(namespace, &prompt);
        agree("match_prefix", &found.pages(), &self.model.match_prefix(namespace, &prompt))
    }

    fn batch(&self, first: u8, count: u8, lens: [u8; 4], twist: u8) -> Vec<Extend> {
        let live = self.live.len().max(1);
        let seqs = self.live.iter().cycle().skip(usize::from(first) % live);
        let seqs = seqs.take(if twist == 3 { 0 } else { 1 + usize::from(count) % live });
        let mut seqs: Vec<_> = seqs.copied().filter(|&seq| twist == 2 || !self.model.is_preempted(seq)).collect();
        if !matches!(twist, 0 | 2) {
            seqs.retain(|&seq| self.model.waiting(seq).is_none());
        }
        match twist {
            0 => seqs.extend(seqs.first().copied()),
            1 => seqs.push(self.pick(255)),
            _ => {}
        }
        let item = |(i, seq): (usize, SeqKey)| {
            let max = self.model.extend_max(seq).unwrap_or(1);
            let some = u32::from(lens[i % 4]) / 2 * self.scale() as u32;
            let len = match lens[i % 4] {
                0 => 0,
                1 => max + 1,
                odd if odd % 2 == 1 => 1 + some % max.max(1),
                _ => max.max(1),
            };
            // Most items end at marks.
            let to_mark = if lens[i % 4] % 16 == 14 { 0 } else { self.model.next_len(seq, len) };
            let len = if to_mark > 0 && self.engine.shape().table.state_pages > 0 { to_mark } else { len };
            Extend { seq, len }
        };
        seqs.into_iter().enumerate().map(item).collect()
    }

    fn plan(&mut self, items: &[Extend]) -> Result<(), String> {
        self.plan_with(items, &[])
    }

    fn append(&mut self, pick: u8, spec: u8, seed: u8) -> Result<(), String> {
        self.append_to(self.pick(pick), spec, seed)
    }

    pub(super) fn append_to(&mut self, seq: SeqKey, spec: u8, seed: u8) -> Result<(), String> {
        let max = self.engine.shape().max_sequence_len as usize;
        let count = match spec {
            255 => max + 1,
            count => usize::from(count) * self.scale() % (2 * self.page_size() + 2),
        };
        let known = self.model.tokens(seq).map_or(0, <[TokenId]>::len);
        let text = self.texts.get(&seq);
        let token = |i| {
            let sampled = text.and_then(|text| text.get(i).copied());
            sampled.unwrap_or_else(|| self.token(u64::from(seed % 4), i))
        };
        let mut tokens: Vec<_> = (known..known + count).map(token).collect();
        if let Some(last) = tokens.last_mut().filter(|_| spec == 254) {
            *last = TokenId::PENDING;
        }
        let got = self.engine.append(seq, &tokens);
        let want = self.model.append(seq, &tokens);
        self.check_result("append", &got, &want)?;
        if want.is_ok() {
            let text = self.texts.entry(seq).or_default();
            let old = text.len() - known;
            text.extend(tokens.iter().skip(old));
        }
        Ok(())
    }

    fn commit(&mut self, pick: u8) -> Result<(), String> {
        let turn = self.model.open_steps().first().copied().filter(|_| pick < 224);
        let step = turn.unwrap_or(self.any_step(pick));
        let got = self.engine.commit(step);
        let want = self.model.commit(step);
        self.check_result("commit", &got, &want)
    }

    fn complete(&mut self, pick: u8) -> Result<(), String> {
        let open = self.model.open_steps().first().copied();
        let all = open.map_or(self.model.last_step(), |open| StepId::new(open.raw() - 1));
        let step = match pick {
            0..128 => all,
            128..208 => StepId::new(self.model.completed().raw() + 1).min(all),
            _ => self.any_step(pick),
        };
        let got = self.engine.complete(step);
        let want = self.model.complete(step);
        self.touched.retain(|&step, _| step > self.model.completed());
        self.words_before.retain(|&step, _| step > self.model.completed());
        self.check_result("complete", &got, &want)
    }

    fn abort(&mut self, pick: u8) -> Result<(), String> {
        let open = self.model.open_steps();
        let open = open.get(usize::from(pick) % open.len().max(1)).filter(|_| pick < 224);
        let step = open.copied().unwrap_or(self.any_step(pick));
        let got = self.engine.abort(step);
        let want = self.model.abort(step);
        if want.is_ok() {
            self.undo_words(step);
        }
        for seq in self.live.clone() {
            self.cut_text(seq);
        }
        self.check_result("abort", &got, &want)
    }

    fn finish(&mut self, pick: u8, keep: Keep) -> Result<(), String> {
        let seq = self.pick(pick);
        let got = match keep {
            Keep::Publish => self.engine.finish(seq),
            Keep::Drop => self.engine.finish_with(seq, keep),
        };
        let want = self.model.finish(seq, keep);
        self.check_result("finish", &got, &want)?;
        if want.is_ok() {
            self.live.retain(|&live| live != seq);
            self.gone.push(seq);
            let text = self.texts.remove(&seq).unwrap_or_default();
            self.remember(text);
        }
        Ok(())
    }

    fn preempt(&mut self, pick: u8, keep: Keep) -> Result<(), String> {
        let seq = self.pick(pick);
        let got = self.engine.preempt(seq, keep);
        let want = self.model.preempt(seq, keep);
        self.cut_text(seq);
        self.check_result("preempt", &got, &want)
    }

    fn resume(&mut self, pick: u8, promise: Promise, limit: Limit) -> Result<(), String> {
        let live = self.live.iter().copied();
        let preempted: Vec<_> = live.filter(|&seq| self.model.is_preempted(seq)).collect();
        let seq = preempted.get(usize::from(pick) % preempted.len().max(1));
        let seq = seq.filter(|_| pick < 200).copied().unwrap_or(self.pick(pick));
        let admit = self.terms(promise, limit, self.known(seq));
        let got = self.engine.resume(seq, admit);
        let want = self.model.resume(seq, admit);
        let want = self.model.counted(want);
        self.check_result("resume", &got, &want)
    }

    fn promise_more(&mut self, pick: u8, promise: Promise) -> Result<(), String> {
        let seq = self.pick(pick);
        let promise = self.promise(promise, self.known(seq));
        let got = self.engine.promise(seq, promise);
        let want = self.model.promise(seq, promise);
        let want = self.model.counted(want);
        self.check_result("promise", &got, &want)
    }

    fn mark(&mut self, pick: u8, more: u8) -> Result<(), String> {
        let seq = self.pick(pick);
        let page_size = self.page_size() as u32;
        let more = u32::from(more) * self.scale() as u32 % (8 * page_size);
        let len = (self.model.published_len(seq) + more).saturating_sub(page_size.div_ceil(2));
        let got = self.engine.mark(seq, len);
        let want = self.model.mark(seq, len);
        self.check_result("mark", &got, &want)
    }

    fn load(&mut self, first: u8, count: u8) -> Result<(), String> {
        let count = usize::from(count) % (self.live.len() + 2);
        let seqs: Vec<_> = (0..count).map(|i| self.pick(first.wrapping_add(i as u8))).collect();
        let got = match self.engine.load(&seqs) {
            Err(EngineError::Core(error)) => Err(error),
            loaded => Ok(loaded.is_ok()),
        };
        let moves = self.engine.backend_mut().take_moves();
        self.model.expect_moves(moves);
        let want = self.model.load(&seqs);
        let want = self.model.counted(want);
        if want == Ok(false) {
            self.summary.count("load Backend".to_owned());
        }
        self.check_result("load", &got, &want)
    }

    fn save_ahead(&mut self, pages: u8) -> Result<(), String> {
        let got = self.engine.save_ahead(pages.into()).ok();
        let moves = self.engine.backend_mut().take_moves();
        self.model.expect_moves(moves);
        let want = self.model.save_ahead(pages.into());
        if want.is_none() {
            self.summary.count("save_ahead Backend".to_owned());
        }
        self.check_result("save_ahead", &Ok(got), &Ok(want))
    }

    /// Returns the number of known tokens of a sequence; 0 if it is finished.
    pub(super) fn known(&self, seq: SeqKey) -> usize {
        self.model.tokens(seq).map_or(0, <[TokenId]>::len)
    }

    fn fork(&mut self, pick: u8, count: u8, promise: Promise) -> Result<(), String> {
        let seq = self.pick(pick);
        let promise = self.promise(promise, self.known(seq));
        let failures = self.engine.backend().failures();
        let forked = self.engine.fork(seq, count.into(), promise);
        let (keys, got) = match forked {
            Ok(Forked { children, copies, step }) => {
                let copies = copies.iter().map(|copy| (copy.source, copy.target)).collect();
                (children.to_vec(), Ok(ForkWant { copies, step }))
            }
            // The engine has removed the children, so the model may use any keys.
            Err(EngineError::Backend(_)) => {
                let keys = some_keys(count.into());
                return self.failed_fork(&keys, seq, promise, failures);
            }
            Err(EngineError::Core(error)) => (vec![SeqKey::default(); count.into()], Err(error)),
            Err(error) => return Err(format!("fork: {error}")),
        };
        let moves = self.engine.backend_mut().take_moves();
        self.model.expect_moves(moves);
        let want = self.model.fork(&keys, seq, promise);
        let want = self.model.counted(want);
        self.check_result("fork", &got, &want)?;
        if let Ok(ForkWant { copies, step }) = got {
            if let Some(step) = step {
                let targets: Vec<_> = copies.iter().map(|copy| copy.1).collect();
                self.compare_untouched(&targets)?;
                let pages = copies.iter().flat_map(|copy| [copy.0, copy.1]).collect();
                self.touched.insert(step, pages);
            }
            let text = self.texts.get(&seq).map_or(Vec::new(), |text| text[..self.known(seq)].to_vec());
            for key in keys {
                self.add_live(key, text.clone())?;
            }
        }
        Ok(())
    }

    /// Checks that there are no children, and that the fork's other effects remain.
    fn failed_fork(&mut self, keys: &[SeqKey], seq: SeqKey, promise: u32, failures: u64) -> Result<(), String> {
        if self.engine.backend().failures() == failures {
            return Err("fork: the backend did not fail".to_owned());
        }
        self.summary.count("fork Backend".to_owned());
        let moves = self.engine.backend_mut().take_moves();
        self.model.expect_moves(moves);
        let forked = self.model.fork(keys, seq, promise).map(|_| ());
        if self.model.take_load_failed() {
            return Ok(());
        }
        agree("fork", &Ok(()), &forked)?;
        self.model.forget_forks(keys.len());
        for &key in keys.iter().rev() {
            agree("fork", &Ok(()), &self.model.finish(key, Keep::Drop))?;
        }
        Ok(())
    }

    fn rollback(&mut self, pick: u8, fewer: u8) -> Result<(), String> {
        let seq = self.pick(pick);
        let max = self.model.tokens(seq).map_or(0, <[TokenId]>::len) as u32 + 1;
        let min = self.model.published_len(seq).saturating_sub(1);
        let fewer = u32::from(fewer) * self.scale() as u32;
        let len = max - fewer % (max - min + 1);
        let got = self.engine.rollback(seq, len);
        let want = self.model.rollback(seq, len);
        if want.is_ok() {
            self.texts.entry(seq).or_default().truncate(len as usize);
        }
        self.check_result("rollback", &got, &want)
    }
}

/// Returns keys that no engine uses.
fn some_keys(count: u64) -> Vec<SeqKey> {
    (1..=count).map(|i| KeyData::from_ffi(1 << 32 | (0xffff_ffff - i)).into()).collect()
}

fn keep(publish: bool) -> Keep {
    if publish { Keep::Publish } else { Keep::Drop }
}
