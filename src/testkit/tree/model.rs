//! The naive model of a [`Tree`](crate::tree::Tree): a map with one entry for each cached page, by its whole prefix.
//!
//! It has no nodes. Pages of one path that were used at once have the same time, and the deepest one is evicted first.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::id::{Handle, Namespace, PageId, TokenId};

/// A prefix of whole pages. In the map's order, a prefix precedes those that continue it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Prefix {
    pub generation: u64,
    pub namespace: Namespace,
    pub tokens: Vec<TokenId>,
}

impl Prefix {
    fn begins(&self, other: &Self) -> bool {
        (self.generation, self.namespace) == (other.generation, other.namespace)
            && other.tokens.starts_with(&self.tokens)
    }

    /// Returns the first `len` tokens of a prefix.
    pub fn first(&self, len: usize) -> Self {
        Self { tokens: self.tokens[..len].to_vec(), ..*self }
    }
}

/// A cached page.
#[derive(Clone, Debug)]
struct Page {
    page: PageId,
    /// When it was last used, while it is idle.
    used: u64,
}

/// A valid handle.
#[derive(Clone, Debug)]
pub struct Name {
    pub prefix: Prefix,
    pub locks: u32,
    /// Number of calls that returned the handle.
    calls: u64,
}

/// The cached pages and the valid handles.
pub struct Model {
    page_size: usize,
    generation: u64,
    time: u64,
    cached: BTreeMap<Prefix, Page>,
    names: BTreeMap<Handle, Name>,
    /// Handles that name nothing any more, the last ones.
    pub gone: Vec<Handle>,
    last_serial: u64,
}

/// Maximum number of remembered handles that name nothing.
const GONE: usize = 64;

impl Model {
    pub fn new(page_size: u32) -> Self {
        Self {
            page_size: page_size as usize,
            generation: 0,
            time: 0,
            cached: BTreeMap::new(),
            names: BTreeMap::new(),
            gone: Vec::new(),
            last_serial: 0,
        }
    }

    /// Returns a prefix of the present generation.
    pub fn prefix(&self, namespace: Namespace, tokens: &[TokenId]) -> Prefix {
        Prefix { generation: self.generation, namespace, tokens: tokens.to_vec() }
    }

