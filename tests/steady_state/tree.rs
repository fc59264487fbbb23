//! A host of a tree that allocates nothing once it is warm.

use kvarena::hash::Hashing;
use kvarena::tree::{Handle, Tree, TreeConfig};
use kvarena::{Namespace, PageId, TokenId};

use super::host::mix;

const PAGES: u32 = 200;
const PAGE_SIZE: u64 = 4;
/// Maximum number of requests at once.
const REQUESTS: usize = 6;

/// A host with a tree, whose lists have their capacity from the start.
pub struct Host {
    pub tree: Tree,
    free: Vec<PageId>,
    pages: Vec<PageId>,
    tokens: Vec<TokenId>,
    locked: Vec<Handle>,
    /// Numbers of hits, extensions in place, extensions by a child, evicted pages, and pages returned by a reset.
    pub done: [u64; 5],
}

impl Host {
    pub fn new(hashing: Option<Hashing>, event_pages: u32) -> Self {
        let config = TreeConfig { hashing, event_pages, ..TreeConfig::new(PAGES, PAGE_SIZE as u32) };
        let list = || Vec::with_capacity(PAGES as usize);
        let mut free = list();
        free.extend((0..PAGES).map(PageId::new));
        Self {
            tree: Tree::new(config).expect("a valid config"),
            free,
            pages: list(),
            tokens: Vec::with_capacity(PAGES as usize * PAGE_SIZE as usize),
            locked: Vec::with_capacity(REQUESTS),
            done: [0; 5],
        }
    }

    /// Serves a prompt that may have a cached prefix, extends a request, and ends others. Sometimes resets.
    pub fn round(&mut self, seed: u64) {
        let (shared, len) = (PAGE_SIZE * (1 + seed % 6), PAGE_SIZE * (1 + mix(seed) % 12));
        let token = |i| if i < shared { mix((seed % 4) << 32 | i) } else { mix(seed ^ i << 8) };
        self.tokens.clear();
        self.tokens.extend((0..len).map(|i| TokenId::new(token(i) as u32 % 1000)));
        self.pages.clear();
        let namespace = Namespace::default();
        let found = self.tree.match_prefix(namespace, &self.tokens, &mut self.pages);
        assert_eq!(self.tree.find(namespace, &self.tokens), found.pages);
        self.done[0] += u64::from(found.pages > 0);
        self.tree.lock(found.handle).expect("it is cached");
        self.take(len as u32 / PAGE_SIZE as u32 - found.pages);
        let inserted = self.tree.insert(namespace, &self.tokens, &self.pages).expect("new pages");
        self.tree.lock(inserted.handle).expect("it is cached");
        self.tree.unlock(found.handle, &mut self.free).expect("it is locked");
        self.locked.push(inserted.handle);
        self.extend(mix(seed ^ 1));
        while self.locked.len() > mix(seed ^ 2) as usize % REQUESTS {
            let handle = self.locked.remove(0);
            self.pages.clear();
            self.tree.pages_of(handle, &mut self.pages).expect("it is locked");
            let before = self.free.len();
            self.tree.unlock(handle, &mut self.free).expect("it is locked");
            self.done[4] += (self.free.len() - before) as u64;
        }
        if seed.is_multiple_of(50) {
            self.tree.reset(&mut self.free);
        }
        if seed.is_multiple_of(9) {
            self.tree.evict_node(&mut self.free);
        }
        if seed.is_multiple_of(4) {
            self.tree.drain_events(|event| _ = std::hint::black_box(event));
        }
    }

    /// Appends `count` free pages to `pages`, of which locks leave enough.
    fn take(&mut self, count: u32) {
        let lacking = count.saturating_sub(self.free.len() as u32);
        self.tree.evict(lacking, &mut self.free).expect("few pages are locked");
        self.done[3] += u64::from(lacking);
        let rest = self.free.len() - count as usize;
        self.pages.extend(self.free.drain(rest..));
    }

    fn extend(&mut self, seed: u64) {
        let at = seed as usize % self.locked.len();
        let old = self.locked[at];
        self.pages.clear();
        self.take(1);
        let tokens = [0, 1, 2, 3].map(|i| TokenId::new(mix(seed ^ i) as u32 % 1000));
        let longer = self.tree.extend(old, &tokens, &self.pages).expect("it is locked");
        self.free.extend_from_slice(&self.pages[..longer.known as usize]);
        self.pages.clear();
        let grown = self.tree.pages_of(old, &mut self.pages).is_err();
        self.done[if grown { 1 } else { 2 }] += 1;
        self.locked[at] = longer.handle;
    }
}
