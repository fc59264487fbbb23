//! A prefix cache in the form of SGLang's and mini-sglang's over [`Tree`]: matches return the slots of tokens, callers
//! lock handles, and evictions return slots to the host's allocator. `tests/core/prefix_cache.rs` runs a scheduler over
//! it.

use std::ops::Range;

use kvarena::tree::{Handle, Tree, TreeConfig, TreeError, TreeSize};
use kvarena::{ConfigError, Namespace, PageId, TokenId};

/// The end of a cached prefix.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheHandle {
    /// Number of cached tokens.
    pub cached_len: usize,
    end: Handle,
}

/// Sizes in tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SizeInfo {
    pub evictable_size: usize,
    pub protected_size: usize,
}

impl SizeInfo {
    pub fn total_size(&self) -> usize {
        self.evictable_size + self.protected_size
    }
}

/// Cached prefixes of one namespace. A token's slot is `page * page_size + offset`.
pub struct PrefixCache {
    tree: Tree,
    page_size: usize,
    /// The pages of the current call.
    pages: Vec<PageId>,
}

impl PrefixCache {
    /// Creates a cache for slots below `slots`.
    pub fn new(slots: usize, page_size: usize) -> Result<Self, ConfigError> {
        let tree = Tree::new(TreeConfig::new((slots / page_size) as u32, page_size as u32))?;
        Ok(Self { tree, page_size, pages: Vec::new() })
    }

    /// Returns the longest cached prefix, in whole pages, and appends the slots of its tokens to `indices`. It may be
    /// evicted until its handle is locked.
    pub fn match_prefix(&mut self, input_ids: &[u32], indices: &mut Vec<u32>) -> CacheHandle {
        self.pages.clear();
        let found = self.tree.match_prefix(Namespace::default(), TokenId::from_raw(input_ids), &mut self.pages);
        self.push_slots(indices);
        CacheHandle { cached_len: found.pages as usize * self.page_size, end: found.handle }
    }

    /// Locks a handle, or releases one of its locks. Nothing below the last lock's end is evicted.
    pub fn lock_handle(&mut self, handle: CacheHandle, unlock: bool) -> Result<(), TreeError> {
        if !unlock {
            return self.tree.lock(handle.end);
        }
        self.pages.clear();
        self.tree.unlock(handle.end, &mut self.pages)
    }

    /// Inserts the whole pages of `input_ids`, whose K and V are in the slots `indices`. Returns the number of leading
    /// tokens that were cached: the caller frees its own slots for them, and the cache owns the slots of the others.
    pub fn insert_prefix(&mut self, input_ids: &[u32], indices: &[u32]) -> Result<usize, TreeError> {
        let whole = input_ids.len() / self.page_size * self.page_size;
        let pages = indices[..whole].chunks(self.page_size).map(|slots| PageId::new(slots[0] / self.page_size as u32));
        self.pages.clear();
        self.pages.extend(pages);
        let tokens = TokenId::from_raw(&input_ids[..whole]);
        let inserted = self.tree.insert(Namespace::default(), tokens, &self.pages)?;
        Ok(inserted.known as usize * self.page_size)
    }

    /// Evicts the pages of at least `size` tokens, the least recently used first, and appends their slots to `indices`.
    pub fn evict(&mut self, size: usize, indices: &mut Vec<u32>) -> Result<(), TreeError> {
        self.pages.clear();
        self.tree.evict(size.div_ceil(self.page_size) as u32, &mut self.pages)?;
        self.push_slots(indices);
        Ok(())
    }

    /// Appends the slots of `pages`.
    fn push_slots(&self, indices: &mut Vec<u32>) {
        indices.extend(self.pages.iter().flat_map(|&page| slots(page, self.page_size as u32)));
    }

    /// Drops all prefixes, and appends their slots to `indices`. No handle is locked.
    pub fn reset(&mut self, indices: &mut Vec<u32>) {
        self.pages.clear();
        self.tree.reset(&mut self.pages);
        self.push_slots(indices);
    }

    pub fn size_info(&self) -> SizeInfo {
        let TreeSize { evictable, protected, .. } = self.tree.size();
        let tokens = |pages: u32| pages as usize * self.page_size;
        SizeInfo { evictable_size: tokens(evictable), protected_size: tokens(protected) }
    }

    /// # Panics
    /// If an invariant is broken.
    pub fn check_integrity(&self) {
        self.tree.verify().unwrap_or_else(|broken| panic!("{broken}"));
    }
}

/// Returns the slots of a page.
fn slots(page: PageId, page_size: u32) -> Range<u32> {
    page.raw() * page_size..(page.raw() + 1) * page_size
}
