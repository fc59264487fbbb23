//! Errors of a tree's calls.

use crate::error::{Count, displayed};
use crate::id::{Handle, Namespace, PageId};

displayed! {
    /// The reason why a [`Tree`](super::Tree) rejected a call. The tree is unchanged.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum TreeError {
        /// The last page of the handle's prefix was evicted, its idle prefix was reset, or
        /// [`extend`](super::Tree::extend) replaced the handle. The handle never names a prefix again.
        Gone { handle: Handle } => "{handle:?} names no cached prefix";
        /// The handle has no lock. The empty prefix never has one that counts.
        NotLocked { handle: Handle } => "{handle:?} has no lock";
        /// The handle has the maximum number of locks.
        Locks { handle: Handle, max: u32 } => "{handle:?} has {} already", Count(max, "lock");
        /// The call needs more pages than locks leave evictable.
        NotEvictable { wanted: u32, evictable: u32 } => "{} cannot be evicted, {evictable} can", Count(wanted, "page");
        /// There are not `page_size` tokens for each page.
        Length {
            tokens: usize,
            pages: usize,
            page_size: u32,
        } => "{} cannot fill {} of {page_size}", Count(tokens, "token"), Count(pages, "page");
        /// The page is not below [`TreeConfig::pages`](super::TreeConfig::pages), the tree has it, or the call gives it
        /// twice.
        Page { page: PageId } => "page {} is out of range or already cached", page.raw();
        /// A token of a new page is [`TokenId::PENDING`](crate::TokenId::PENDING), the placeholder for unknown tokens.
        PendingToken {
            /// Its index in the tokens of the call.
            position: u32,
        } => "token {position} is the placeholder for unknown tokens";
        /// Pages are hashed, and the namespace has no names or is forgotten.
        UnnamedNamespace { namespace: Namespace } => "pages are hashed, but {namespace:?} has no names";
    }
}

impl std::error::Error for TreeError {}
