//! The next step: admission, a plan, and preemption when pages run out.

use std::ops::Range;
use std::time::Instant;

use kvarena::hash::NamespaceNames;
use kvarena::plan::Draft;
use kvarena::{EngineError, Extend, Keep, Namespace, TokenId};

use super::{ActiveRequest, InflightStep, PendingSample, Score, Server, failed, ignore_shortage, refused};
use crate::clock::Part;
use crate::error::Result;
use crate::request::Request;
use crate::runner::{Draw, Runner};
use crate::sample::Sampling;
use crate::shaping::{DrawHistory, Edit, Edits, PreparedShaping};
use crate::stream::{Stream, StreamKey};

/// Copies that are saved ahead of an eviction may take 1 / `AHEAD_PART` of the swap pages.
const AHEAD_PART: u32 = 32;

/// The treatment of streams whose pages are still loading.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Loading {
    /// The step leaves them out.
    Skip,
    /// The step includes them. The device waits for their pages.
    Plan,
}

impl<R: Runner> Server<R> {
    /// Admits streams while rows and pages are available. Preempted streams come first, because they are older; then
    /// streams of the group with the fewest running streams. A stream waits while a running stream computes its prompt,
    /// and later streams may overtake it.
    fn admit(&mut self) -> Result<()> {
        while self.running.len() < self.policy.concurrency as usize {
            let index = if let Some(&index) = self.preempted.front() {
                let seq = self.streams[index].seq.expect("a preempted stream has a sequence");
                if let Err(error) = self.engine.resume(seq, 0) {
                    return ignore_shortage(error);
                }
                self.preempted.pop_front();
                index
            } else if let Some((entry, index)) = self.next_waiting() {
                if !self.admit_new(index)? {
                    if self.streams[index].leader.is_some() || self.is_searching(index) {
                        continue;
                    }
                    return Ok(());
                }
                self.waiting.remove(entry);
                index
            } else {
                return Ok(());
            };
            self.begin_load(index)?;
            let age = self.streams[index].age;
            let older = self.running.partition_point(|&other| self.streams[other].age < age);
            self.running.insert(older, index);
        }
        Ok(())
    }

    /// Begins to load a stream's cached pages that are in swap memory. If device pages are short, the plan loads them.
    fn begin_load(&mut self, index: StreamKey) -> Result<()> {
        let seq = self.streams[index].seq.expect("an admitted stream has a sequence");
        match self.engine.load(&[seq]) {
            Ok(()) | Err(EngineError::Core(_)) => Ok(()),
            Err(error) => Err(failed(error)),
        }
    }

    /// Returns whether a stream waits for a leader that is still computing.
    pub(super) fn follows(&self, index: StreamKey) -> bool {
        self.streams[index].leader.is_some_and(|leader| self.engine.is_leading(&leader))
    }

    /// Admits a stream without a sequence; returns false if pages or rows are short, if it now has a leader, or if it
    /// waits for stores.
    fn admit_new(&mut self, index: StreamKey) -> Result<bool> {
        let namespace = self.namespace(index);
        let stream = &mut self.streams[index];
        let request = &self.requests[stream.request_key].request;
        let generated = TokenId::from_raw(&stream.tokens);
        let known = [&request.prompt[..], generated].concat();
        // The previous leader has ended its lead.
        stream.leader = None;
        let scores_prompt = request.scores_prompt;
        let finds_leader = self.policy.wait_for_leaders && !scores_prompt;
        let names = names_of(request, namespace);
        let is_named = names.is_some();
        if let Some(names) = names {
            self.engine.name_namespace(namespace, names).map_err(refused)?;
        }
        let admission = finds_leader.then(|| self.engine.admission(namespace, &known, 0));
        let leader = admission.transpose().map(|found| found.and_then(|found| found.leader));
        if matches!(leader, Ok(None)) && !scores_prompt && self.search(index, namespace, &known) {
            // The namespace keeps its names for the fetch.
            return Ok(false);
        }
        let stream = &mut self.streams[index];
        let admitted = match leader {
            Ok(None) => self.engine.admit(namespace, &known, 0).map(Some),
            Ok(found) => {
                stream.leader = found;
                // With groups of layers, the leader keeps the pages that the stream will read. If too many streams
                // follow other prefixes of the leader, this stream finds fewer cached pages.
                if let Some(leader) = found {
                    _ = self.engine.mark(leader.seq, leader.cached_len);
                }
                Ok(None)
            }
            Err(error) => Err(error),
        };
        if is_named {
            // Unused salts must not accumulate. The sequence and the cached pages keep the names that are in use.
            self.engine.forget_namespace(namespace).map_err(refused)?;
        }
        let seq = match admitted {
            Ok(Some(seq)) => seq,
            Ok(None) => return Ok(false),
            Err(error) => return ignore_shortage(error).map(|()| false),
        };
        if self.hands_over {
            // An equal prompt of another server matches here. Without a mark, a layer with a state would keep it at the
            // end of the prompt, where no equal prompt matches if its length is a multiple of a page.
            _ = self.engine.mark(seq, known.len() as u32 - 1);
        }
        stream.seq = Some(seq);
        self.ages += 1;
        stream.age = self.ages;
        if !stream.admitted {
            stream.admitted = true;
            stream.cached_tokens = self.engine.cached_len(seq).map_err(refused)?;
            // Later samples share the computed pages of the first one, which do not count as cached prompt tokens.
            let first = if stream.sample == 0 { stream.cached_tokens } else { 0 };
            self.tally.cached_tokens += u64::from(first);
        }
        Ok(true)
    }

