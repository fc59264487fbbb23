//! An index of cached pages that is built from events alone.
//!
//! * T10. After a drain, the index contains exactly the matchable pages, and with `event_cells` exactly their cells.
//!   [`Index::agrees`] checks it.

use std::collections::{BTreeMap, HashMap};

use crate::event::{Event, Medium, Stored};
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
    /// Whether the device has the page, and whether swap memory has it.
    pub media: [bool; 2],
}

/// The pages that events have stored and not removed, by their hashes.
#[derive(Clone, Debug, Default)]
pub struct Index {
    page_size: usize,
    pages: BTreeMap<PageHash, IndexedPage>,
    /// By group and hash of the page, whether the device has a cell, and whether swap memory has it.
    cells: BTreeMap<(u32, PageHash), [bool; 2]>,
    /// Number of events of each kind: stored, removed, cleared.
    pub counts: [u64; 3],
    /// Number of stored events about swap memory.
    pub swap_count: u64,
    /// Number of stored events about cells, and of their cells.
    pub cell_counts: [u64; 2],
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
                self.swap_count += u64::from(stored.medium == Medium::Swap);
                if stored.group == 0 { self.store(&stored) } else { self.store_cells(&stored) }
            }
            Event::Removed { group, medium, hashes } => {
                self.counts[1] += 1;
                self.ensure(!hashes.is_empty(), || "an event removes no page".to_owned());
                for hash in hashes.iter() {
                    if group == 0 { self.remove(medium, hash) } else { self.remove_cell(group, medium, hash) }
                }
            }
            Event::Cleared => {
                self.counts[2] += 1;
                self.pages.clear();
                self.cells.clear();
            }
        }
    }

    fn store(&mut self, stored: &Stored<'_>) {
        let Stored { namespace, medium, mut parent, hashes, tokens, .. } = *stored;
        let at = medium as usize;
        let whole = tokens.len() == hashes.len() * self.page_size && !hashes.is_empty();
        self.ensure(whole, || format!("{} tokens of {} pages", tokens.len(), hashes.len()));
        for (hash, tokens) in hashes.iter().zip(tokens.chunks(self.page_size)) {
            if let Some(parent) = parent {
                // A page on the device follows pages on the device.
                let known = self
                    .pages
                    .get(&parent)
                    .is_some_and(|known| known.namespace == namespace && (medium == Medium::Swap || known.media[at]));
                self.ensure(known, || format!("{hash:?} before {parent:?} in {medium:?}"));
            }
            let mut page = IndexedPage { namespace, parent, tokens: tokens.to_vec(), media: [false; 2] };
            page.media[at] = true;
            if let Some(before) = self.pages.get(&hash) {
                page.media[1 - at] = before.media[1 - at];
                let same = !before.media[at] && *before == IndexedPage { media: before.media, ..page.clone() };
                self.ensure(same, || format!("{hash:?} is stored twice in {medium:?}"));
            }
            self.pages.insert(hash, page);
            parent = Some(hash);
        }
    }

    fn store_cells(&mut self, stored: &Stored<'_>) {
        let Stored { namespace, group, medium, mut parent, hashes, tokens, .. } = *stored;
        self.cell_counts[0] += 1;
        let whole = tokens.len() == hashes.len() * self.page_size && !hashes.is_empty();
        self.ensure(whole, || format!("{} tokens of {} cells", tokens.len(), hashes.len()));
        for (hash, tokens) in hashes.iter().zip(tokens.chunks(self.page_size)) {
            self.cell_counts[1] += 1;
            let is_its =
                |page: &IndexedPage| (page.namespace, page.parent, &page.tokens[..]) == (namespace, parent, tokens);
            let same = self.pages.get(&hash).is_some_and(is_its);
            self.ensure(same, || format!("a cell of group {group} at {hash:?}, which is no such page"));
            let before = std::mem::replace(&mut self.cells.entry((group, hash)).or_default()[medium as usize], true);
            self.ensure(!before, || format!("the cell of group {group} at {hash:?} is stored twice in {medium:?}"));
            parent = Some(hash);
        }
    }

    fn remove_cell(&mut self, group: u32, medium: Medium, hash: PageHash) {
        let media = self.cells.get_mut(&(group, hash));
        let known = media.map(|media| std::mem::take(&mut media[medium as usize]));
        self.ensure(known == Some(true), || format!("the cell of group {group} at {hash:?} is not in {medium:?}"));
        if self.cells.get(&(group, hash)) == Some(&[false; 2]) {
            self.cells.remove(&(group, hash));
        }
    }

    fn remove(&mut self, medium: Medium, hash: PageHash) {
        let at = medium as usize;
        let known = self.pages.get_mut(&hash).map(|page| std::mem::take(&mut page.media[at]));
        self.ensure(known == Some(true), || format!("{hash:?} is removed but not in {medium:?}"));
        let is_gone = self.pages.get(&hash).is_some_and(|page| page.media == [false; 2]);
        if is_gone {
            self.pages.remove(&hash);
            let cell = self.cells.keys().find(|(_, of)| *of == hash).copied();
            self.ensure(cell.is_none(), || format!("{hash:?} is removed before its cell {cell:?}"));
        }
        let follows =
            |page: &IndexedPage| page.parent == Some(hash) && (is_gone || medium == Medium::Device && page.media[at]);
        let below = self.pages.values().any(follows);
        self.ensure(!below, || format!("{hash:?} is removed before a page that follows it"));
    }

    fn ensure(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds && self.wrong.is_none() {
            self.wrong = Some(what());
        }
    }

    /// Compares the index with the cached pages. An item of `cached` has a page's namespace, all tokens up to its end,
    /// whether the device has the page, and whether swap memory has it. A prefix comes before the pages that follow it.
    /// An item of `cells` has the group of a cell, and the same of its page and of the media that have the cell.
    ///
    /// # Errors
    /// The first inconsistent event, or the difference.
    pub fn agrees<'a>(
        &self,
        hashing: Hashing,
        names: impl Fn(Namespace) -> NamespaceNames,
        cached: impl Iterator<Item = (Namespace, &'a [TokenId], [bool; 2])>,
        cells: impl Iterator<Item = (u32, (Namespace, &'a [TokenId], [bool; 2]))>,
    ) -> Result<(), String> {
        if let Some(wrong) = &self.wrong {
            return Err(format!("inconsistent event: {wrong}"));
        }
        let mut named = BTreeMap::new();
        let mut hashes = HashMap::<(Namespace, &[TokenId]), PageHash>::new();
        let page = |(namespace, text, media): (Namespace, &'a [TokenId], [bool; 2])| {
            let (before, tokens) = text.split_at(text.len() - self.page_size);
            let named = named.entry(namespace).or_insert_with(|| Named::new(hashing, names(namespace)));
            let parent = hashes.get(&(namespace, before)).copied();
            assert!(parent.is_some() || before.is_empty(), "the prefix of a cached page is cached");
            let hash = hashing.page(named, parent, tokens);
            hashes.insert((namespace, text), hash);
            (hash, IndexedPage { namespace, parent, tokens: tokens.to_vec(), media })
        };
        let want: BTreeMap<_, _> = cached.map(page).collect();
        if self.pages == want {
            return self.agrees_on_cells(cells.map(|(group, (of, text, media))| ((group, hashes[&(of, text)]), media)));
        }
        let odd = |(hash, page): &(&PageHash, &IndexedPage)| want.get(hash) != Some(page);
        let lacks = |(hash, _): &(&PageHash, &IndexedPage)| !self.pages.contains_key(hash);
        Err(format!(
            "indexed and not cached: {:?}; cached and not indexed: {:?}",
            self.pages.iter().find(odd),
            want.iter().find(lacks)
        ))
    }

    fn agrees_on_cells(&self, want: impl Iterator<Item = ((u32, PageHash), [bool; 2])>) -> Result<(), String> {
        let want: BTreeMap<_, _> = want.collect();
        if self.cells == want {
            return Ok(());
        }
        Err(format!(
            "cells indexed and not cached: {:?}; cached and not indexed: {:?}",
            self.cells.iter().find(|(key, media)| want.get(key) != Some(media)),
            want.iter().find(|(key, media)| self.cells.get(key) != Some(media))
        ))
    }
}
