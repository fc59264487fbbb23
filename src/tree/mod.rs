//! [`Tree`]: the cached prefixes of an engine that owns its allocator, its page tables and its memory.
//!
//! A radix tree over whole pages matches prompts with cached prefixes. The host gives it the numbers of pages whose K
//! and V are computed, and takes them back by eviction. [`Handle`]s name prefixes, so that the host can lock them.
//!
//! ```
//! use kvarena::tree::{Tree, TreeConfig};
//! use kvarena::{Namespace, PageId, TokenId};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut tree = Tree::new(TreeConfig::new(16, 1))?; // at most 16 pages of one token
//! let mut free: Vec<PageId> = (0..16).map(PageId::new).collect(); // the host's allocator
//! let namespace = Namespace::default();
//!
//! // The host's tokenizer: each new word is the next token.
//! let mut words: Vec<String> = Vec::new();
//! let mut encode = |text: &str| -> Vec<TokenId> {
//!     let mut token = |word: &str| {
//!         let known = words.iter().position(|known| known == word);
//!         TokenId::new(known.unwrap_or_else(|| { words.push(word.into()); words.len() - 1 }) as u32)
//!     };
//!     text.split(' ').map(&mut token).collect()
//! };
//!
//! for prompt in ["Hello world how are you", "Hello world what's up", "Hi there"] {
//!     let tokens = encode(prompt);
//!     let mut pages = Vec::new();
//!     let cached = tree.match_prefix(namespace, &tokens, &mut pages); // K and V of these pages are computed
//!     tree.lock(cached.handle)?; // they stay while the model computes the rest
//!     pages.extend(free.drain(..tokens.len() - pages.len()));
//!     let inserted = tree.insert(namespace, &tokens, &pages)?;
//!     assert_eq!(inserted.known, cached.pages); // the tree has taken the other pages
//!     tree.unlock(cached.handle, &mut free)?;
//! }
//! println!("{tree}");
//! assert_eq!(tree.to_string(), "\
//! 9 pages evictable, 0 protected
//! ns0
//!   2 pages: t0 t1
//!     3 pages: t2 t3 t4
//!     2 pages: t5 t6
//!   2 pages: t7 t8
//! ");
//!
//! // A match ends inside a node, which is split. The lock protects the match from the eviction of older pages.
//! let mut pages = Vec::new();
//! let chat = tree.match_prefix(namespace, &encode("Hello world how is it"), &mut pages);
//! tree.lock(chat.handle)?;
//! tree.evict(3, &mut free)?; // "are you", then "up"
//! assert_eq!(tree.to_string(), "\
//! 3 pages evictable, 3 protected
//! ns0
//!   2 pages, locked: t0 t1
//!     1 page, locked: t2
//!     1 page: t5
//!   2 pages: t7 t8
//! ");
//! tree.unlock(chat.handle, &mut free)?;
//! assert_eq!((tree.size().evictable, tree.size().total_tokens()), (6, 6));
//! # Ok(())
//! # }
//! ```
//!
//! An [`Engine`](crate::Engine) uses the same code.

// `prefix/` has the tree itself. Not here: pages, steps and memory.

mod config;
mod error;

use std::fmt;

use crate::bitmap::{Bitmap, Bits, for_each_word};
use crate::error::{ConfigError, Count, Error};
use crate::event::Event;
use crate::fence::Fence;
use crate::hash::{NamespaceNames, PageHash};
use crate::id::{Namespace, PageId, TokenId};
use crate::memory::{self, Memory, OutOfMemory};
use crate::prefix::handles::{HandleError, Handles, LOCKS_MAX};
use crate::prefix::{PrefixTree, SizeInfo, TreeShape, by_handle, outline};
use crate::world::{Broken, Owner};

pub use crate::id::Handle;
pub use config::TreeConfig;
pub use error::TreeError;

/// The result of [`Tree::match_prefix`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Matched {
    /// Names the end of the match, and holds no lock.
    pub handle: Handle,
    /// Number of matched pages.
    pub pages: u32,
}

