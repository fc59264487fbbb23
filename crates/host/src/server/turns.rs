//! Fair turns: each group of requests gets an equal share of the running streams, so that a group with many streams
//! does not block another group.

use std::collections::HashMap;

use kvarena::Namespace;

use super::{Server, refused};
use crate::error::Result;
use crate::runner::Runner;
use crate::stream::StreamKey;

/// Lower bound of the namespaces of requests whose prompts are computed without the cache.
const SCORED: u64 = 1 << 63;

impl<R: Runner> Server<R> {
    /// Returns the number of running streams by group.
    fn shares(&self) -> HashMap<u64, usize> {
        let mut shares = HashMap::new();
        for &key in &self.running {
            *shares.entry(self.group(key)).or_default() += 1;
        }
        shares
    }

    fn group(&self, key: StreamKey) -> u64 {
        self.requests[self.streams[key].request_key].group
    }

    /// Returns the stream to admit next, and its index among the waiting ones: the first of the group with the fewest
    /// running streams. Returns `None` if no stream waits, or all follow a leader or search stores. O(waiting + running).
    pub(super) fn next_waiting(&self) -> Option<(usize, StreamKey)> {
        if self.waiting.is_empty() {
            return None;
        }
        let shares = self.shares();
        let waiting = self.waiting.iter().copied().enumerate();
        let ready = waiting.filter(|&(_, key)| !self.follows(key) && !self.is_searching(key));
        ready.min_by_key(|&(entry, key)| (shares.get(&self.group(key)).copied().unwrap_or(0), entry))
    }

    /// Returns whether all rows are in use, no stream is preempted, and the next stream's group has at least two
    /// running streams fewer than another group.
    pub(super) fn is_unfair(&self) -> bool {
        self.gives_way().is_some()
    }

    /// Returns the youngest stream of the group with the most running streams, if it must yield.
    fn gives_way(&self) -> Option<StreamKey> {
        let is_full = self.running.len() >= self.policy.concurrency as usize;
        if !is_full || !self.preempted.is_empty() {
            return None;
        }
        let (_, next) = self.next_waiting()?;
        let shares = self.shares();
        let fewest = shares.get(&self.group(next)).copied().unwrap_or(0);
        let (&group, &most) = shares.iter().max_by_key(|&(&group, &count)| (count, group))?;
        let youngest = || self.running.iter().rev().copied().find(|&key| self.group(key) == group);
        if most >= fewest + 2 { youngest() } else { None }
    }

    /// If turns are unfair, moves one stream of the largest group back to the queue. Its computed prefix stays cached.
    /// The caller must have no step in flight.
    pub(super) fn give_way(&mut self) -> Result<()> {
        if let Some(key) = self.gives_way() {
            let stream = &mut self.streams[key];
            if let Some(seq) = stream.seq.take() {
                self.engine.finish(seq).map_err(refused)?;
            }
            self.running.retain(|&other| other != key);
            self.waiting.push_back(key);
            self.tally.preemptions += 1;
        }
        Ok(())
    }

    /// Returns the namespace of a stream's prefix. A request whose whole prompt must be computed has its own namespace.
    pub(super) fn namespace(&self, key: StreamKey) -> Namespace {
        let stream = &self.streams[key];
        let request = self.request(stream);
        if request.scores_prompt { Namespace::new(SCORED | stream.request as u64) } else { request.namespace }
    }
}
