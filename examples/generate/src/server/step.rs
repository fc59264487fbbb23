//! Executing a planned step, and what becomes of the streams then.

use kvarena::{EngineError, TokenId};

use super::{Flight, Server, Sink, failed, later, refused};
use crate::clock::Part;
use crate::error::Result;
use crate::runner::Runner;
use crate::stream::{Finish, Stream};

impl<R: Runner> Server<R> {
    /// Waits for a step's tokens.
    pub(super) fn collect(&mut self, flight: &Flight) -> Result<()> {
        let steps = self.tally.steps + self.tally.aborted_steps + 1;
        let fail = self.policy.fail_every.is_some_and(|n| steps.is_multiple_of(n));
        let (backend, clock) = (self.engine.backend_mut(), &mut self.clock);
        self.runner.collect(backend, &flight.work, fail, &mut self.tokens, clock)
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
        for (draw, say) in flight.says.iter().enumerate() {
            let stream = &self.streams[say.stream];
            // One that ended after this step was planned says no more.
            if stream.finish.is_some() {
                continue;
            }
            let index = match say.sample == stream.sample {
                true => say.stream,
                false => self.fork(say.stream, say.sample)?,
            };
            self.say(index, draw, sink)?;
        }
        // A fork's step comes after one planned ahead, and is completed with the step after that.
        let done = if ahead { flight.step } else { self.last_step };
        self.engine.complete(done).map_err(refused)?;
        self.spare.push(flight);
        self.clock.lap(Part::Engine);
        Ok(())
    }

    /// Makes another sample of a stream whose prompt is computed, sharing its pages; without room for it now, it waits.
    fn fork(&mut self, parent: usize, sample: u32) -> Result<usize> {
        let Stream { request, submitted, seq, .. } = self.streams[parent];
        let mut stream = Stream::new(request, sample, submitted);
        let index = self.streams.len();
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
        Ok(index)
    }

    /// A stream says the token of a draw, and ends or goes on with it.
    fn say(&mut self, index: usize, draw: usize, sink: &mut impl Sink) -> Result<()> {
        let stream = &mut self.streams[index];
        let request = &self.requests[stream.request];
        let token = self.tokens[draw];
        stream.tokens.push(token);
        stream.first_token_after.get_or_insert_with(|| stream.submitted.elapsed());
        self.tally.new_tokens += 1;
        sink.token(stream, self.runner.logits(draw));
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
