//! Fetches: host pages that a store writes, behind the cached pages of a prompt.
//!
//! * M2. Fetched pages match once all have arrived, up to the first failure.
//!
//! Not here: puts, and the rules for pages that stores touch (`puts.rs`).

use crate::fence::Fence;
use crate::id::{HostPageId, MoveId, Namespace, PageId, PrefixLock, TokenId};
use crate::memory::{OutOfMemory, reserved};
use crate::moves::{Fetch, FetchId};

use super::residency::{NO_PAGE, Residency};
use super::walk::Cursor;
use super::{Link, PrefixTree};

/// Most fetches at a time.
const FETCHES_MAX: usize = 256;

struct OpenFetch {
    id: FetchId,
    lock: PrefixLock,
    tokens: Vec<TokenId>,
    pages: Vec<HostPageId>,
}

/// The open fetches.
pub(super) struct Fetches {
    open: Vec<OpenFetch>,
    /// Buffers of fetches that are done.
    spare: Vec<(Vec<TokenId>, Vec<HostPageId>)>,
    /// As many entries without device pages as a fetch had.
    no_pages: Vec<PageId>,
    last: u64,
    pub fetched: u64,
}

impl Fetches {
    pub fn new() -> Result<Self, OutOfMemory> {
        let max = FETCHES_MAX as u64;
        let (open, spare) = (reserved(max)?, reserved(max)?);
        Ok(Self { open, spare, no_pages: Vec::new(), last: 0, fetched: 0 })
    }

    pub fn bytes() -> u64 {
        let spare = size_of::<(Vec<TokenId>, Vec<HostPageId>)>();
        FETCHES_MAX as u64 * (size_of::<OpenFetch>() + spare) as u64
    }

    /// Returns the locks of fetches, for audits.
    pub fn locks(&self) -> impl Iterator<Item = &PrefixLock> {
        self.open.iter().map(|fetch| &fetch.lock)
    }

    /// Returns the pages that fetches write, for audits.
    pub fn filling(&self) -> impl Iterator<Item = HostPageId> + '_ {
        self.open.iter().flat_map(|fetch| fetch.pages.iter().copied())
    }
}

impl PrefixTree {
    /// Locks the cached prefix of these tokens, and takes at most `most` host pages for the pages behind it. None if
    /// there is no host page to be had, or no page behind. `saved`, `loaded`: the moves that are done. O(prompt +
    /// pages).
    pub(crate) fn begin_fetch(
        &mut self,
        namespace: Namespace,
        tokens: &[TokenId],
        most: u32,
        [saved, loaded]: [MoveId; 2],
        fence: &mut Fence,
    ) -> Option<Fetch<'_>> {
        if self.hosts_ref().fetches.open.len() == FETCHES_MAX || self.chain.is_none() {
            return None;
        }
        let found = self.match_prefix(namespace, tokens);
        let cached_pages = found.pages();
        let wanted = most.min(tokens.len() as u32 / self.page_size - cached_pages);
        if wanted == 0 {
            return None;
        }
        let lock = self.lock(&found, fence).expect("nothing changed since the match");
        self.hold_names(namespace);
        let spare = self.hosts_mut().fetches.spare.pop();
        let (mut text, mut pages) = spare.unwrap_or_default();
        text.clear();
        pages.clear();
        while (pages.len() as u32) < wanted
            && let Some(page) = self.take_host_page()
        {
            let pool = &mut self.hosts_mut().pool;
            if !pool.is_idle(page, saved, loaded) {
                pool.drop_page(page);
                break;
            }
            pool.begin_fill(page);
            pages.push(page);
        }
        if pages.is_empty() {
            self.hosts_mut().fetches.spare.push((text, pages));
            self.unlock(lock, fence, &mut Vec::new());
            self.release_names(namespace);
            return None;
        }
        let start = (cached_pages * self.page_size) as usize;
        text.extend_from_slice(&tokens[start..start + pages.len() * self.page_size as usize]);
        let fetches = &mut self.hosts_mut().fetches;
        fetches.last += 1;
        let id = FetchId(fetches.last);
        fetches.open.push(OpenFetch { id, lock, tokens: text, pages });
        let pages = &fetches.open.last().expect("just pushed").pages;
        Some(Fetch::new(id, cached_pages, pages))
    }

    /// Ends a fetch of which the first `count` pages have arrived: they match from now on. Returns whether it was open.
    /// O(pages).
    pub(crate) fn end_fetch(
        &mut self,
        id: FetchId,
        count: u32,
        fence: &mut Fence,
        freed: &mut Vec<PageId>,
    ) -> bool {
        let open = &mut self.hosts_mut().fetches.open;
        let Some(index) = open.iter().position(|fetch| fetch.id == id) else { return false };
        let OpenFetch { mut lock, tokens, pages, .. } = open.swap_remove(index);
        let mut count = (count as usize).min(pages.len());
        if lock.scope().generation != self.generation {
            count = 0;
        }
        let known = self.insert_fetched(&mut lock, &tokens, &pages[..count], fence);
        let hosts = self.hosts_mut();
        let unused = pages[..known].iter().chain(&pages[count..]);
        unused.for_each(|page| hosts.pool.end_fill(*page, false));
        hosts.fetches.fetched += (count - known) as u64;
        hosts.fetches.spare.push((tokens, pages));
        let namespace = lock.scope().namespace;
        self.unlock(lock, fence, freed);
        self.release_names(namespace);
        true
    }

    /// Makes fetched pages entries behind a lock, but for those that have come in meanwhile. Returns how many those
    /// are.
    fn insert_fetched(
        &mut self,
        lock: &mut PrefixLock,
        tokens: &[TokenId],
        pages: &[HostPageId],
        fence: &mut Fence,
    ) -> usize {
        let tokens = &tokens[..pages.len() * self.page_size as usize];
        let (mut cursor, mut known) = (Cursor { node: lock.node(), pages_in_node: 0 }, 0);
        loop {
            let rest = &tokens[known * self.page_size as usize..];
            let found =
                self.descend(cursor.node, lock.scope(), rest, &mut |own| known += own.len());
            let Some(found) = found else { break };
            cursor = found.cursor;
            if !found.whole {
                break;
            }
        }
        if known > 0
            && let Some(node) = cursor.node
        {
            let node = self.split(node, cursor.pages_in_node);
            self.move_lock(lock, node, fence);
        }
        let pages = &pages[known..];
        if pages.is_empty() {
            return known;
        }
        let Self { hosts: Some(hosts), spans, .. } = self else { return known };
        hosts.fetches.no_pages.resize(pages.len(), NO_PAGE);
        let tokens = &tokens[known * self.page_size as usize..];
        let span = spans.create(tokens, &hosts.fetches.no_pages);
        let before = lock.node().map(|node| spans.last_entry(&self.link[node].span));
        let node = self.spawn(Link { parent: lock.node(), span }, lock.scope());
        self.adopt(lock, node);
        let Self { hosts: Some(hosts), spans, .. } = self else { return known };
        hosts.residency[node] = Residency::default();
        let (mut before, mut rest) = (before, pages.iter());
        for (start, len) in spans.runs(&span) {
            for entry in start..start + len {
                let page = *rest.next().expect("an entry for each page");
                hosts.of_entry[entry as usize] = page;
                hosts.pool.end_fill(page, true);
                hosts.puts.attach(entry, before, false);
                hosts.puts.set_stored(entry);
                before = Some(entry);
            }
        }
        self.insert_hashes(lock, pages.len() as u32);
        self.emit_stored(lock, pages.len() as u32);
        known
    }
}