    /// Plans a step and launches it. While a step is in flight (`before`), the function preempts no stream. Otherwise
    /// it drops drafts before it preempts a stream. Returns `None` if no stream can take part, or if pages are short
    /// while a step is in flight.
    pub(super) fn plan(&mut self, before: Option<&InflightStep>) -> Result<Option<InflightStep>> {
        let ahead = before.is_some();
        if !ahead {
            self.give_way()?;
        }
        self.admit()?;
        let mut flight = self.spare.pop().unwrap_or_default();
        let mut drafting = self.policy.drafts;
        loop {
            self.select(ahead, &mut flight, Loading::Skip)?;
            if flight.streams.is_empty() && !ahead {
                self.select(ahead, &mut flight, Loading::Plan)?;
            }
            if flight.streams.is_empty() {
                self.spare.push(flight);
                return Ok(None);
            }
            if let Some(rule) = drafting {
                self.draft(rule, &flight.streams)?;
            }
            self.runner.before_plan()?;
            let drafts = flight.streams.iter().filter_map(|&key| self.streams[key].drafts());
            let drafts: Vec<Draft<'_>> = drafts.collect();
            let (engine, scratch, items) = (&mut self.engine, &mut self.scratch, &self.extends);
            let planned = match self.runner.step_size(items) {
                Some(size) => engine.plan_padded(scratch, items, &drafts, size),
                None => engine.plan_drafts(scratch, items, &drafts),
            };
            let shortage = match planned {
                Ok(plan) => {
                    flight.work.plan.copy_from(&plan);
                    flight.step = plan.step();
                    self.last_step = flight.step;
                    self.describe(&mut flight, before)?;
                    self.clock.lap(Part::Engine);
                    let backend = self.engine.backend_mut();
                    self.runner.launch(backend, &flight.work, &mut self.clock)?;
                    self.save_ahead();
                    return Ok(Some(flight));
                }
                Err(error @ EngineError::Core(kvarena::Error::OutOfPages { .. })) => error,
                Err(error) => return Err(failed(error)),
            };
            if ahead {
                self.spare.push(flight);
                return Ok(None);
            }
            if self.withdraw(&flight.streams)? {
                drafting = None;
                continue;
            }
            if self.running.len() == 1 {
                return Err(failed(shortage));
            }
            self.preempt_youngest()?;
        }
    }

    /// Saves the oldest cached pages, so that later evictions wait for no copy.
    fn save_ahead(&mut self) {
        let pages = self.engine.shape().layout.swap_pages() / AHEAD_PART;
        if pages > 0 {
            // The engine counts failed saves. Pages whose save failed have no copies yet.
            _ = self.engine.save_ahead(pages);
        }
    }

