//! Fetches: a store outside the engine writes pages of a prompt to host pages. These pages follow the prompt's cached
//! prefix.
//!
//! * M2. Fetched pages match once all have arrived, up to the first failure.
//!
//! Not here: puts, and the rules for pages that stores touch (`puts.rs`).

use std::mem::take;

use crate::event::Medium;
use crate::fence::Fence;
use crate::id::{HostPageId, MoveId, Namespace, PageId, PrefixLock, TokenId};
use crate::memory::{OutOfMemory, filled, reserved, touch_reserved};
use crate::moves::{Fetch, FetchId};

use super::residency::{NO_HOST_PAGE, NO_PAGE, Residency};
use super::walk::Cursor;
use super::{Link, PrefixTree};

/// Maximum number of open fetches.
const FETCHES_MAX: usize = 256;

struct OpenFetch {
    id: FetchId,
    lock: PrefixLock,
    page_count: usize,
}

/// The open fetches.
pub(super) struct Fetches {
    open: Vec<OpenFetch>,
    /// Pages that the open fetches write, in the order of the fetches, and their tokens.
    pub pages: Vec<HostPageId>,
    tokens: Vec<TokenId>,
    /// [`NO_PAGE`], repeated for each page of the largest fetch. New entries take their device pages from this list.
    no_pages: Vec<PageId>,
    last: u64,
    pub fetched: u64,
}

impl Fetches {
    pub fn new(host_pages: u32, page_size: u32) -> Result<Self, OutOfMemory> {
        Ok(Self {
            open: reserved(FETCHES_MAX as u64)?,
            pages: reserved(host_pages.into())?,
            tokens: reserved(u64::from(host_pages) * u64::from(page_size))?,
            no_pages: filled(host_pages.into(), NO_PAGE)?,
            last: 0,
            fetched: 0,
        })
    }

    pub fn bytes(host_pages: u32, page_size: u32) -> u64 {
        let pages = size_of::<HostPageId>() + size_of::<PageId>();
        let tokens = page_size as usize * size_of::<TokenId>();
        (FETCHES_MAX * size_of::<OpenFetch>()) as u64
            + u64::from(host_pages) * (pages + tokens) as u64
    }

    pub fn prefault(&mut self) {
        touch_reserved(&mut self.pages, NO_HOST_PAGE);
        touch_reserved(&mut self.tokens, TokenId::default());
    }

    /// Returns the locks of fetches, for audits.
    pub fn locks(&self) -> impl Iterator<Item = &PrefixLock> {
        self.open.iter().map(|fetch| &fetch.lock)
    }

    /// Checks a part of M2: the lists have the length of the open fetches' pages, and of the tokens of these pages.
    /// O(open fetches).
    pub fn check(&self, page_size: u32) -> Result<(), &'static str> {
        let pages = self.open.iter().map(|fetch| fetch.page_count).sum();
        let tokens = self.pages.len() * page_size as usize;
        match (self.pages.len(), self.tokens.len()) == (pages, tokens) {
            true => Ok(()),
            false => Err("M2: a fetched page waits with its tokens until all have arrived"),
        }
    }
}