/// The result of [`Tree::insert`] and [`Tree::extend`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct Insertion {
    /// Names the end of the tokens of the call.
    pub handle: Handle,
    /// Number of leading pages that the tree already had. The caller keeps its own pages for them.
    pub known: u32,
}

/// The sizes of a tree, in pages and in tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TreeSize {
    /// Pages that [`Tree::evict`] can return now.
    pub evictable: u32,
    /// Pages of locked prefixes.
    pub protected: u32,
    /// Number of tokens of a page.
    pub page_size: u32,
}

impl TreeSize {
    /// Returns the number of cached pages.
    pub fn total(&self) -> u32 {
        self.evictable + self.protected
    }

    /// Returns the number of tokens of the evictable pages.
    pub fn evictable_tokens(&self) -> u64 {
        u64::from(self.evictable) * u64::from(self.page_size)
    }

    /// Returns the number of tokens of the protected pages.
    pub fn protected_tokens(&self) -> u64 {
        u64::from(self.protected) * u64::from(self.page_size)
    }

    /// Returns the number of cached tokens.
    pub fn total_tokens(&self) -> u64 {
        self.evictable_tokens() + self.protected_tokens()
    }
}

/// The tables of a tree.
struct Tables {
    prefixes: PrefixTree,
    handles: Handles,
    /// Empty: a tree has no steps, so no lock waits for one.
    fence: Fence,
    /// The cached pages.
    taken: Bitmap,
}

impl Tables {
    /// Creates the tables in `memory`. Also returns their bytes.
    fn new(shape: &TreeShape, memory: &mut Memory) -> Result<(Self, u64), OutOfMemory> {
        let (prefixes, of_tree) = PrefixTree::of_shape(shape, memory)?;
        let tables = Self {
            prefixes,
            handles: Handles::new(shape.page_count, memory)?,
            fence: Fence::new_in(0, 0, 0, memory)?,
            taken: Bitmap::new(shape.page_count, false, memory)?,
        };
        Ok((tables, of_tree.tree + of_tree.hashes + of_tree.events + memory.take_bytes()))
    }
}

/// The cached prefixes of a host that owns the pages.
///
/// A page belongs to the tree from [`insert`](Tree::insert) or [`extend`](Tree::extend) until [`evict`](Tree::evict),
/// [`reset`](Tree::reset) or [`unlock`](Tree::unlock) returns it. An error leaves the tree unchanged. After `new`, no
/// call allocates, except to grow a caller's `Vec` and to name namespaces. A tree is `Send` and `Sync`.
///
/// `Display` prints a line for each node.
pub struct Tree {
    page_count: u32,
    tables: Tables,
}

impl Tree {
    /// Creates an empty tree and allocates all its memory.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the value; [`ConfigError::OutOfMemory`] if the host lacks memory.
    pub fn new(config: TreeConfig) -> Result<Self, ConfigError> {
        Self::with_hash_bits(config, u32::BITS)
    }

    /// Creates a tree whose tables use `hash_bits` bits of each hash. Tests use fewer than 32 to force collisions.
    pub(crate) fn with_hash_bits(config: TreeConfig, hash_bits: u32) -> Result<Self, ConfigError> {
        let shape = TreeShape { hash_bits, ..config.shape()? };
        let bytes = config.bytes()?;
        let checked = if config.prefault { memory::check(bytes) } else { Ok(()) };
        let made = checked.and_then(|()| Tables::new(&shape, &mut Memory::new(config.prefault)));
        let (tables, _) = made.map_err(|_| ConfigError::OutOfMemory { bytes })?;
        Ok(Self { page_count: shape.page_count, tables })
    }

    /// Returns the number of pages of the longest cached prefix. Changes nothing, not even recency. O(tokens matched).
    pub fn find(&self, namespace: Namespace, tokens: &[TokenId]) -> u32 {
        self.tables.prefixes.match_prefix(namespace, tokens).pages()
    }

    /// Appends the pages of the longest cached prefix to `pages`, and makes it the most recently used. It consists of
    /// whole pages, and stays valid while its handle is locked. O(tokens matched).
    ///
    /// Leave out a prompt's last token: the model must compute it to sample the next one.
    pub fn match_prefix(&mut self, namespace: Namespace, tokens: &[TokenId], pages: &mut Vec<PageId>) -> Matched {
        let Tables { prefixes, handles, .. } = &mut self.tables;
        let append = |run: &[PageId]| pages.extend_from_slice(run);
        let (handle, pages) = by_handle::match_prefix(prefixes, handles, namespace, tokens, append);
        Matched { handle, pages }
    }

