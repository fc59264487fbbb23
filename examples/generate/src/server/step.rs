//! Executing a planned step, and what becomes of the streams then.

use kvarena::{Attend, EngineError, TokenId};

use super::{Flight, Server, Sink, failed, later, refused};
use crate::clock::Part;
use crate::error::Result;
use crate::memory::{BackendError, Memory, Paged, StepError};
use crate::model::Pass;
use crate::sample::Sampler;
use crate::stream::{Finish, Stream};

impl<M: Memory> Server<'_, M> {
    /// Runs the model over a planned step.
    pub(super) fn execute(
        &mut self,
        flight: &mut Flight,
    ) -> std::result::Result<(), StepError<BackendError<M>>> {
        let plan = flight.plan.plan();
        self.tokens.clear();
        self.tokens.extend_from_slice(TokenId::peel(plan.tokens));
        self.wanted.clear();
        flight.sampled.clear();
        for (i, (&index, row)) in flight.streams.iter().zip(plan.rows).enumerate() {
            let stream = &self.streams[index];
            let last = (row.qo_start + row.extend_len - 1) as usize;
            if plan.tokens[last] == TokenId::PENDING {
                // Known by now, unless the stream ended; then any token will do.
                self.tokens[last] = stream.tokens.last().copied().unwrap_or(0);
            }
            // A stream that ended meanwhile has no sequence; one with more to compute says nothing yet.
            let known = stream.seq.and_then(|seq| self.engine.token_count(seq).ok());
            if known == Some(row.kv_len) {
                self.wanted.push(last);
                flight.sampled.push(i);
            }
        }
        let config = &self.model.config;
        let steps = self.tally.steps + self.tally.aborted_steps + 1;
        let fails = self.policy.fail_every.is_some_and(|n| steps.is_multiple_of(n));
        let mut attention = Paged {
            memory: &mut self.memory,
            backend: self.engine.backend_mut(),
            plan,
            attend: Attend::new(config.q_heads as u32, config.head_dim as u32),
            fail_at: fails.then_some(config.layers / 2),
        };
        let pass = Pass { tokens: &self.tokens, positions: plan.positions, wanted: &self.wanted };
        self.model.forward(pass, &mut attention, &mut self.work, &mut self.clock)
    }

    /// Takes over what a step computed.
    pub(super) fn accept(
        &mut self,
        flight: Flight,
        ahead: bool,
        sink: &mut impl Sink,
    ) -> Result<()> {
        self.engine.commit(flight.step).map_err(refused)?;
        self.tally.steps += 1;
        let vocab = self.model.config.vocab;
        let logits = std::mem::take(&mut self.work.logits);
        for (&i, logits) in flight.sampled.iter().zip(logits.chunks_exact(vocab)) {
            let index = flight.streams[i];
            let stream = &self.streams[index];
            let request = &self.requests[stream.request];
            if stream.sample == 0 && stream.tokens.is_empty() {
                for sample in 1..request.samples.max(1) {
                    self.fork(index, sample, logits, sink)?;
                }
            }
            self.say(index, logits, sink)?;
        }
        self.work.logits = logits;
        // A fork's step comes after one planned ahead, and is completed with the step after that.
        let done = if ahead { flight.step } else { self.last_step };
        self.engine.complete(done).map_err(refused)?;
        self.spare.push(flight);
        self.clock.lap(Part::Engine);
        Ok(())
    }

    /// Makes another sample of a stream whose prompt is computed, sharing its pages; without room for it now, it waits.
    fn fork(
        &mut self,
        parent: usize,
        sample: u32,
        logits: &[f32],
        sink: &mut impl Sink,
    ) -> Result<()> {
        let Stream { request, submitted, seq, .. } = self.streams[parent];
        let sampler = Sampler::new(self.requests[request].sampling, sample);
        let mut stream = Stream::new(request, sample, sampler, submitted);
        let index = self.streams.len();
        let room = self.running.len() < self.policy.concurrency as usize;
        if let Some(parent) = seq.filter(|_| room) {
            match self.engine.fork(parent) {
                Ok(forked) => {
                    self.last_step = forked.step.unwrap_or(self.last_step);
                    stream.seq = Some(forked.child);
                    stream.admitted = true;
                    let cached = self.engine.cached_len(forked.child).map_err(refused)?;
                    stream.cached_tokens = cached;
                    self.ages += 1;
                    stream.age = self.ages;
                    self.running.push(index);
                    self.tally.forks += 1;
                }
                Err(EngineError::Core(error)) => later(error)?,
                Err(error) => return Err(failed(error)),
            }
        }
        if stream.seq.is_none() {
            self.waiting.push_front(index);
        }
        self.streams.push(stream);
        self.open[request] += 1;
        self.say(index, logits, sink)
    }

    /// Chooses a stream's next token, and ends the stream or goes on with it.
    fn say(&mut self, index: usize, logits: &[f32], sink: &mut impl Sink) -> Result<()> {
        self.clock.lap(Part::Engine);
        let stream = &mut self.streams[index];
        let request = &self.requests[stream.request];
        let token = stream.sampler.choose(logits);
        self.clock.lap(Part::Sampling);
        stream.tokens.push(token);
        stream.first_token_after.get_or_insert_with(|| stream.submitted.elapsed());
        self.tally.new_tokens += 1;
        sink.token(stream, logits);
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

    /// Ends the streams whose clients have gone away.
    pub(super) fn cancel(&mut self, sink: &mut impl Sink) -> Result<()> {
        let live =
            [&self.running[..], self.preempted.make_contiguous(), self.waiting.make_contiguous()];
        for index in live.concat() {
            let stream = &self.streams[index];
            let request = &self.requests[stream.request];
            let gone = request.cancel_after.is_some_and(|n| stream.tokens.len() as u32 >= n);
            if request.max_new_tokens == Some(0) {
                // Nothing is asked for: it ends before it takes part in a step.
                self.end(index, Finish::Length, sink)?;
            } else if gone || sink.cancelled(stream) {
                self.tally.cancelled += 1;
                self.end(index, Finish::Cancelled, sink)?;
            }
        }
        Ok(())
    }

    /// Ends a stream; its pages go back, its computed prefix stays.
    fn end(&mut self, index: usize, finish: Finish, sink: &mut impl Sink) -> Result<()> {
        let stream = &mut self.streams[index];
        stream.finish = Some(finish);
        self.running.retain(|&other| other != index);
        self.preempted.retain(|&other| other != index);
        self.waiting.retain(|&other| other != index);
        if let Some(seq) = stream.seq.take() {
            self.engine.finish(seq).map_err(refused)?;
        }
        let open = &mut self.open[stream.request];
        *open -= 1;
        sink.done(stream, *open == 0);
        Ok(())
    }
}