impl PrefixTree {
    /// Locks the cached prefix of these tokens, and takes at most `most` host pages for the whole pages after it.
    /// `saved` and `loaded` are the last completed save and load. O(prompt + pages).
    ///
    /// Returns `None` in these cases: there is no hashing, too many fetches are open, `most` is 0, no whole page
    /// follows the prefix, no host page can be taken, or the lock would use more than `available` idle pages (W4).
    pub(crate) fn begin_fetch(
        &mut self,
        namespace: Namespace,
        tokens: &[TokenId],
        most: u32,
        available: u32,
        [saved, loaded]: [MoveId; 2],
        fence: &mut Fence,
    ) -> Option<Fetch<'_>> {
        // No call below frees device pages: a dropped entry frees only those of its cells, and an unlock only those of
        // an old generation.
        assert!(self.cells.is_none(), "stores exclude groups, so entries have no cells");
        if self.hosts_ref().fetches.open.len() == FETCHES_MAX || self.chain.is_none() {
            return None;
        }
        let found = self.match_prefix(namespace, tokens);
        let cached_pages = found.pages();
        let wanted = most.min(tokens.len() as u32 / self.page_size - cached_pages);
        if wanted == 0 || self.idle_pages(&found) > available {
            return None;
        }
        let lock = self.lock(&found, fence).expect("nothing changed since the match");
        self.hold_names(namespace);
        let start = self.hosts_ref().fetches.pages.len();
        for _ in 0..wanted {
            let Some(page) = self.take_host_page(&mut Vec::new()) else { break };
            let hosts = self.hosts_mut();
            let (pool, fetches) = (&mut hosts.pool, &mut hosts.fetches);
            if !pool.is_idle(page, saved, loaded) {
                pool.drop_page(page);
                break;
            }
            pool.begin_fill(page);
            fetches.pages.push(page);
        }
        let page_count = self.hosts_ref().fetches.pages.len() - start;
        if page_count == 0 {
            self.unlock(lock, fence, &mut Vec::new());
            self.release_names(namespace);
            return None;
        }
        let page_size = self.page_size as usize;
        let tokens = &tokens[cached_pages as usize * page_size..][..page_count * page_size];
        let fetches = &mut self.hosts_mut().fetches;
        fetches.tokens.extend_from_slice(tokens);
        fetches.last += 1;
        let id = FetchId(fetches.last);
        fetches.open.push(OpenFetch { id, lock, page_count });
        Some(Fetch { id, cached_pages, pages: &fetches.pages[start..] })
    }

    /// Ends a fetch. Its first `count` pages have arrived; they match from now on, unless the tree was reset since the
    /// fetch began. Returns whether the fetch was open. O(pages of open fetches).
    pub(crate) fn end_fetch(
        &mut self,
        id: FetchId,
        count: u32,
        fence: &mut Fence,
        freed: &mut Vec<PageId>,
    ) -> bool {
        let page_size = self.page_size as usize;
        let fetches = &mut self.hosts_mut().fetches;
        let Some(index) = fetches.open.iter().position(|fetch| fetch.id == id) else {
            return false;
        };
        let start: usize = fetches.open[..index].iter().map(|fetch| fetch.page_count).sum();
        let OpenFetch { mut lock, page_count, .. } = fetches.open.remove(index);
        let (mut pages, mut tokens) = (take(&mut fetches.pages), take(&mut fetches.tokens));
        let (own, own_tokens) = (&pages[start..][..page_count], &tokens[start * page_size..]);
        let mut count = (count as usize).min(page_count);
        if lock.scope().generation != self.generation {
            count = 0;
        }
        let known = self.insert_fetched(&mut lock, own_tokens, &own[..count], fence);
        let hosts = self.hosts_mut();
        let unused = own[..known].iter().chain(&own[count..]);
        unused.for_each(|page| hosts.pool.end_fill(*page, false));
        hosts.fetches.fetched += (count - known) as u64;
        pages.drain(start..start + page_count);
        tokens.drain(start * page_size..(start + page_count) * page_size);
        (hosts.fetches.pages, hosts.fetches.tokens) = (pages, tokens);
        let namespace = lock.scope().namespace;
        self.unlock(lock, fence, freed);
        self.release_names(namespace);
        true
    }

    /// Inserts fetched pages after a lock's prefix. Skips the first ones, if the tree has received them since the fetch
    /// began. Returns the number of skipped pages.
    fn insert_fetched(
        &mut self,
        lock: &mut PrefixLock,
        tokens: &[TokenId],
        pages: &[HostPageId],
        fence: &mut Fence,
    ) -> usize {
        let tokens = &tokens[..pages.len() * self.page_size as usize];
        let start = Cursor { node: lock.node(), pages_in_node: 0 };
        let (cursor, known) = self.walk_from(start, lock.scope(), tokens);
        let known = known as usize;
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
        let tokens = &tokens[known * self.page_size as usize..];
        let span = spans.create(tokens, &hosts.fetches.no_pages[..pages.len()]);
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
        self.emit_stored(lock, Medium::Host, pages.len() as u32);
        known
    }
}