    /// Sets a planned step's input tokens and its draws.
    fn describe(&self, flight: &mut InflightStep, before: Option<&InflightStep>) -> Result<()> {
        let InflightStep { work, streams, pending, scores, changes, .. } = flight;
        let plan = work.plan.plan();
        work.inputs.clear();
        work.inputs.extend(plan.tokens.iter().map(|token| token.raw() as i32));
        work.draws.clear();
        work.edits.clear();
        pending.clear();
        scores.clear();
        for (&index, row) in streams.iter().zip(plan.rows) {
            let stream = &self.streams[index];
            let request = self.request(stream);
            let last = (row.qo_start + row.extend_len - 1) as usize;
            let sample = stream.sample;
            if plan.tokens[last] == TokenId::PENDING {
                let mut samples = before.iter().flat_map(|before| &before.pending);
                let pending = samples.find(|pending| (pending.stream, pending.sample) == (index, sample));
                work.inputs[last] = -1 - pending.expect("the previous step draws the token").draw as i32;
            }
            let seq = stream.seq.expect("a planned stream has a sequence");
            let start = plan.positions[row.qo_start as usize];
            let scored = scored_by(request, stream, start, row.extend_len);
            if !scored.is_empty() {
                let (position, count) = (scored.start, scored.len() as u32);
                scores.push(Score { stream: index, position, draw: work.draws.len(), count });
                work.draws.extend(scored.map(|position| {
                    let row = (row.qo_start + position - start - 1) as usize;
                    Draw { row, sampling: Sampling::default(), sample, index: 0, edits: Edits::default() }
                }));
            }
            // A stream with more prompt to compute has no new token yet.
            if row.kv_len < self.engine.token_count(seq).map_err(refused)? {
                continue;
            }
            // With drafts each token has a draw; without them only the last token has one.
            let first = if stream.drafts().is_some() { row.qo_start as usize } else { last };
            let number = |row: usize| plan.positions[row] + 1 - request.prompt.len() as u32;
            let forked = sample == 0 && number(first) == 0;
            let forks = if forked { request.samples.max(1) } else { 1 };
            let edits = self.add_edits(stream, number(first), changes, &mut work.edits);
            for sample in (1..forks).chain([sample]) {
                pending.push(PendingSample { stream: index, sample, draw: work.draws.len() });
                work.draws.extend((first..=last).map(|row| {
                    let (sampling, index) = (request.sampling, number(row));
                    Draw { row, sampling, sample, index, edits }
                }));
            }
        }
        Ok(())
    }

    /// Appends the edits of a stream's draw after `answer_len` new tokens; `changes` is scratch.
    fn add_edits(&self, stream: &Stream, answer_len: u32, changes: &mut Vec<Edit>, edits: &mut Vec<Edit>) -> Edits {
        let ActiveRequest { request, prompt_tokens, .. } = &self.requests[stream.request_key];
        let Some(shaping) = &request.shaping else { return Edits::default() };
        let (answer, counts) = (&stream.tokens[..], &stream.counts);
        let history = DrawHistory { prompt: prompt_tokens, answer, counts, answer_len };
        shaping.edits(history, &request.stop, changes, edits)
    }

    /// Chooses how many tokens each running stream computes in the next step. Streams of age `capacity_turn` and above
    /// come first, then those of lower age. Streams therefore take turns at a step's capacity of edits and of draws.
    fn select(&mut self, ahead: bool, flight: &mut InflightStep, loading: Loading) -> Result<()> {
        let mut budget = self.policy.chunk;
        let (mut edits, mut draws) = (self.runner.edits_max(), self.runner.draws_max());
        // Draws that all later streams may need, for one new token and its drafts each.
        let mut reserved = self.draws_per_token() * self.running.len();
        flight.streams.clear();
        flight.capacity_turn = 0;
        self.extends.clear();
        let turn = self.capacity_turn;
        let first = self.running.partition_point(|&key| self.streams[key].age < turn);
        let (later, sooner) = self.running.split_at(first);
        for &key in sooner.iter().chain(later) {
            reserved -= self.draws_per_token();
            let Some(seq) = self.streams[key].seq else { continue };
            if loading == Loading::Skip && self.engine.is_loading(seq).map_err(failed)? {
                self.tally.load_waits += 1;
                self.streams[key].loading.get_or_insert_with(Instant::now);
                continue;
            }
            if let Some(since) = self.streams[key].loading.take() {
                self.tally.load_time.add(since.elapsed());
            }
            let stream = &self.streams[key];
            let known = self.engine.token_count(seq).map_err(refused)?;
            let planned = self.engine.planned_len(seq).map_err(refused)?;
            let len = self.next_len(stream, ahead, (planned, known), budget);
            let len = self.engine.next_len(seq, len).map_err(refused)?;
            if len == 0 {
                continue;
            }
            let len = self.cut(stream, (planned, known), len, (draws, reserved));
            // A stream that does not reach its last token in this step needs no edits.
            let needed = if planned + len < known { 0 } else { self.edits_of(stream) };
            let Some(left) = edits.checked_sub(needed).filter(|_| len > 0) else {
                if flight.capacity_turn == 0 {
                    flight.capacity_turn = stream.age;
                }
                continue;
            };
            edits = left;
            draws -= self.draws_of(stream, (planned, known), len);
            let is_prompt = planned < known && !is_last_token(stream, known - planned);
            budget -= if is_prompt { len } else { 0 };
            flight.streams.push(key);
            self.extends.push(Extend { seq, len });
        }
        Ok(())
    }