    /// Inserts whole pages from the start of a prefix, and makes the prefix the most recently used. The tree takes the
    /// pages after [`Insertion::known`], and ignores the page ids before. O(tokens).
    ///
    /// # Errors
    /// [`TreeError::Length`], [`TreeError::UnnamedNamespace`], [`TreeError::PendingToken`], [`TreeError::Page`].
    pub fn insert(
        &mut self,
        namespace: Namespace,
        tokens: &[TokenId],
        pages: &[PageId],
    ) -> Result<Insertion, TreeError> {
        self.check_length(tokens, pages)?;
        if !self.tables.prefixes.names.is_named(namespace) {
            return Err(TreeError::UnnamedNamespace { namespace });
        }
        let place = by_handle::place_in(&self.tables.prefixes, namespace, tokens);
        let (tokens, pages) = self.take(place.known, tokens, pages)?;
        let Tables { prefixes, handles, fence, .. } = &mut self.tables;
        let handle = by_handle::insert(prefixes, handles, fence, place, tokens, pages);
        Ok(Insertion { handle, known: place.known })
    }

    /// Inserts whole pages after a locked prefix, and moves one lock of `locked` to their end. The tree takes the pages
    /// after [`Insertion::known`]. O(new tokens).
    ///
    /// If no other call has returned `locked`, it has one lock, and no prefix continues it, then its node grows in
    /// place: the new handle replaces `locked`, which is gone. To extend the empty prefix, [`insert`](Tree::insert).
    ///
    /// # Errors
    /// [`TreeError::Length`], [`TreeError::Gone`], [`TreeError::NotLocked`], also for the empty prefix,
    /// [`TreeError::Locks`], [`TreeError::PendingToken`], [`TreeError::Page`].
    pub fn extend(&mut self, locked: Handle, tokens: &[TokenId], pages: &[PageId]) -> Result<Insertion, TreeError> {
        self.check_length(tokens, pages)?;
        if locked == Handle::default() {
            return Err(TreeError::NotLocked { handle: locked });
        }
        let Tables { prefixes, handles, .. } = &self.tables;
        let place = by_handle::place_after(prefixes, handles, locked, tokens).map_err(error_of(locked))?;
        let (tokens, pages) = self.take(place.known, tokens, pages)?;
        let Tables { prefixes, handles, fence, .. } = &mut self.tables;
        let handle = by_handle::extend(prefixes, handles, fence, (locked, place), tokens, pages);
        Ok(Insertion { handle, known: place.known })
    }

    fn check_length(&self, tokens: &[TokenId], pages: &[PageId]) -> Result<(), TreeError> {
        let page_size = self.tables.prefixes.page_size();
        if pages.len().checked_mul(page_size as usize) == Some(tokens.len()) {
            return Ok(());
        }
        Err(TreeError::Length { tokens: tokens.len(), pages: pages.len(), page_size })
    }