    /// Returns the prefixes of whole pages that begin a prefix, the shortest first.
    fn path<'a>(&self, prefix: &'a Prefix) -> impl DoubleEndedIterator<Item = Prefix> + use<'a> {
        let page_size = self.page_size;
        (1..=prefix.tokens.len() / page_size).map(move |pages| prefix.first(pages * page_size))
    }

    /// Returns the longest cached beginning of a prefix.
    pub fn longest(&self, prefix: &Prefix) -> Prefix {
        let cached = self.path(prefix).take_while(|prefix| self.cached.contains_key(prefix)).last();
        cached.unwrap_or_else(|| prefix.first(0))
    }

    /// Returns the pages of a cached prefix.
    pub fn pages(&self, prefix: &Prefix) -> Vec<PageId> {
        self.path(prefix).map(|prefix| self.cached[&prefix].page).collect()
    }

    pub fn cached_count(&self) -> usize {
        self.cached.len()
    }

    /// Returns a cached page that depends on `seed`.
    pub fn any_page(&self, seed: usize) -> Option<PageId> {
        self.cached.values().nth(seed % self.cached.len().max(1)).map(|page| page.page)
    }

    pub fn protected_count(&self) -> usize {
        self.cached.keys().filter(|prefix| self.is_locked(prefix)).count()
    }

    /// Returns the cached prefixes of the present generation, the beginnings of each before it.
    pub fn present(&self) -> impl Iterator<Item = &Prefix> {
        self.cached.keys().filter(|prefix| prefix.generation == self.generation)
    }

    fn is_locked(&self, prefix: &Prefix) -> bool {
        self.names.values().any(|name| name.locks > 0 && prefix.begins(&name.prefix))
    }

    /// Makes the idle pages of a path the most recently used.
    pub fn touch(&mut self, prefix: &Prefix) {
        self.time += 1;
        for prefix in self.path(prefix) {
            if !self.is_locked(&prefix) {
                self.cached.get_mut(&prefix).expect("a path is cached").used = self.time;
            }
        }
    }

    /// Adds pages that end a prefix.
    pub fn attach(&mut self, prefix: &Prefix, pages: &[PageId]) {
        let known = prefix.tokens.len() / self.page_size - pages.len();
        for (prefix, &page) in self.path(prefix).skip(known).zip(pages) {
            let before = self.cached.insert(prefix, Page { page, used: self.time });
            assert!(before.is_none(), "only new pages are attached");
        }
    }

    pub fn names(&self) -> &BTreeMap<Handle, Name> {
        &self.names
    }

    /// Checks the handle that a call has returned for the end of a prefix.
    pub fn returned(&mut self, prefix: &Prefix, handle: Handle) {
        if prefix.tokens.is_empty() {
            assert_eq!(handle, Handle::default(), "the empty prefix has the default handle");
            return;
        }
        let name = self.names.iter_mut().find(|(_, name)| name.prefix == *prefix);
        if let Some((&before, name)) = name {
            assert_eq!(handle, before, "a prefix keeps its handle");
            name.calls += 1;
            return;
        }
        self.is_new(handle);
        self.names.insert(handle, Name { prefix: prefix.clone(), locks: 0, calls: 1 });
    }

    fn is_new(&mut self, handle: Handle) {
        let serial = handle.to_raw()[0];
        assert!(serial > self.last_serial, "a new handle: {serial}, the last one: {}", self.last_serial);
        self.last_serial = serial;
    }

    fn forget(&mut self, handle: Handle) -> Name {
        if self.gone.len() == GONE {
            self.gone.remove(self.last_serial as usize % GONE);
        }
        self.gone.push(handle);
        self.names.remove(&handle).expect("it was valid")
    }

    pub fn lock(&mut self, handle: Handle) {
        self.names.get_mut(&handle).expect("it is valid").locks += 1;
    }

    /// Releases a lock. Returns the pages that the tree must return.
    pub fn unlock(&mut self, handle: Handle) -> Vec<PageId> {
        self.time += 1;
        let name = self.names.get_mut(&handle).expect("it is valid");
        name.locks -= 1;
        let prefix = name.prefix.clone();
        let idle: Vec<_> = self.path(&prefix).filter(|prefix| !self.is_locked(prefix)).collect();
        if prefix.generation != self.generation {
            return idle.iter().map(|prefix| self.remove(prefix)).collect();
        }
        for prefix in idle {
            self.cached.get_mut(&prefix).expect("a path is cached").used = self.time;
        }
        Vec::new()
    }

    /// Moves a lock of a handle to the end of `prefix`, which has `new` more pages, and which a call returned as `end`.
    pub fn extend(&mut self, handle: Handle, prefix: &Prefix, new: &[PageId], end: Handle) {
        let Name { prefix: from, locks, calls } = self.names[&handle].clone();
        if from == *prefix {
            assert_eq!(handle, end, "an extension by no page changes nothing");
            return;
        }
        let has_children = self.cached.keys().any(|other| from.begins(other) && *other != from);
        let grows = locks == 1 && calls == 1 && !has_children;
        self.attach(prefix, new);
        if grows {
            self.forget(handle);
        } else {
            self.names.get_mut(&handle).expect("it is valid").locks -= 1;
        }
        self.returned(prefix, end);
        self.lock(end);
    }

    fn remove(&mut self, prefix: &Prefix) -> PageId {
        let name = self.names.iter().find(|(_, name)| name.prefix == *prefix);
        if let Some((&handle, _)) = name {
            assert_eq!(self.forget(handle).locks, 0, "a locked prefix stays");
        }
        self.cached.remove(prefix).expect("it is cached").page
    }

    /// Returns the idle pages in the order of eviction.
    fn victims(&self) -> Vec<Prefix> {
        let mut idle: Vec<_> = self.cached.iter().filter(|(prefix, _)| !self.is_locked(prefix)).collect();
        idle.sort_by_key(|(prefix, page)| (page.used, Reverse(prefix.tokens.len())));
        idle.into_iter().map(|(prefix, _)| prefix.clone()).collect()
    }

    /// Removes the `count` pages that are evicted next, and returns them.
    pub fn evict(&mut self, count: usize) -> Vec<PageId> {
        self.victims()[..count].iter().map(|prefix| self.remove(prefix)).collect()
    }

    /// Checks the handle that an eviction of one node of `count` pages has returned. They are the last pages of one
    /// prefix.
    pub fn evicted_node(&mut self, count: usize, handle: Handle) {
        let victims = self.victims();
        assert!(victims[..count].iter().all(|prefix| prefix.begins(&victims[0])), "a node is on one path");
        let name = self.names.iter().find(|(_, name)| name.prefix == victims[0]);
        match name {
            Some((&before, _)) => assert_eq!(handle, before, "the handle of the evicted prefix"),
            None => self.is_new(handle),
        }
    }

    /// Removes all idle pages, and returns them.
    pub fn reset(&mut self) -> Vec<PageId> {
        let idle = self.evict(self.victims().len());
        self.generation += 1;
        idle
    }
}