    /// Returns the number of a stream's tokens for the next step, with at most `budget` tokens of its prompt.
    fn next_len(&self, stream: &Stream, ahead: bool, (planned, known): (u32, u32), budget: u32) -> u32 {
        let request = self.request(stream);
        match known.saturating_sub(planned) {
            // The step in flight will choose a token. Another step is useful unless that token is the stream's last, or
            // the edits of the next draw depend on it.
            0 => {
                let max_new = request.max_new_tokens.unwrap_or(0) as usize;
                let shaping = request.shaping.as_ref();
                let waits = shaping.is_some_and(|shaping| shaping.rules().needs_history());
                let follows = planned == known && stream.tokens.len() + 1 < max_new;
                u32::from(ahead && !waits && follows)
            }
            left if is_last_token(stream, left) => 1,
            left => left.min(budget),
        }
    }

    /// Returns the maximum number of draws of one new token and the drafts after it.
    fn draws_per_token(&self) -> usize {
        1 + self.policy.drafts.map_or(0, |drafts| drafts.tokens as usize)
    }

    /// Returns the maximum number of draws of a stream that computes `len` tokens from `planned` on.
    fn draws_of(&self, stream: &Stream, (planned, known): (u32, u32), len: u32) -> usize {
        let request = self.request(stream);
        let end = planned + len;
        let new = if end < known {
            0
        } else if stream.sample == 0 && end as usize == request.prompt.len() {
            request.samples as usize
        } else {
            self.draws_per_token()
        };
        scored_by(request, stream, planned, len).len() + new
    }

    /// Returns how many of a stream's next `len` tokens the step computes if `draws` of its draws are left; 0 if the
    /// stream must wait. A scored prompt leaves `reserved` draws to other streams, but takes at least one.
    fn cut(&self, stream: &Stream, (planned, known): (u32, u32), len: u32, (draws, reserved): (usize, usize)) -> u32 {
        let needed = self.draws_of(stream, (planned, known), len);
        if scored_by(self.request(stream), stream, planned, len).is_empty() {
            return if needed <= draws { len } else { 0 };
        }
        let available = draws.saturating_sub(reserved).max(1).min(draws);
        // Without its last token, a prompt has at most one draw for each token.
        if needed <= available { len } else { (len - 1).min(available as u32) }
    }

    /// Returns the maximum number of edits of a stream's next draw.
    fn edits_of(&self, stream: &Stream) -> usize {
        let ActiveRequest { request, prompt_tokens, .. } = &self.requests[stream.request_key];
        let known = prompt_tokens.len() + stream.counts.distinct();
        let vocab = self.runner.config().vocab;
        let most = |shaping: &PreparedShaping| shaping.edits_max(known, request.stop.len(), vocab);
        request.shaping.as_ref().map_or(0, |shaping| most(shaping))
    }

    /// Preempts the streams whose states an abort has lost, so that they are computed again from a cached state.
    pub(super) fn preempt_lost(&mut self) -> Result<()> {
        for at in (0..self.running.len()).rev() {
            let seq = self.streams[self.running[at]].seq.expect("a running stream has a sequence");
            if self.engine.is_state_lost(seq).map_err(refused)? {
                self.engine.preempt(seq, Keep::Publish).map_err(refused)?;
                self.preempted.push_front(self.running.remove(at));
                self.tally.preemptions += 1;
            }
        }
        Ok(())
    }

    fn preempt_youngest(&mut self) -> Result<()> {
        let index = self.running.pop().expect("more than one stream runs");
        let seq = self.streams[index].seq.expect("a running stream has a sequence");
        self.engine.preempt(seq, Keep::Publish).map_err(refused)?;
        // The stream is younger than the running ones and older than those preempted before it.
        self.preempted.push_front(index);
        self.tally.preemptions += 1;
        Ok(())
    }
}

/// Returns the prompt tokens whose logits a stream needs from a step that computes `len` tokens from `start` on.
fn scored_by(request: &Request, stream: &Stream, start: u32, len: u32) -> Range<u32> {
    if !request.scores_prompt || stream.sample > 0 {
        return 0..0;
    }
    // The logits of a token are those of the position before it.
    let end = (start + 1 + len).min(request.prompt.len() as u32);
    (start + 1).max(stream.scored)..end
}

/// Returns whether the `left` uncomputed tokens are only the stream's last new token.
fn is_last_token(stream: &Stream, left: u32) -> bool {
    left == 1 && !stream.tokens.is_empty()
}

/// Returns the names of a request's namespace; `None` without a salt. The namespace of a scored prompt gets the name of
/// an adapter that no client can request, so routers match no request with its pages.
fn names_of(request: &Request, namespace: Namespace) -> Option<NamespaceNames> {
    if request.scores_prompt {
        let lora = Some(format!("scored prompt {:x}", namespace.raw()));
        return Some(NamespaceNames { lora, ..Default::default() });
    }
    let salt = String::from(&**request.salt.as_ref()?);
    Some(NamespaceNames { salt: Some(salt), ..Default::default() })
}
