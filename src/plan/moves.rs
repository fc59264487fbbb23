//! Moves between device and swap pages, and the byte forms of copies and compactions for other ranks. `system/fork.rs`
//! and `system/accept.rs` make copies and compactions.

use bytemuck::{Pod, Zeroable};

use super::{Compaction, PageCopy, PlanBytesError};
use crate::id::{PageId, SwapPageId};

/// A page of the pool and a page of swap memory. A save or a load copies one to the other, with all planes of all
/// lanes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct PageMove {
    /// The page of the pool.
    pub device: PageId,
    /// The page of swap memory.
    pub swap: SwapPageId,
}

/// Magic number and version of the byte form of copies.
const COPIES: u64 = u64::from_le_bytes(*b"kvcopy01");
/// Magic number and version of the byte form of compactions.
const COMPACTIONS: u64 = u64::from_le_bytes(*b"kvmove01");

impl PageCopy {
    /// Returns the byte form of a fork's copies, little-endian: `"kvcopy01"`, their number in 64 bits, then for each
    /// copy `source` and `target` in 32 bits. O(copies).
    pub fn list_to_bytes(copies: &[Self]) -> Vec<u8> {
        to_bytes(COPIES, copies)
    }

    /// Reads the byte form. O(copies).
    ///
    /// # Errors
    /// [`PlanBytesError::Length`], [`PlanBytesError::Magic`]. The backend checks whether the pages exist.
    pub fn list_from_bytes(bytes: &[u8]) -> Result<Vec<Self>, PlanBytesError> {
        from_bytes(COPIES, bytes)
    }
}

impl Compaction {
    /// Returns the byte form of a step's compactions, little-endian: `"kvmove01"`, their number in 64 bits, then for
    /// each compaction `row` and `first` in 32 bits and `keep` in 64 bits. O(compactions).
    pub fn list_to_bytes(compactions: &[Self]) -> Vec<u8> {
        to_bytes(COMPACTIONS, compactions)
    }

    /// Reads the byte form. O(compactions).
    ///
    /// # Errors
    /// [`PlanBytesError::Length`], [`PlanBytesError::Magic`], [`PlanBytesError::Compaction`]. The backend checks
    /// whether the rows and places exist.
    pub fn list_from_bytes(bytes: &[u8]) -> Result<Vec<Self>, PlanBytesError> {
        let compactions: Vec<Self> = from_bytes(COMPACTIONS, bytes)?;
        match compactions.iter().position(|compaction| compaction.end() > 1 << 32) {
            Some(index) => Err(PlanBytesError::Compaction { index }),
            None => Ok(compactions),
        }
    }
}

fn to_bytes<T: Pod>(magic: u64, list: &[T]) -> Vec<u8> {
    let header = [magic, list.len() as u64];
    [bytemuck::cast_slice(&header), bytemuck::cast_slice(list)].concat()
}

fn from_bytes<T: Pod>(magic: u64, bytes: &[u8]) -> Result<Vec<T>, PlanBytesError> {
    let length = PlanBytesError::Length { actual: bytes.len() };
    let (header, list) = bytes.split_first_chunk::<16>().ok_or(length)?;
    let [actual, count]: [u64; 2] = bytemuck::cast(*header);
    if actual != magic {
        return Err(PlanBytesError::Magic);
    }
    match count.checked_mul(size_of::<T>() as u64) {
        Some(size) if size == list.len() as u64 => Ok(bytemuck::pod_collect_to_vec(list)),
        _ => Err(length),
    }
}
