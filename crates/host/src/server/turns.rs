//! Whose turn it is: groups of requests share the running streams evenly, so that one with many choices keeps no other
//! waiting.

use std::collections::HashMap;

use kvarena::Namespace;

use super::{Server, refused};
use crate::error::Result;
use crate::runner::Runner;
use crate::stream::StreamKey;

/// Namespaces from here on are of requests whose prompts are computed whole.
const SCORED: u64 = 1 << 63;

impl<R: Runner> Server<R> {
    /// Running streams by group.
    fn shares(&self) -> HashMap<u64, usize> {
        let mut shares = HashMap::new();
        for &key in &self.running {
            *shares.entry(self.group(key)).or_default() += 1;
        }
        shares
    }

    fn group(&self, key: StreamKey) -> u64 {
        self.asked[self.streams[key].asked].group
    }

    /// The stream to admit next, and its place among those that wait: the first one of the group with the fewest running
    /// streams. None where all follow a leader. O(waiting + running).
    pub(super) fn next_waiting(&self) -> Option<(usize, StreamKey)> {
        if self.waiting.is_empty() {
            return None;
        }
        let shares = self.shares();
        let waiting = self.waiting.iter().copied().enumerate();
        let ready = waiting.filter(|&(_, key)| !self.follows(key));
        ready
            .min_by_key(|&(entry, key)| (shares.get(&self.group(key)).copied().unwrap_or(0), entry))
    }

    /// Whether all rows are taken and the stream to admit next is of a group that has at least two running streams fewer
    /// than another one.
    pub(super) fn is_unfair(&self) -> bool {
        self.gives_way().is_some()
    }

    /// The youngest stream of the group with the most running streams, if it is to give way.
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

    /// Lets streams of crowded groups wait again, as long as that is unfair; what they have computed stays cached. Called
    /// where no step is in flight.
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

    /// The namespace of a stream's prefix: one of its own where all of the prompt is to be computed.
    pub(super) fn namespace(&self, key: StreamKey) -> Namespace {
        let stream = &self.streams[key];
        let request = self.request(stream);
        match request.scores_prompt {
            true => Namespace::new(SCORED | stream.request as u64),
            false => request.namespace,
        }
    }
}
