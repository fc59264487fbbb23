//! Requests that wait, and the fetches for them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvarena::Engine;
use kvarena::id::{Namespace, SwapPageId, TokenId};
use kvarena::moves::{FetchId, Lookup};

use super::Tier;
use super::jobs::{Ask, Get, Job, Key};
use super::ranks::RankMemory;
use super::repeat::Repeat;
use crate::name::Name;

/// A request that waits.
pub(super) struct Request {
    pub id: u64,
    pub namespace: Namespace,
    pub prompt: Arc<[TokenId]>,
    pub begin: Instant,
    pub deadline: Instant,
    /// The answer of the stores.
    pub ask: Option<Box<Ask>>,
    /// The fetch whose end the request awaits, and whether it is the request's own.
    pub fetch: Option<(u64, bool)>,
    /// Pages that its fetches brought.
    pub pages: u32,
    /// Tokens and bytes of all records that the prompt lacked.
    pub most: (u64, u64),
    pub repeat: Repeat,
}

/// An open fetch.
pub(super) struct Fetching {
    pub id: FetchId,
    pub names: Vec<Name>,
    pub results: Vec<Option<bool>>,
    /// Number of records without a result.
    pub open: usize,
    /// Pages of group 0 of each record.
    pub pages: Vec<u32>,
    pub has_groups: bool,
    /// Whether a request has waited for it in vain: no other one waits.
    pub is_late: bool,
}