    /// Takes the pages after the first `known`, or none of them. Returns them with their tokens.
    fn take<'a>(
        &mut self,
        known: u32,
        tokens: &'a [TokenId],
        pages: &'a [PageId],
    ) -> Result<(&'a [TokenId], &'a [PageId]), TreeError> {
        let before = known as usize * self.tables.prefixes.page_size() as usize;
        let (new_tokens, new_pages) = (&tokens[before..], &pages[known as usize..]);
        // A fold without an early end compares many tokens at once.
        let is_pending = |&token: &TokenId| token == TokenId::PENDING;
        if new_tokens.iter().fold(false, |any, token| any | is_pending(token)) {
            let at = new_tokens.iter().position(is_pending).expect("one is pending");
            return Err(TreeError::PendingToken { position: (before + at) as u32 });
        }
        let taken = &mut self.tables.taken;
        for (i, &page) in new_pages.iter().enumerate() {
            let bits = Bits::one(page.index());
            if page.raw() >= self.page_count || taken.word(bits.word) & bits.mask != 0 {
                give(taken, &new_pages[..i]);
                return Err(TreeError::Page { page });
            }
            taken.insert(bits);
        }
        Ok((new_tokens, new_pages))
    }

    /// Locks a prefix: it stays cached until as many calls of [`unlock`](Tree::unlock). O(nodes that were idle).
    ///
    /// Locks of the empty prefix are not counted.
    ///
    /// # Errors
    /// [`TreeError::Gone`], [`TreeError::Locks`].
    pub fn lock(&mut self, handle: Handle) -> Result<(), TreeError> {
        if handle == Handle::default() {
            return Ok(());
        }
        let Tables { prefixes, handles, fence, .. } = &mut self.tables;
        by_handle::lock(prefixes, handles, fence, handle).map_err(error_of(handle))
    }

    /// Releases one lock of a prefix. Its pages that no other lock protects become the most recently used. After a
    /// [`reset`](Tree::reset) since the pages were cached, they are appended to `freed` instead. O(nodes that become
    /// idle).
    ///
    /// # Errors
    /// [`TreeError::Gone`], [`TreeError::NotLocked`].
    pub fn unlock(&mut self, handle: Handle, freed: &mut Vec<PageId>) -> Result<(), TreeError> {
        if handle == Handle::default() {
            return Ok(());
        }
        let before = freed.len();
        let Tables { prefixes, handles, fence, taken } = &mut self.tables;
        by_handle::unlock(prefixes, handles, fence, handle, freed).map_err(error_of(handle))?;
        give(taken, &freed[before..]);
        Ok(())
    }

    /// Evicts exactly `count` pages, the least recently used first and the last pages of a prefix before those that
    /// precede them. Appends them to `pages`. O(nodes and pages evicted).
    ///
    /// # Errors
    /// [`TreeError::NotEvictable`].
    pub fn evict(&mut self, count: u32, pages: &mut Vec<PageId>) -> Result<(), TreeError> {
        let Tables { prefixes, taken, .. } = &mut self.tables;
        let evictable = prefixes.size_info().evictable;
        if count > evictable {
            return Err(TreeError::NotEvictable { wanted: count, evictable });
        }
        let before = pages.len();
        prefixes.evict(count, pages);
        give(taken, &pages[before..]);
        Ok(())
    }

    /// Evicts the least recently used pages back to the previous place where a prefix branches or a call's prefix
    /// ended, and appends them to `pages`. Returns the handle that named their end, which is gone now. O(pages).
    ///
    /// For a host that stores data by handle, such as states of recurrent layers. If no call returned that handle, it
    /// equals no other one. Returns `None` if no page is evictable.
    pub fn evict_node(&mut self, pages: &mut Vec<PageId>) -> Option<Handle> {
        let Tables { prefixes, handles, taken, .. } = &mut self.tables;
        let before = pages.len();
        let handle = by_handle::evict_node(prefixes, handles, pages)?;
        give(taken, &pages[before..]);
        Some(handle)
    }

    /// Appends the pages of a handle's prefix to `pages`, in order. Returns their number. O(pages).
    ///
    /// # Errors
    /// [`TreeError::Gone`].
    pub fn pages_of(&self, handle: Handle, pages: &mut Vec<PageId>) -> Result<u32, TreeError> {
        if handle == Handle::default() {
            return Ok(0);
        }
        let Tables { prefixes, handles, .. } = &self.tables;
        by_handle::pages_of(prefixes, handles, handle, pages).map_err(error_of(handle))
    }

    /// Invalidates all cached prefixes, for a host that changes the model's weights. Appends the pages of idle prefixes
    /// to `pages`. Locked prefixes match no more, and their last [`unlock`](Tree::unlock) returns their pages. O(idle
    /// pages).
    pub fn reset(&mut self, pages: &mut Vec<PageId>) {
        let Tables { prefixes, taken, .. } = &mut self.tables;
        let before = pages.len();
        prefixes.reset(pages);
        give(taken, &pages[before..]);
    }

    /// Returns the numbers of cached pages. O(1).
    pub fn size(&self) -> TreeSize {
        let SizeInfo { evictable, protected } = self.tables.prefixes.size_info();
        TreeSize { evictable, protected, page_size: self.tables.prefixes.page_size() }
    }

    /// Checks the numbered invariants of all tables, for tests and debugging. O(capacity of the tree).
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn verify(&self) -> Result<(), Broken> {
        let Tables { prefixes, handles, fence, taken } = &self.tables;
        let locks = handles.locks(prefixes);
        let mut checked = prefixes.check(&locks, &Default::default(), fence);
        checked = checked.and_then(|()| handles.check(prefixes));
        checked = checked.and_then(|()| {
            let named = prefixes.names_are_counted(std::iter::empty());
            let own = prefixes.pages().all(|(_, page)| taken.contains(page.raw()));
            let all = own && prefixes.pages().count() == taken.count() as usize;
            match (named, all) {
                (true, true) => Ok(()),
                (false, _) => Err(("T11: names stay while they have users; users are counted", None)),
                (_, false) => Err(("P1: the taken pages are those of the tree", None)),
            }
        });
        checked.map_err(|(invariant, page)| {
            let owner = page.and_then(|page| prefixes.pages().find(|(_, own)| *own == page));
            Broken { invariant, page, owner: owner.map(|(node, _)| Owner::Node(node)) }
        })
    }
}

