//! The store of a replay. It makes puts, lookups and fetches on the engine and on the model, and compares the results.
//! If the backend has bytes, the store also checks that the bytes of a put's pages do not change.

use super::agree;
use super::bytes::Inspect;
use super::host::{Bytes, Host, OpenFetch, OpenPut, RecordKey, names};
use crate::error::{EngineError, Error};
use crate::hash::{NamespaceNames, PageHash};
use crate::id::{Namespace, SwapPageId, TokenId};
use crate::moves::PutId;
use crate::testkit::model::{FetchWant, PutWant, RecordWant};
use crate::testkit::op::Prompt;
use crate::testkit::rng::mix;

struct Got {
    id: PutId,
    namespace: Namespace,
    names: NamespaceNames,
    group: u32,
    key: PageHash,
    parent: Option<PageHash>,
    first: u32,
    tokens: Vec<TokenId>,
    pages: Vec<SwapPageId>,
}

impl<B: Inspect> Host<B> {
    pub(super) fn puts(&mut self, most: u8) -> Result<(), String> {
        let mut got = Vec::new();
        let answer = self.engine.puts(usize::from(most % 8), |put| {
            let (tokens, pages) = (put.tokens.to_vec(), put.pages.to_vec());
            let (id, namespace, names) = (put.id, put.namespace, put.names.clone());
            let (group, first) = (put.group, put.first);
            got.push(Got { id, namespace, names, group, key: put.key, parent: put.parent, first, tokens, pages });
        });
        let moves = self.engine.backend_mut().take_moves();
        let moved_failed = answer.is_err() && moves.last() != Some(&true);
        let saved = (!moved_failed).then(|| self.engine.backend_mut().last_moved().saved.raw());
        self.model.expect_moves(moves);
        let want = self.model.puts((most % 8).into(), saved);
        let count = want.as_ref().map(Vec::len);
        self.summary.count(format!("puts {}", if count.is_some() { "Ok" } else { "Backend" }));
        agree("puts", &answer.ok(), &count)?;
        agree("puts given", &got.len(), &count.unwrap_or(0))?;
        got.into_iter().zip(want.into_iter().flatten()).try_for_each(|(got, want)| {
            self.compare_put(&got, &want)?;
            let bytes = self.read(&got.pages);
            let (key, number) = ((want.path.1, got.group, got.key), want.number);
            self.store.puts.push(OpenPut { id: got.id, number, key, pages: got.pages, bytes });
            Ok(())
        })
    }

    fn compare_put(&self, got: &Got, want: &PutWant) -> Result<(), String> {
        let shape = self.engine.shape();
        let hashing = shape.hashing.ok_or("puts need hashes")?;
        let (namespace, _, tokens) = &want.path;
        let namespace = Namespace::new(*namespace);
        let names = names(namespace);
        let chain = hashing.chain(&names, tokens, shape.layout.page_size());
        agree("a put's namespace", &(got.namespace, &got.names), &(namespace, &names))?;
        agree("a put's group and first page", &(got.group, got.first), &(want.group, want.first))?;
        agree("a put's key", &Some(&got.key), &chain.last())?;
        let parent = (want.first as usize).checked_sub(1).map(|before| &chain[before]);
        agree("a put's parent", &got.parent.as_ref(), &parent)?;
        let own = &tokens[want.first as usize * self.page_size()..];
        agree("a put's tokens", &&got.tokens[..], &own)?;
        let unstaged = |page: &SwapPageId| Some(*page).filter(|page| page.raw() < shape.layout.swap_pages());
        agree("a put's pages", &got.pages.iter().map(unstaged).collect(), &want.pages)
    }

    fn read(&mut self, pages: &[SwapPageId]) -> Vec<Bytes> {
        pages.iter().map(|&page| self.engine.backend_mut().read_swap(page)).collect()
    }

    pub(super) fn put_done(&mut self, pick: u8, ok: bool) -> Result<(), String> {
        if self.store.puts.is_empty() {
            return Ok(());
        }
        let at = usize::from(pick) % self.store.puts.len();
        let OpenPut { id, number, key, pages, bytes } = self.store.puts.remove(at);
        let now = self.read(&pages);
        agree("the bytes that a put reads", &now, &bytes)?;
        let got = [(); 2].map(|()| self.engine.put_done(id, ok));
        let want = [(); 2].map(|()| self.model.put_done(number, ok));
        self.summary.count(format!("put_done {ok}"));
        if ok {
            self.summary.count(if key.1 > 0 { "put of a cell" } else { "put of pages" }.to_owned());
            self.store.records.insert(key, bytes);
        }
        agree("put_done", &got, &want)
    }

    /// Returns the keys of a prompt's pages, without the last token.
    fn keys(&self, namespace: Namespace, prompt: &[TokenId]) -> Vec<PageHash> {
        let shape = self.engine.shape();
        let tokens = &prompt[..prompt.len().saturating_sub(1)];
        let chain = |hashing: crate::hash::Hashing| hashing.chain(&names(namespace), tokens, shape.layout.page_size());
        shape.hashing.map_or(Vec::new(), chain)
    }