impl<B> Tier<B>
where
    B: RankMemory,
{
    /// Begins the fetch of a request whose question has an answer, or ends its wait.
    pub(super) fn advance(&mut self, engine: &mut Engine<B>, serial: u64, ready: &mut Vec<(u64, u32)>) {
        let is_patient = self.is_patient(engine, serial);
        // A fetch with cells brings all of a target's tails, so each longer target would bring others.
        let fetch = if is_patient && self.shared.has_cells { None } else { self.begin_fetch(engine, serial) };
        let request = self.requests.get_mut(&serial).expect("the caller has found it");
        request.fetch = fetch;
        match fetch {
            Some(_) => {}
            None if is_patient => self.pause(serial),
            None => ready.push((serial, request.pages)),
        }
    }

    /// Returns what the engine has of a request's prompt, and the longest prefix that it and the stores have.
    pub(super) fn target(&mut self, engine: &Engine<B>, serial: u64) -> Option<(Lookup, u32)> {
        let now = Instant::now();
        self.negative.retain(|_, until| *until > now);
        let request = &self.requests[&serial];
        let ask = request.ask.as_ref()?;
        let lookup = engine.lookup(request.namespace, &request.prompt).ok()??;
        let is_stored = |group, place| {
            ask.located.contains_key(&(group, place)) && {
                let name = self.shared.name_of(0, ask.space, group, ask.keys[place as usize]);
                !self.negative.contains_key(&name)
            }
        };
        let target = lookup.target(is_stored);
        Some((lookup, target))
    }

    /// Returns the fetch that a request waits for, and whether it is its own.
    fn begin_fetch(&mut self, engine: &mut Engine<B>, serial: u64) -> Option<(u64, bool)> {
        let (lookup, target) = self.target(engine, serial)?;
        let request = &self.requests[&serial];
        let (namespace, prompt) = (request.namespace, Arc::clone(&request.prompt));
        let ask = request.ask.as_ref().expect("the question has an answer");
        let name = |group: u32, place: u32| self.shared.name_of(0, ask.space, group, ask.keys[place as usize]);
        if target <= lookup.hit() {
            return None;
        }
        let missing: Vec<_> = lookup.wanted().into_iter().filter(|&(_, place)| place < target).collect();
        if let Some(&other) = missing.iter().find_map(|&(group, place)| self.loading.get(&name(group, place))) {
            return Some((other, false)).filter(|_| !self.fetches[&other].is_late);
        }
        // Stores are read at the same time, but the estimate adds their times.
        let mut bytes = vec![0; self.shared.lanes.len()];
        for (group, place) in &missing {
            if let Some(&store) = ask.located.get(&(*group, *place)) {
                bytes[store] += self.record_bytes(*group);
            }
        }
        let tokens = u64::from((target - lookup.hit()) * self.shared.page_size);
        let rules = self.shared.lanes.iter().map(|lane| lane.options.rule).zip(&bytes).filter(|(_, bytes)| **bytes > 0);
        if !rules.clone().all(|(rule, &bytes)| rule.is_worth(tokens, bytes)) {
            return None;
        }
        let estimate: Duration = rules.map(|(rule, &bytes)| rule.estimate(bytes)).sum();
        let fetch = engine.fetch(namespace, &prompt, target).ok()??;
        let records: Vec<_> = fetch.records().map(|at| (at.group, at.place, at.first, at.pages.to_vec())).collect();
        let id = fetch.id;
        let deadline = Instant::now() + self.options.deadline + 2 * estimate;
        self.send_gets(engine, serial, id, records);
        let request = self.requests.get_mut(&serial).expect("it is there");
        request.deadline = deadline.max(request.repeat.end);
        self.alarm.set(request.deadline);
        Some((serial, true))
    }

    /// Leases the pages of a fetch, and passes its records to the stores. The fetch has the number of its request.
    fn send_gets(
        &mut self,
        engine: &mut Engine<B>,
        serial: u64,
        id: FetchId,
        records: Vec<(u32, u32, u32, Vec<SwapPageId>)>,
    ) {
        let ask = self.requests[&serial].ask.as_ref().expect("the question has an answer");
        let count = records.len();
        let has_groups = self.shared.has_cells;
        let all: Vec<_> = records.iter().flat_map(|record| &record.3).copied().collect();
        let mut leases = engine.backend_mut().lease_all_mut(&all).into_iter();
        let (mut names, mut pages) = (Vec::new(), Vec::new());
        let mut gets: Vec<_> = self.shared.lanes.iter().map(|_| Vec::new()).collect();
        for (index, (group, place, first, swap_pages)) in records.into_iter().enumerate() {
            let places = if group == 0 { self.shared.record_pages } else { 1 };
            let begin = place + 1 - places;
            let tokens = |at: u32| (at * self.shared.page_size) as usize;
            let key = Key {
                space: ask.space,
                group,
                first: begin,
                parent: begin.checked_sub(1).map(|before| ask.keys[before as usize].to_digest()),
                key: ask.keys[place as usize],
                tokens: Arc::clone(&ask.prompt),
                range: tokens(begin)..tokens(place + 1),
            };
            names.push(self.shared.name(&key));
            pages.push(if group == 0 { swap_pages.len() as u32 } else { 0 });
            let store = ask.located.get(&(group, place)).copied().unwrap_or(0);
            let leases = leases.by_ref().take(swap_pages.len()).collect();
            // Only records of group 0 can be read in part: cells begin at their place.
            let first = if group == 0 { first - begin } else { 0 };
            gets[store].push(Job::Get(Get { fetch: serial, index, key, first, pages: leases }));
        }
        self.loading.extend(names.iter().map(|name| (*name, serial)));
        let fetching =
            Fetching { id, names, results: vec![None; count], open: count, pages, has_groups, is_late: false };
        self.fetches.insert(serial, fetching);
        self.shared.lanes.iter().zip(gets).for_each(|(lane, gets)| lane.push_all(gets));
    }

    /// Ends a fetch whose leases are dropped, and the waits for it.
    pub(super) fn end_fetch(&mut self, engine: &mut Engine<B>, serial: u64, ready: &mut Vec<(u64, u32)>) {
        let Fetching { id, names, results, pages, has_groups, .. } =
            self.fetches.remove(&serial).expect("the caller has found it");
        for name in &names {
            self.loading.remove(name);
        }
        let mut count = results.iter().take_while(|result| **result == Some(true)).count();
        if has_groups && count < results.len() {
            count = 0;
        }
        engine.fetched(id, count);
        let pages: u32 = pages[..count].iter().sum();
        self.waits.pages += u64::from(pages);
        let waiting = self.requests.iter().filter_map(|(&at, request)| Some((at, request.fetch?)));
        let waiting: Vec<_> = waiting.filter(|(_, (fetch, _))| *fetch == serial).collect();
        for (request, (_, is_own)) in waiting {
            if !is_own {
                self.advance(engine, request, ready);
                continue;
            }
            let own = self.requests.get_mut(&request).expect("it waits");
            own.pages += pages;
            own.fetch = None;
            if self.is_patient(engine, request) {
                self.pause(request);
            } else {
                ready.push((request, self.requests[&request].pages));
            }
        }
    }
}
