//! Swap memory over several ranks. A swap page has a part on each rank, and a record has a part for each rank: a record
//! of its own, under the rank's fingerprint.
//!
//! Finds ask stores for the part of rank 0 alone, so it is put last. A reader accepts a record only with all its parts.

use kvarena::backend::SwapMemory;
use kvarena::id::SwapPageId;

/// Swap memory whose leases contain the bytes of every rank. All ranks have the engine's layout of pages.
///
/// Backends of one rank have it if their leases are bytes. A backend over several ranks implements it.
pub trait RankMemory: SwapMemory {
    /// Returns the number of ranks.
    fn ranks(&self) -> usize;

    /// Leases swap pages to a reader, as [`SwapMemory::lease`] does. Returns one lease for each page, in the order of
    /// `pages`. A backend whose ranks have threads waits for them once.
    fn lease_all(&mut self, pages: &[SwapPageId]) -> Vec<Self::Read> {
        pages.iter().map(|&page| self.lease(page)).collect()
    }

    /// Leases swap pages to a writer, as [`SwapMemory::lease_mut`] does. Returns one lease for each page, in the order
    /// of `pages`.
    fn lease_all_mut(&mut self, pages: &[SwapPageId]) -> Vec<Self::Write> {
        pages.iter().map(|&page| self.lease_mut(page)).collect()
    }

    /// Returns the bytes of a leased page on a rank.
    ///
    /// # Panics
    /// If there is no such rank.
    fn part(lease: &Self::Read, rank: usize) -> &[u8];

    /// Returns the bytes of a leased page on a rank, to write.
    ///
    /// # Panics
    /// If there is no such rank.
    fn part_mut(lease: &mut Self::Write, rank: usize) -> &mut [u8];
}

impl<B> RankMemory for B
where
    B: SwapMemory<Read: AsRef<[u8]>, Write: AsMut<[u8]>>,
{
    fn ranks(&self) -> usize {
        1
    }

    fn part(lease: &B::Read, rank: usize) -> &[u8] {
        assert_eq!(rank, 0, "there is one rank");
        lease.as_ref()
    }

    fn part_mut(lease: &mut B::Write, rank: usize) -> &mut [u8] {
        assert_eq!(rank, 0, "there is one rank");
        lease.as_mut()
    }
}