    /// Compares a lookup, and returns the target, or some pages more than the hit.
    fn lookup(&mut self, namespace: Namespace, prompt: &[TokenId], most: u8) -> Result<u32, String> {
        let keys = self.keys(namespace, prompt);
        let store = &self.store;
        let stored = |group, place: u32| store.records.contains_key(&(store.generation, group, keys[place as usize]));
        let want = self.model.lookup(namespace, prompt, stored);
        let got = self.engine.lookup(namespace, prompt);
        let facts = |got: &Result<Option<crate::moves::Lookup>, Error>| {
            let got = got.as_ref().map_err(|error| *error)?.as_ref();
            Ok(got.map(|got| ([got.hit(), got.full_pages()], got.target(stored))))
        };
        let wanted = want.as_ref().map(|want| want.as_ref().map(|want| (want.pages, want.target)));
        agree("lookup", &facts(&got), &wanted.map_err(|error| *error))?;
        let (Ok(Some(got)), Ok(Some(want))) = (got, want) else { return Ok(u32::from(most)) };
        agree("the keys of a lookup", &got.keys(prompt), &keys)?;
        let list = got.wanted();
        agree("the number of wanted records", &list.len(), &want.wanted.len())?;
        agree("the wanted records", &list.into_iter().collect(), &want.wanted)?;
        Ok(if most.is_multiple_of(2) { want.target } else { got.hit() + u32::from(most / 2 % 6) })
    }

    pub(super) fn fetch(&mut self, spec: &Prompt, most: u8) -> Result<(), String> {
        let (namespace, prompt) = self.prompt(spec);
        let to = self.lookup(namespace, &prompt, most)?;
        let mut moved = Some(());
        let mut id = None;
        let got = match self.engine.fetch(namespace, &prompt, to) {
            Ok(fetch) => Ok(fetch.map(|fetch| {
                id = Some(fetch.id);
                let record = |record: crate::moves::FetchRecord<'_>| {
                    let (group, place, first) = (record.group, record.place, record.first);
                    RecordWant { group, place, first, pages: record.pages.to_vec() }
                };
                FetchWant { cached: fetch.cached_pages, records: fetch.records().map(record).collect() }
            })),
            Err(EngineError::Core(error)) => Err(error),
            Err(_) => {
                self.summary.count("fetch Backend".to_owned());
                moved = None;
                Ok(None)
            }
        };
        let moved = moved.map(|()| self.engine.backend_mut().last_moved());
        let want = self.model.fetch(namespace, &prompt, to, moved);
        self.check_result("fetch", &got, &want)?;
        let (Ok(Some(FetchWant { records, .. })), Some(id)) = (got, id) else { return Ok(()) };
        self.summary.count("fetch of pages".to_owned());
        let keys = self.keys(namespace, &prompt);
        let mut arrived = 0;
        for record in &records {
            // A record may be cut at the end of the prompt's keys.
            let Some(&key) = keys.get(record.place as usize) else { break };
            let Some(bytes) = self.store.records.get(&(self.store.generation, record.group, key)) else { break };
            let start = if record.group == 0 { record.place + 1 - bytes.len() as u32 } else { record.place };
            for (&page, bytes) in record.pages.iter().zip(&bytes[(record.first - start) as usize..]) {
                self.engine.backend_mut().write_swap(page, bytes.as_deref().unwrap_or_default());
            }
            arrived += 1;
        }
        let is_cell = records.last().is_some_and(|record| record.group > 0);
        if is_cell && arrived == records.len() {
            self.summary.count("fetch of cells".to_owned());
        }
        self.store.fetch_count += 1;
        self.store.fetches.push(OpenFetch { id, number: self.store.fetch_count, arrived });
        Ok(())
    }

    pub(super) fn fetched(&mut self, pick: u8, count: u8) -> Result<(), String> {
        if self.store.fetches.is_empty() {
            return Ok(());
        }
        let at = usize::from(pick) % self.store.fetches.len();
        let OpenFetch { id, number, arrived } = self.store.fetches.remove(at);
        let short = usize::from(count / 2) % (arrived + 1);
        let count = if count.is_multiple_of(2) { arrived } else { short };
        let got = [(); 2].map(|()| self.engine.fetched(id, count));
        let want = [(); 2].map(|()| self.model.fetched(number, count));
        self.summary.count("fetched".to_owned());
        agree("fetched", &got, &want)
    }

    /// The store loses some records of a prompt, and the engine puts them again.
    pub(super) fn restate_puts(&mut self, spec: &Prompt, lost: u8) -> Result<(), String> {
        let (namespace, prompt) = self.prompt(spec);
        let keys = self.keys(namespace, &prompt);
        let is_lost = |key: &RecordKey| mix(key.2.to_u64() ^ u64::from(lost) << 8 ^ u64::from(key.1)).is_multiple_of(2);
        self.store.records.retain(|key, _| !(keys.contains(&key.2) && is_lost(key)));
        let store = &self.store;
        let stored = |group, place: u32| store.records.contains_key(&(store.generation, group, keys[place as usize]));
        let got = self.engine.restate_puts(namespace, &prompt, stored);
        let want = self.model.restate_puts(namespace, &prompt, stored);
        self.check_result("restate_puts", &got, &want)
    }

    /// Ends all open fetches and puts.
    pub(super) fn close_store(&mut self) -> Result<(), String> {
        while !self.store.fetches.is_empty() {
            self.fetched(0, 0).and_then(|()| self.compare())?;
        }
        while !self.store.puts.is_empty() {
            self.put_done(0, true).and_then(|()| self.compare())?;
        }
        Ok(())
    }
}
