//! Prompts of which stores shall have all that the engine has, before the host reports them as computed.
//!
//! ```text
//! confirm --> names of records that were put --[have]--> restate_puts --> turn: puts --> report
//! ```

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvarena::Engine;
use kvarena::id::{Namespace, TokenId};

use super::jobs::Ask;
use super::ranks::RankMemory;
use super::{Find, Tier};

/// A prompt that waits until stores have its records.
pub(super) struct Confirm {
    pub id: u64,
    namespace: Namespace,
    prompt: Arc<[TokenId]>,
    pub deadline: Instant,
    /// Whether the stores have answered which records they have.
    is_asked: bool,
}

impl<B> Tier<B>
where
    B: RankMemory,
{
    /// Makes sure that a store has all records that the engine has of a prompt: asks the stores for those that were
    /// put, and puts the others and those that the stores have lost. `id` identifies the prompt for [`Tier::turn`],
    /// which reports it when its last put is done. A store that fails does not delay the prompt for longer than
    /// [`TierOptions::put_deadline`](super::TierOptions) and twice the estimated time of its puts. O(prompt).
    ///
    /// A server that only computes prompts calls it before it reports a prompt as computed.
    pub fn confirm(&mut self, id: u64, engine: &mut Engine<B>, namespace: Namespace, prompt: &[TokenId]) -> Find {
        let mut put = Vec::new();
        let lacking = engine.restate_puts(namespace, prompt, |group, place| {
            put.push((group, place));
            true
        });
        // The prompt has no name if nothing of it is cached.
        let (Ok(lacking), Ok(Some(lookup))) = (lacking, engine.lookup(namespace, prompt)) else { return Find::Ready };
        if lacking == 0 && put.is_empty() {
            return Find::Ready;
        }
        self.waits.confirmed += 1;
        if self.shared.writer(0).is_none() {
            self.waits.unconfirmed += 1;
            return Find::Ready;
        }
        let (serial, prompt) = (self.next, Arc::<[TokenId]>::from(prompt));
        self.next += 1;
        let records = u64::from(lacking) + put.len() as u64;
        let deadline = Instant::now() + self.options.put_deadline + 2 * self.put_time(records);
        let is_asked = put.is_empty();
        let confirm = Confirm { id, namespace, prompt: Arc::clone(&prompt), deadline, is_asked };
        self.confirms.insert(serial, confirm);
        self.alarm.set(deadline);
        // The next turn puts records that wait.
        self.alarm.set(Instant::now());
        if !is_asked {
            // No rule excludes a store: the question is not whether to read.
            let most = (u64::MAX, 0);
            let space = self.shared.space(lookup.names());
            let ask = Ask { is_exact: true, ..Ask::new(serial, space, lookup, prompt, most, put) };
            self.shared.ask(0, Box::new(ask));
        }
        Find::Waiting
    }

    /// Takes the answer to the question for a prompt's records.
    pub(super) fn restate(&mut self, engine: &mut Engine<B>, ask: &Ask) {
        let Some(confirm) = self.confirms.get_mut(&ask.find) else { return };
        confirm.is_asked = true;
        self.has_put = true;
        if !ask.has_answer {
            return;
        }
        // Records that were put after the question are there.
        let lost: HashSet<_> = ask.wanted.iter().filter(|at| !ask.located.contains_key(at)).collect();
        let stored = |group, place| !lost.contains(&(group, place));
        // An error leaves nothing to put, and ends the wait.
        _ = engine.restate_puts(confirm.namespace, &confirm.prompt, stored);
    }

    /// Collects the prompts that do not wait any more.
    pub(super) fn end_confirms(&mut self, engine: &mut Engine<B>, ready: &mut Vec<u64>) {
        let (now, has_writer) = (Instant::now(), self.shared.writer(0).is_some());
        let (waits, has_put) = (&mut self.waits, std::mem::take(&mut self.has_put));
        self.confirms.retain(|_, confirm| {
            let mut lacking = || engine.restate_puts(confirm.namespace, &confirm.prompt, |_, _| true);
            let is_stored = has_put && confirm.is_asked && lacking() == Ok(0);
            let is_over = is_stored || !has_writer || now >= confirm.deadline;
            if is_over {
                waits.unconfirmed += u64::from(!is_stored);
                ready.push(confirm.id);
            }
            !is_over
        });
    }

    /// Returns the time that puts of records take, at the write rate and at most 1 GB/s.
    fn put_time(&self, records: u64) -> Duration {
        let groups = 0..self.shared.groups.len() as u32;
        let largest = groups.map(|group| self.record_bytes(group)).max().unwrap_or(0);
        let rate = self.options.write_rate.unwrap_or(u64::MAX).clamp(1, 1_000_000_000);
        Duration::from_secs_f64(records as f64 * largest as f64 / rate as f64)
    }
}
