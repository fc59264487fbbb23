//! [`SwapMemory`]: the bytes of swap pages, for stores that read and write them on other threads.

use super::Backend;
use crate::id::{MoveId, SwapPageId};

/// The last completed move in each direction, or 0. A backend without bytes may return any greater number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Moved {
    /// All saves up to this one are complete.
    pub saved: MoveId,
    /// All loads up to this one are complete.
    pub loaded: MoveId,
}

impl Moved {
    /// Every move is complete.
    pub(crate) const ALL: Self = Self { saved: MoveId::new(u64::MAX), loaded: MoveId::new(u64::MAX) };
}

/// A backend with swap pages that other threads may read and write.
///
/// A lease is the right to read or write a page (B16). It may outlive the backend, and ends when it is dropped. No
/// unfinished save writes a leased page, and no unfinished load reads a page with a write lease.
///
/// A store drops its leases before [`Engine::put_done`](crate::Engine::put_done) and
/// [`Engine::fetched`](crate::Engine::fetched). Later saves and loads use the pages; a backend rejects those of a
/// leased page with [`PlanError::Leased`](crate::backend::PlanError::Leased).
///
/// The leases of this crate's backends are `AsRef<[u8]>` and `AsMut<[u8]>`. A backend over several ranks has a part of
/// each page on each rank, so its lease is a list of the ranks' leases. Code for one rank requires
/// `SwapMemory<Read: AsRef<[u8]>, Write: AsMut<[u8]>>`.
pub trait SwapMemory: Backend {
    /// A lease to read a swap page.
    type Read: Send + 'static;
    /// A lease to write a swap page.
    type Write: Send + 'static;

    /// Leases a swap page to a reader. A page may have several readers.
    ///
    /// # Panics
    /// If the page is not below [`swap_pages`](Backend::swap_pages), a write lease covers it, or an unfinished save
    /// writes it.
    fn lease(&mut self, page: SwapPageId) -> Self::Read;

    /// Leases a swap page to a writer.
    ///
    /// # Panics
    /// If the page is not below [`swap_pages`](Backend::swap_pages), any lease covers it, or an unfinished move uses
    /// it.
    fn lease_mut(&mut self, page: SwapPageId) -> Self::Write;
}
