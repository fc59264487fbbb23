//! Collects a launched step and updates its streams; ends streams.

use kvarena::{EngineError, TokenId};

use super::{InflightStep, Server, Sink, failed, ignore_shortage, refused};
use crate::clock::Part;
use crate::error::Result;
use crate::runner::Runner;
use crate::stream::{Finish, Stream, StreamKey};

impl<R: Runner> Server<R> {
    /// Waits for a step's tokens.
    pub(super) fn collect(&mut self, flight: &InflightStep) -> Result<()> {
        // A failed step counts once, although the step planned after it is aborted too.
        let steps = self.tally.steps + self.tally.failed_steps + 1;
        let fail = self.policy.fail_every.is_some_and(|n| steps.is_multiple_of(n));
        let (backend, clock) = (self.engine.backend_mut(), &mut self.clock);
        self.runner.collect(backend, &flight.work, fail, &mut self.tokens, clock)
    }

    /// Applies the results of a step.
    pub(super) fn accept(&mut self, flight: InflightStep, ahead: bool, sink: &mut impl Sink) -> Result<()> {
        self.keep(&flight)?;
        self.engine.commit(flight.step).map_err(refused)?;
        self.capacity_turn = flight.capacity_turn;
        self.tally.steps += 1;
        for score in &flight.scores {
            let Some(stream) = self.streams.get_mut(score.stream) else { continue };
            for i in 0..score.count {
                sink.prompt(stream, score.position + i, self.runner.logits(score.draw + i as usize));
            }
            stream.scored = stream.scored.max(score.position + score.count);
        }
        for (i, pending) in flight.pending.iter().enumerate() {
            // A stream that ended after the plan of this step takes no more tokens.
            let Some(stream) = self.streams.get(pending.stream) else { continue };
            let is_own = pending.sample == stream.sample;
            let index = if is_own { pending.stream } else { self.fork(pending.stream, pending.sample)? };
            for n in 0..self.branches.get(i).len() {
                let branch = self.branches.get(i);
                let (draw, is_last) = (pending.draw + branch[n] as usize, n + 1 == branch.len());
                if flight.work.forbids(draw, self.tokens[draw]) {
                    // No token is allowed. A shaped stream has no drafts, so this draw is its only one.
                    self.end(index, Finish::Stop, sink)?;
                    break;
                }
                self.add_token(index, (draw, is_last), sink)?;
            }
        }
        // The copies of a fork form a separate step. If a step was planned ahead, the fork comes after that step, so
        // the fork is not complete now.
        let done = if ahead { flight.step } else { self.last_step };
        self.engine.complete(done).map_err(refused)?;
        self.spare.push(flight);
        self.clock.lap(Part::Engine);
        Ok(())
    }

    /// Creates another sample of a stream whose prompt is computed. Both share the prompt's pages. If there are too few
    /// pages or rows, the sample waits.
    fn fork(&mut self, parent: StreamKey, sample: u32) -> Result<StreamKey> {
        let Stream { request, request_key, submitted, seq, .. } = self.streams[parent];
        let mut stream = Stream::new((request_key, request), sample, submitted);
        let room = self.running.len() < self.policy.concurrency as usize;
        if let Some(parent) = seq.filter(|_| room) {
            match self.engine.fork(parent, 1, 0) {
                Ok(forked) => {
                    self.last_step = forked.step.unwrap_or(self.last_step);
                    let child = forked.children[0];
                    stream.seq = Some(child);
                    stream.admitted = true;
                    let cached = self.engine.cached_len(child).map_err(refused)?;
                    stream.cached_tokens = cached;
                    self.ages += 1;
                    stream.age = self.ages;
                    self.tally.forks += 1;
                }
                // The state is ahead of the prompt. The sample waits, and computes what is not cached.
                Err(EngineError::Core(kvarena::Error::StateAhead { .. } | kvarena::Error::StateLost { .. })) => {}
                Err(EngineError::Core(error)) => ignore_shortage(error)?,
                Err(error) => return Err(failed(error)),
            }
        }
        let runs = stream.seq.is_some();
        let key = self.streams.insert(stream);
        if runs {
            self.running.push(key)
        } else {
            self.waiting.push_front(key)
        }
        self.requests[request_key].open += 1;
        Ok(key)
    }

    /// Appends the token of a draw to a stream. The sequence already contains all tokens of a step except the last one.
    /// If the last token does not end the stream, the function appends it to the sequence.
    fn add_token(&mut self, index: StreamKey, (draw, is_last): (usize, bool), sink: &mut impl Sink) -> Result<()> {
        let stream = &mut self.streams[index];
        let request = &self.requests[stream.request_key].request;
        let token = self.tokens[draw];
        stream.tokens.push(token);
        if request.shaping.as_ref().is_some_and(|shaping| shaping.rules().penalises()) {
            stream.counts.add(token);
        }
        if stream.tokens.len() == 1 {
            self.tally.first_token.add(stream.submitted.elapsed());
        }
        self.tally.new_tokens += 1;
        sink.token(stream, self.runner.logits(draw));
        if !is_last {
            return Ok(());
        }
        let finish = if request.stop.contains(&token) {
            Finish::Stop
        } else if stream.tokens.len() as u32 >= request.max_new_tokens.unwrap_or(0) {
            Finish::Length
        } else {
            return match stream.seq {
                Some(seq) => self.engine.append(seq, &[TokenId::new(token)]).map_err(refused),
                None => Ok(()),
            };
        };
        self.end(index, finish, sink)
    }

    /// Ends the streams that request no token, have reached `cancel_after`, or that the sink ends.
    pub(super) fn cancel(&mut self, sink: &mut impl Sink) -> Result<()> {
        let live = [&self.running[..], self.preempted.make_contiguous(), self.waiting.make_contiguous()];
        for index in live.concat() {
            let stream = &self.streams[index];
            let request = self.request(stream);
            let gone = request.cancel_after.is_some_and(|n| stream.tokens.len() as u32 >= n);
            // If no token is requested, the stream ends before it takes part in a step.
            let finish = match request.max_new_tokens {
                Some(0) => Some(Finish::Length),
                _ if gone => Some(Finish::Cancelled),
                _ => sink.ends(stream),
            };
            if let Some(finish) = finish {
                self.tally.cancelled += u64::from(finish == Finish::Cancelled);
                self.end(index, finish, sink)?;
            }
        }
        Ok(())
    }

    /// Ends a stream: its pages are released, and its computed prefix stays cached.
    fn end(&mut self, index: StreamKey, finish: Finish, sink: &mut impl Sink) -> Result<()> {
        self.end_search(index);
        let mut stream = self.streams.remove(index).expect("a stream ends once");
        stream.finish = Some(finish);
        self.running.retain(|&other| other != index);
        self.preempted.retain(|&other| other != index);
        self.waiting.retain(|&other| other != index);
        if let Some(seq) = stream.seq.take() {
            self.engine.finish(seq).map_err(refused)?;
        }
        let active = &mut self.requests[stream.request_key];
        active.open -= 1;
        if active.open > 0 {
            sink.done(&stream, false);
        } else if let Some(ended) = self.requests.remove(stream.request_key) {
            self.end_request((index, stream), &ended, sink);
        }
        Ok(())
    }
}
