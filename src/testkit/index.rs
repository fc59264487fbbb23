//! An index of cached pages that is built from events alone.

use std::collections::{BTreeMap, HashMap};

use crate::event::{Event, Stored};
use crate::hash::{Hashing, Named, NamespaceNames, PageHash};
use crate::id::{Namespace, TokenId};

/// A page of the index.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IndexedPage {
    /// Namespace of the page's prefix.
    pub namespace: Namespace,
    /// Hash of the preceding page.
    pub parent: Option<PageHash>,
    /// Tokens of the page.
    pub tokens: Vec<TokenId>,
}

/// All pages that events have stored, by their hashes.
#[derive(Clone, Debug, Default)]
pub struct Index {
    page_size: usize,
    pages: BTreeMap<PageHash, IndexedPage>,
    /// Number of events of each kind: stored, removed, cleared.
    pub counts: [u64; 3],
    /// First inconsistent event.
    wrong: Option<String>,
}

impl Index {
    /// Creates an empty index.
    pub fn new(page_size: u32) -> Self {
        Self { page_size: page_size as usize, ..Self::default() }
    }

    /// Applies an event.
    pub fn apply(&mut self, event: Event<'_>) {
        match event {
            Event::Stored(stored) => {
                self.counts[0] += 1;
                self.store(&stored);
            }
            Event::Removed { hashes } => {
                self.counts[1] += 1;
                self.ensure(!hashes.is_empty(), || "an event removes no page".to_owned());
                hashes.iter().for_each(|hash| self.remove(hash));
            }
            Event::Cleared => {
                self.counts[2] += 1;
                self.pages.clear();
            }
        }
    }

    fn store(&mut self, stored: &Stored<'_>) {
        let Stored { namespace, mut parent, hashes, tokens, .. } = *stored;
        let whole = tokens.len() == hashes.len() * self.page_size && !hashes.is_empty();
        self.ensure(whole, || format!("{} tokens of {} pages", tokens.len(), hashes.len()));
        for (hash, tokens) in hashes.iter().zip(tokens.chunks(self.page_size)) {
            if let Some(parent) = parent {
                let known = self.pages.get(&parent).map(|known| known.namespace);
                self.ensure(known == Some(namespace), || format!("{hash:?} before {parent:?}"));
            }
            let page = IndexedPage { namespace, parent, tokens: tokens.to_vec() };
            let before = self.pages.insert(hash, page);
            self.ensure(before.is_none(), || format!("{hash:?} is stored twice"));
            parent = Some(hash);
        }
    }

    fn remove(&mut self, hash: PageHash) {
        let known = self.pages.remove(&hash).is_some();
        self.ensure(known, || format!("{hash:?} is removed but not stored"));
        let below = self.pages.values().any(|page| page.parent == Some(hash));
        self.ensure(!below, || format!("{hash:?} is removed before a page that follows it"));
    }

    fn ensure(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds && self.wrong.is_none() {
            self.wrong = Some(what());
        }
    }

    /// Compares the index with the cached pages: each as its namespace and all tokens up to its end, prefixes first.
    ///
    /// # Errors
    /// The first inconsistent event, or the difference.
    pub fn agrees<'a>(
        &self,
        hashing: Hashing,
        names: impl Fn(Namespace) -> NamespaceNames,
        cached: impl Iterator<Item = (Namespace, &'a [TokenId])>,
    ) -> Result<(), String> {
        if let Some(wrong) = &self.wrong {
            return Err(format!("inconsistent event: {wrong}"));
        }
        let mut named = BTreeMap::new();
        let mut hashes = HashMap::<(Namespace, &[TokenId]), PageHash>::new();
        // A prefix precedes the pages that follow it.
        let page = |(namespace, text): (Namespace, &'a [TokenId])| {
            let (before, tokens) = text.split_at(text.len() - self.page_size);
            let named =
                named.entry(namespace).or_insert_with(|| Named::new(hashing, names(namespace)));
            let parent = hashes.get(&(namespace, before)).copied();
            assert!(parent.is_some() || before.is_empty(), "the prefix of a cached page is cached");
            let hash = hashing.page(named, parent, tokens);
            hashes.insert((namespace, text), hash);
            (hash, IndexedPage { namespace, parent, tokens: tokens.to_vec() })
        };
        let want: BTreeMap<_, _> = cached.map(page).collect();
        if self.pages == want {
            return Ok(());
        }
        let odd = |(hash, page): &(&PageHash, &IndexedPage)| want.get(hash) != Some(page);
        let lacks = |(hash, _): &(&PageHash, &IndexedPage)| !self.pages.contains_key(hash);
        Err(format!(
            "indexed and not cached: {:?}; cached and not indexed: {:?}",
            self.pages.iter().find(odd),
            want.iter().find(lacks)
        ))
    }
}
