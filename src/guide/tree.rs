//! The tree alone: a prefix cache for a host that has its own allocator, page tables, memory and kernels.
//!
//! A [`Tree`](crate::tree::Tree) finds the pages that have K and V of a prompt's beginning. It has neither sequences
//! nor steps, and moves no bytes. Use it to add prefix reuse to a complete host. An [`Engine`](crate::Engine) also
//! allocates pages, plans steps, forks, and holds pages until the device has finished with them. Use it if the host
//! lacks these parts.
//!
//! ```
//! use kvarena::tree::{Handle, Tree, TreeConfig, TreeError};
//! use kvarena::{Namespace, PageId, TokenId};
//!
//! const PAGE: usize = 4;
//! const TENANT: Namespace = Namespace::new(1);
//!
//! /// The host's allocator, and the tree beside it.
//! struct Cache {
//!     tree: Tree,
//!     free: Vec<PageId>,
//! }
//!
//! /// A running request.
//! struct Request {
//!     tokens: Vec<TokenId>,
//!     /// The page table, which kernels read.
//!     pages: Vec<PageId>,
//!     /// The first so many pages are the tree's, and `locked` is their end. The request owns the rest.
//!     cached: usize,
//!     locked: Handle,
//! }
//!
//! impl Cache {
//!     /// Admits a prompt, and returns a request with pages for all tokens. `None`: the pages do not suffice.
//!     fn admit(&mut self, tokens: &[TokenId]) -> Result<Option<Request>, TreeError> {
//!         let mut pages = Vec::new();
//!         // The model must compute the last token, to sample the next one.
//!         let found = self.tree.match_prefix(TENANT, &tokens[..tokens.len() - 1], &mut pages);
//!         // Lock before evicting, or the eviction may take the match.
//!         self.tree.lock(found.handle)?;
//!         let wanted = tokens.len().div_ceil(PAGE) - pages.len();
//!         if !self.reclaim(wanted)? {
//!             self.tree.unlock(found.handle, &mut self.free)?;
//!             return Ok(None);
//!         }
//!         pages.extend(self.free.drain(..wanted));
//!         let (cached, locked) = (found.pages as usize, found.handle);
//!         Ok(Some(Request { tokens: tokens.to_vec(), pages, cached, locked }))
//!     }
//!
//!     /// Makes `count` pages free, by exact least-recently-used eviction. Returns false if locks prevent it.
//!     fn reclaim(&mut self, count: usize) -> Result<bool, TreeError> {
//!         let lacking = count.saturating_sub(self.free.len()) as u32;
//!         match self.tree.evict(lacking, &mut self.free) {
//!             Err(TreeError::NotEvictable { .. }) => Ok(false),
//!             other => other.map(|()| true),
//!         }
//!     }
//!
//!     /// Publishes the whole pages of the request that the model has computed.
//!     fn publish(&mut self, request: &mut Request) -> Result<(), TreeError> {
//!         let Request { tokens, pages, cached, locked } = request;
//!         let whole = tokens.len() / PAGE;
//!         let (new, new_pages) = (&tokens[*cached * PAGE..whole * PAGE], &pages[*cached..whole]);
//!         let inserted = if *locked == Handle::default() {
//!             let inserted = self.tree.insert(TENANT, new, new_pages)?; // nothing was cached
//!             self.tree.lock(inserted.handle)?;
//!             inserted
//!         } else {
//!             self.tree.extend(*locked, new, new_pages)? // moves the lock
//!         };
//!         // Another request has published equal pages first: use its pages, and free the duplicates.
//!         let known = *cached..*cached + inserted.known as usize;
//!         self.free.extend_from_slice(&pages[known.clone()]);
//!         let mut path = Vec::new();
//!         self.tree.pages_of(inserted.handle, &mut path)?;
//!         pages[known.clone()].copy_from_slice(&path[known]);
//!         (*cached, *locked) = (whole, inserted.handle);
//!         Ok(())
//!     }
//!
//!     /// Ends a request. Its published pages stay cached.
//!     fn finish(&mut self, request: Request) -> Result<(), TreeError> {
//!         self.free.extend_from_slice(&request.pages[request.cached..]);
//!         self.tree.unlock(request.locked, &mut self.free)
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = TreeConfig::new(8, PAGE as u32);
//! let mut cache = Cache { tree: Tree::new(config)?, free: (0..8).map(PageId::new).collect() };
//! let prompt: Vec<TokenId> = (0..18).map(TokenId::new).collect();
//!
//! // Two requests with one prompt run at once. Both compute it, and the second publishes duplicates.
//! let (mut first, mut second) = (cache.admit(&prompt)?.unwrap(), None);
//! cache.publish(&mut first)?;
//! assert_eq!((first.cached, cache.tree.size().protected), (4, 4));
//! if let Some(mut request) = cache.admit(&prompt)? {
//!     assert_eq!(request.pages[..4], first.pages[..4]); // a hit: only the last two tokens are computed
//!     request.tokens.extend((20..22).map(TokenId::new)); // the fifth page is full
//!     cache.publish(&mut request)?;
//!     second = Some(request);
//! }
//! cache.finish(first)?;
//! cache.finish(second.unwrap())?;
//! assert_eq!((cache.tree.size().evictable, cache.free.len()), (5, 3));
//!
//! // Another prompt needs seven pages: four are evicted, the last ones of the old prefix.
//! let other: Vec<TokenId> = (100..128).map(TokenId::new).collect();
//! let third = cache.admit(&other)?.unwrap();
//! assert_eq!(cache.tree.find(TENANT, &prompt), 1);
//! cache.finish(third)?;
//! cache.tree.verify()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Handles
//!
//! A [`Handle`](crate::tree::Handle) names the end of a prefix. It has 16 bytes and is `Copy`; `to_raw` returns it as
//! two numbers for other languages. The tree uses no value twice, so an outdated handle causes an error and never locks
//! other pages.
//!
//! | event | a handle |
//! |---|---|
//! | its prefix is split, prefixes continue it, other pages are evicted | stays |
//! | its last page is evicted, or its idle prefix is reset | is gone |
//! | `extend` by the only holder of a prefix that nothing continues | is replaced by the result, and gone |
//! | `extend` while another call has returned the same handle | stays |
//! | its locked prefix is reset | stays until its last `unlock`, which returns the pages |
//!
//! Calls that return the end of one prefix return equal handles. The tree counts locks by handle, not by holder, so
//! each holder releases its own lock once. The default handle names the empty prefix. Locking it has no effect.
//! `extend` rejects it, because it belongs to no namespace.
//!
//! # Costs
//!
//! All memory is allocated at the start, and no later call allocates, except to grow a caller's `Vec`.
//! [`TreeConfig::bytes`](crate::tree::TreeConfig::bytes) returns the sum. A match costs O(tokens matched). Locks and
//! unlocks cost O(nodes that change between idle and locked), evictions O(pages), and `extend` in place O(new tokens).
//! `cargo bench --bench targets -- --only tree` measures the calls.
//!
//! # What goes wrong
//!
//! * **A kernel reads a page that was evicted.** The tree has no steps. Unlock a prefix only after the device has
//!   finished all steps that read it, and insert a page only after a step that computes it.
//! * **A match is evicted.** A match holds no lock. Lock its handle before the next `evict`.
//! * **Pages leak.** The first `known` pages of an insertion stay the caller's. Free them, as `publish` does, or when
//!   the request ends; the tree's pages have the same K and V.
//! * **`NotEvictable`.** Locks protect the other pages. Preempt a request: release its lock and its own pages.
//! * **`Gone` after `extend`.** The node grew in place. Use the handle that `extend` returned.
//! * **A lost handle keeps its lock for ever.** No guard object releases it, because a lock often outlives a scope.
//!   Release it where the request ends, also on errors.
