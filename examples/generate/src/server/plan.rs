//! What the next step computes: admission, a plan, and preemption where pages run out.

use kvarena::{EngineError, Extend, Keep, TokenId};

use super::{Flight, Server, failed, later, refused};
use crate::error::Result;
use crate::memory::Memory;

impl<M: Memory> Server<'_, M> {
    /// Admits streams while there are rows and pages: preempted ones first, since they are older.
    fn admit(&mut self) -> Result<()> {
        while self.running.len() < self.policy.concurrency as usize {
            let index = if let Some(&index) = self.preempted.front() {
                let seq = self.streams[index].seq.expect("a preempted stream has a sequence");
                if let Err(error) = self.engine.resume(seq) {
                    return later(error);
                }
                self.preempted.pop_front();
                index
            } else if let Some(&index) = self.waiting.front() {
                if !self.admit_new(index)? {
                    return Ok(());
                }
                self.waiting.pop_front();
                index
            } else {
                return Ok(());
            };
            let age = self.streams[index].age;
            let place = self.running.partition_point(|&other| self.streams[other].age < age);
            self.running.insert(place, index);
        }
        Ok(())
    }

    /// Admits a stream that has no sequence; false if there is no room.
    fn admit_new(&mut self, index: usize) -> Result<bool> {
        let stream = &mut self.streams[index];
        let request = &self.requests[stream.request];
        let said = TokenId::wrap(&stream.tokens);
        let known = [&request.prompt[..], said].concat();
        let seq = match self.engine.admit(request.namespace, &known) {
            Ok(seq) => seq,
            Err(error) => return later(error).map(|()| false),
        };
        stream.seq = Some(seq);
        self.ages += 1;
        stream.age = self.ages;
        if !stream.admitted {
            stream.admitted = true;
            stream.cached_tokens = self.engine.cached_len(seq).map_err(refused)?;
        }
        Ok(true)
    }

    /// Plans a step. `ahead`: while another is in flight; then nobody is preempted for it.
    pub(super) fn plan(&mut self, ahead: bool) -> Result<Option<Flight>> {
        self.admit()?;
        let mut flight = self.spare.pop().unwrap_or_default();
        loop {
            self.select(ahead, &mut flight.streams)?;
            if flight.streams.is_empty() {
                return Ok(None);
            }
            let shortage = match self.engine.plan_batch(&mut self.scratch, &self.extends) {
                Ok(plan) => {
                    flight.plan.copy_from(&plan);
                    flight.step = plan.step();
                    self.last_step = flight.step;
                    return Ok(Some(flight));
                }
                Err(error @ EngineError::Core(kvarena::Error::OutOfPages { .. })) => error,
                Err(error) => return Err(failed(error)),
            };
            if ahead {
                return Ok(None);
            }
            if self.running.len() == 1 {
                return Err(failed(shortage));
            }
            self.preempt_youngest()?;
        }
    }

    /// Chooses what each running stream computes next, oldest first.
    fn select(&mut self, ahead: bool, streams: &mut Vec<usize>) -> Result<()> {
        let mut budget = self.policy.chunk;
        streams.clear();
        self.extends.clear();
        for &index in &self.running {
            let stream = &self.streams[index];
            let Some(seq) = stream.seq else { continue };
            let known = self.engine.token_count(seq).map_err(refused)?;
            let planned = self.engine.planned_len(seq).map_err(refused)?;
            let max_new = self.requests[stream.request].max_new_tokens.unwrap_or(0) as usize;
            let len = match known.saturating_sub(planned) {
                // The step in flight will say a token; the one after it is worth planning unless that is the last.
                0 => u32::from(ahead && planned == known && stream.tokens.len() + 1 < max_new),
                1 if !stream.tokens.is_empty() => 1,
                left => {
                    let len = left.min(budget);
                    budget -= len;
                    len
                }
            };
            if len > 0 {
                streams.push(index);
                self.extends.push(Extend { seq, len });
            }
        }
        Ok(())
    }

    fn preempt_youngest(&mut self) -> Result<()> {
        let index = self.running.pop().expect("more than one stream runs");
        let seq = self.streams[index].seq.expect("a running stream has a sequence");
        self.engine.preempt(seq, Keep::Publish).map_err(refused)?;
        // It is younger than the running ones and older than those preempted before it.
        self.preempted.push_front(index);
        self.tally.preemptions += 1;
        Ok(())
    }
}
