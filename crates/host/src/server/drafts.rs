//! Drafts of streams: proposed before a step is planned, checked by the step, and kept if accepted.
//!
//! The step draws a token after each draft and after the token before the drafts. The loop accepts a draft if its
//! parent is accepted and the draft equals the token drawn after the parent, unless that token ends the text. The
//! tokens therefore equal those without drafts, greedy or not. A step may generate several tokens of a stream, within
//! the stream's limit.
//!
//! Drafts are tokens of a stream's sequence only while a step checks them. If the pool has too few pages for a step
//! with drafts, the loop plans the step without them before it preempts a stream.

use kvarena::TokenId;
use kvarena::plan::Branch;

use super::{InflightStep, Server, failed, ignore_shortage, refused};
use crate::draft::Drafting;
use crate::error::Result;
use crate::runner::Runner;
use crate::stream::StreamKey;

impl<R: Runner> Server<R> {
    /// Appends drafts to the streams that are about to compute one token; the step checks them.
    pub(super) fn draft(&mut self, rule: Drafting, streams: &[StreamKey]) -> Result<()> {
        for (&key, extend) in streams.iter().zip(&mut self.extends) {
            let stream = &mut self.streams[key];
            let request = &self.requests[stream.request_key].request;
            let generated = stream.tokens.len();
            let known = request.prompt.len() + generated;
            let planned = self.engine.planned_len(extend.seq).map_err(refused)?;
            // A stream gets no drafts before its first new token, or while it computes its earlier tokens after a
            // resume. A shaped stream gets no drafts at all, because the edits of a draw after a draft would depend on
            // that draft.
            if generated == 0 || planned as usize + 1 != known || request.shaping.is_some() {
                continue;
            }
            let cancel = request.cancel_after.unwrap_or(u32::MAX);
            let most = request.max_new_tokens.unwrap_or(0).min(cancel) as usize;
            // The step may generate one token more than it has drafts.
            let depth = most.saturating_sub(generated + 1);
            let room = self.engine.shape().max_sequence_len as usize - known;
            let drafter = &mut stream.drafter;
            let prompt = request.prompt.iter().map(|token| token.raw());
            let prediction = request.prediction.iter().copied();
            let text = prediction.chain(prompt).chain(stream.tokens.iter().copied());
            drafter.history.extend(text.skip(drafter.history.len()));
            let rule = Drafting { tokens: rule.tokens.min(room as u32), ..rule };
            drafter.history.guess(rule, depth, &mut drafter.drafts);
            let appended = self.engine.append(extend.seq, TokenId::from_raw(drafter.drafts.guesses()));
            if let Err(error) = appended {
                drafter.drafts.clear();
                ignore_shortage(error)?;
            }
            if !drafter.drafts.is_chain() {
                drafter.tree.set(planned, drafter.drafts.parents()).map_err(refused)?;
            }
            extend.len += drafter.drafts.len() as u32;
        }
        Ok(())
    }

    /// Removes drafts that no step checks from these streams. Returns whether there were any.
    pub(super) fn withdraw(&mut self, streams: &[StreamKey]) -> Result<bool> {
        let mut some = false;
        for &key in streams {
            let Some(stream) = self.streams.get_mut(key) else { continue };
            let drafts = &mut stream.drafter.drafts;
            let seq = stream.seq.filter(|_| !drafts.is_empty());
            drafts.clear();
            if let Some(seq) = seq {
                let known = self.requests[stream.request_key].request.prompt.len() + stream.tokens.len();
                self.engine.rollback(seq, known as u32).map_err(refused)?;
                some = true;
            }
        }
        Ok(some)
    }

    /// Keeps the accepted drafts of a step, before its commit. `branches` then contains the accepted branch of each
    /// pending sample.
    pub(super) fn keep(&mut self, flight: &InflightStep) -> Result<()> {
        let Self { engine, streams, requests, tokens, tally, branches, .. } = self;
        branches.clear();
        for pending in &flight.pending {
            let start = branches.numbers.len();
            let kept = &mut branches.numbers;
            match streams.get_mut(pending.stream) {
                Some(stream) if !stream.drafter.drafts.is_empty() => {
                    let (drafts, stop) = (&stream.drafter.drafts, &requests[stream.request_key].request.stop);
                    let generated = &tokens[pending.draw..][..=drafts.len()];
                    drafts.branch(generated, |token| stop.contains(&token), kept);
                    let (drafted, accepted) = (drafts.len() as u32, (kept.len() - start - 1) as u32);
                    tally.checks += 1;
                    tally.drafted += u64::from(drafted);
                    tally.accepted += u64::from(accepted);
                    stream.drafted += drafted;
                    stream.accepted += accepted;
                }
                _ => kept.push(0),
            }
            branches.ends.push(branches.numbers.len());
        }
        let drafted = flight.pending.iter().enumerate().filter_map(|(i, pending)| {
            let stream = streams.get(pending.stream).filter(|stream| !stream.drafter.drafts.is_empty());
            let seq = stream.and_then(|stream| stream.seq)?;
            Some(Branch { seq, tokens: branches.get(i) })
        });
        let drafted: Vec<Branch<'_>> = drafted.collect();
        if !drafted.is_empty() {
            engine.accept_batch(flight.step, &drafted).map_err(failed)?;
        }
        for pending in &flight.pending {
            if let Some(stream) = streams.get_mut(pending.stream) {
                stream.drafter.drafts.clear();
            }
        }
        Ok(())
    }
}

/// The accepted branch of each pending sample of a step: numbers of tokens, the root (0) first.
#[derive(Default)]
pub(super) struct Branches {
    numbers: Vec<u32>,
    /// End of each branch in `numbers`.
    ends: Vec<usize>,
}

impl Branches {
    fn clear(&mut self) {
        self.numbers.clear();
        self.ends.clear();
    }

    /// Returns the accepted branch of pending sample `index`.
    pub fn get(&self, index: usize) -> &[u32] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.numbers[start..self.ends[index]]
    }
}