/// Namespaces, hashes and events, as in [`Engine`](crate::Engine).
impl Tree {
    /// Names a namespace, as [`Engine::name_namespace`](crate::Engine::name_namespace). O(names).
    ///
    /// # Errors
    /// [`Error::NamespaceNamed`], [`Error::NamesTaken`].
    pub fn name_namespace(&mut self, namespace: Namespace, names: NamespaceNames) -> Result<(), Error> {
        self.tables.prefixes.names.name(namespace, names)
    }

    /// Forgets the names of a namespace, as [`Engine::forget_namespace`](crate::Engine::forget_namespace). From then on
    /// [`insert`](Tree::insert) rejects the namespace. O(names).
    ///
    /// # Errors
    /// [`Error::UnnamedNamespace`].
    pub fn forget_namespace(&mut self, namespace: Namespace) -> Result<(), Error> {
        self.tables.prefixes.names.forget(namespace)
    }

    /// Returns the number of pages of the longest cached prefix of a chain of page hashes, as
    /// [`Engine::match_hashes`](crate::Engine::match_hashes). Changes nothing. O(hashes matched).
    pub fn find_hashes(&self, chain: &[PageHash]) -> u32 {
        self.tables.prefixes.match_hashes(chain, |_| ()).pages()
    }

    /// Passes the changes of the cached prefixes since the last drain to `sink`, as
    /// [`Engine::drain_events`](crate::Engine::drain_events). [`Stored::step`](crate::event::Stored::step) is 0.
    /// O(pages of the events); after an overflow O(tree).
    pub fn drain_events(&mut self, sink: impl FnMut(Event<'_>)) {
        self.tables.prefixes.drain_events(sink);
    }

    /// Makes the next [drain](Tree::drain_events) emit the whole cache, for a subscriber that is new or has missed
    /// events. O(events in the buffer).
    pub fn restate_events(&mut self) {
        self.tables.prefixes.events().into_iter().for_each(|events| events.restate());
    }
}

impl fmt::Display for Tree {
    /// Writes the sizes, then a line for each namespace and each node.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TreeSize { evictable, protected, .. } = self.size();
        writeln!(f, "{} evictable, {protected} protected", Count(evictable, "page"))?;
        outline::write(&self.tables.prefixes, f)
    }
}

impl fmt::Debug for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Removes pages from the set of cached pages.
fn give(taken: &mut Bitmap, pages: &[PageId]) {
    for_each_word(PageId::as_raw(pages), |bits| taken.remove(bits));
}

fn error_of(handle: Handle) -> impl Fn(HandleError) -> TreeError {
    move |error| match error {
        HandleError::Gone => TreeError::Gone { handle },
        HandleError::NotLocked => TreeError::NotLocked { handle },
        HandleError::Locks => TreeError::Locks { handle, max: LOCKS_MAX },
    }
}
