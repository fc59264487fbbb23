//! Memory that is allocated and touched at the start, in huge pages if the system has them; and prefetches.
//!
//! A system that over-commits memory grants more than it has, and ends the process that touches the excess. No program
//! can catch this. [`check`] therefore first allocates the total in one piece: most systems reject a piece larger than
//! all their memory.
//!
//! A prefix tree of a million leaves of 256 tokens takes more than a gigabyte, which eviction accesses at random. With
//! pages of 4 KiB, each access misses both the TLB and the cache. At page_size 16, evicting one of 1,000,000 leaves
//! takes 2,550 ns, and 500 ns with huge pages (`cargo bench --bench targets`). At page_size 1, evicting one of 100,000
//! leaves takes 650 ns, and 400 ns with prefetches of the next leaves. These two hints are the only `unsafe` code
//! outside the backends.

use std::collections::VecDeque;
use std::hint::black_box;
use std::mem::MaybeUninit;

use bytemuck::Zeroable;
use slotmap::{Key, SecondaryMap, SlotMap};

/// The system could not allocate memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfMemory {
    /// Requested bytes.
    pub bytes: u64,
}

fn refused<T>(len: u64) -> OutOfMemory {
    OutOfMemory { bytes: len.saturating_mul(size_of::<T>() as u64) }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Allocate,
    /// Allocates, and touches what it has allocated.
    Prefault,
    /// Allocates nothing. Tables are empty and of no use.
    Count,
}

/// Allocates the memory of tables, or only counts its bytes. So the constructor of a table is the one statement of the
/// memory that the table takes.
pub(crate) struct Memory {
    mode: Mode,
    /// Bytes requested since the last [`Memory::take_bytes`].
    bytes: u64,
}

impl Memory {
    /// Returns a memory that allocates. With `prefault`, tables touch what they may use later.
    pub fn new(prefault: bool) -> Self {
        Self { mode: if prefault { Mode::Prefault } else { Mode::Allocate }, bytes: 0 }
    }

    /// Returns a memory that only counts.
    pub fn counting() -> Self {
        Self { mode: Mode::Count, bytes: 0 }
    }

    /// Returns whether tables have memory to write to.
    pub fn allocates(&self) -> bool {
        self.mode != Mode::Count
    }

    pub fn prefaults(&self) -> bool {
        self.mode == Mode::Prefault
    }

    /// Returns the bytes that were requested since the last call.
    pub fn take_bytes(&mut self) -> u64 {
        std::mem::take(&mut self.bytes)
    }

    /// Counts `bytes` bytes that the caller allocates itself if the result is true.
    pub fn grants(&mut self, bytes: u64) -> bool {
        self.bytes += bytes;
        self.allocates()
    }

    /// Allocates an empty vector for `len` items.
    pub fn reserved<T>(&mut self, len: u64) -> Result<Vec<T>, OutOfMemory> {
        if !self.grants(len * size_of::<T>() as u64) {
            return Ok(Vec::new());
        }
        let mut items: Vec<T> = reserved(len)?;
        if self.prefaults() {
            advise_huge_pages(items.as_ptr().addr(), items.capacity() * size_of::<T>());
            items.spare_capacity_mut().iter_mut().for_each(|item| *black_box(item) = MaybeUninit::zeroed());
        }
        Ok(items)
    }

    /// Allocates an empty queue for `len` items.
    pub fn queue<T>(&mut self, len: u64) -> Result<VecDeque<T>, OutOfMemory> {
        self.reserved(len).map(VecDeque::from)
    }

    /// Allocates a vector of `len` equal items.
    pub fn filled<T: Clone>(&mut self, len: u64, item: T) -> Result<Vec<T>, OutOfMemory> {
        self.listed(len, std::iter::repeat_n(item, len as usize))
    }

    /// Allocates a vector of `len` items.
    pub fn listed<T>(&mut self, len: u64, items: impl Iterator<Item = T>) -> Result<Vec<T>, OutOfMemory> {
        let mut list = if self.grants(len * size_of::<T>() as u64) { reserved(len)? } else { return Ok(Vec::new()) };
        list.extend(items);
        Ok(list)
    }

    /// Allocates zeros. Unless they are prefaulted, the system provides the memory on the first write.
    pub fn zeroed<T: Zeroable>(&mut self, len: u64) -> Result<Vec<T>, OutOfMemory> {
        if !self.grants(len * size_of::<T>() as u64) {
            return Ok(Vec::new());
        }
        let mut items = zeroed(len)?;
        if self.prefaults() {
            touch(&mut items);
        }
        Ok(items)
    }
}

/// Allocates an empty vector for `len` items.
pub(crate) fn reserved<T>(len: u64) -> Result<Vec<T>, OutOfMemory> {
    let mut items = Vec::new();
    let room = usize::try_from(len).map_err(|_| refused::<T>(len))?;
    items.try_reserve_exact(room).map_err(|_| refused::<T>(len))?;
    Ok(items)
}

/// Allocates zeros. The system provides the memory on the first write.
pub(crate) fn zeroed<T: Zeroable>(len: u64) -> Result<Vec<T>, OutOfMemory> {
    let len_here = usize::try_from(len).map_err(|_| refused::<T>(len))?;
    bytemuck::try_zeroed_vec(len_here).map_err(|()| refused::<T>(len))
}

/// Allocates a map for `count` items.
pub(crate) fn slot_map<K: Key, T>(count: u32, memory: &mut Memory) -> Result<SlotMap<K, T>, OutOfMemory> {
    let mut map = SlotMap::with_key();
    if memory.grants(u64::from(count) * slot_size::<T>() as u64) {
        map.try_reserve(count as usize).map_err(|_| refused::<T>(count.into()))?;
    }
    Ok(map)
}

/// Allocates a column for a [`slot_map`] of `count` items.
pub(crate) fn secondary_map<K: Key, T>(count: u32, memory: &mut Memory) -> Result<SecondaryMap<K, T>, OutOfMemory> {
    let mut map = SecondaryMap::new();
    if memory.grants(u64::from(count) * slot_size::<T>() as u64) {
        map.try_set_capacity(count as usize).map_err(|_| refused::<T>(count.into()))?;
    }
    Ok(map)
}

/// Returns the bytes of a slot: a value and its version of 4 bytes, rounded up to the value's alignment.
pub(crate) const fn slot_size<T>() -> usize {
    (size_of::<T>() + 4).next_multiple_of(align_of::<T>())
}

/// Allocates `bytes` bytes in one piece and frees them.
pub(crate) fn check(bytes: u64) -> Result<(), OutOfMemory> {
    reserved::<u8>(bytes).map(|piece| drop(black_box(piece)))
}

/// Bytes of the smallest page of an operating system.
const SYSTEM_PAGE: usize = 4096;

/// Writes to every system page of a vector of zeros, so that memory backs it.
fn touch<T: Zeroable>(items: &mut [T]) {
    advise_huge_pages(items.as_ptr().addr(), size_of_val(items));
    let step = (SYSTEM_PAGE / size_of::<T>()).max(1);
    for item in items.iter_mut().step_by(step) {
        *black_box(item) = T::zeroed();
    }
}

/// Advises the system to back a range of addresses with huge pages. Has no effect on systems without them.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
pub fn advise_huge_pages(address: usize, bytes: usize) {
    let start = address.next_multiple_of(SYSTEM_PAGE);
    let Some(bytes) = (address + bytes).checked_sub(start) else { return };
    let (start, bytes) = (std::ptr::without_provenance_mut(start), bytes / SYSTEM_PAGE * SYSTEM_PAGE);
    // SAFETY: MADV_HUGEPAGE neither reads nor changes memory. For an unmapped range it returns an error, which is
    // ignored.
    let _ = unsafe { libc::madvise(start, bytes, libc::MADV_HUGEPAGE) };
}

/// Does nothing: the system has no such hint.
#[cfg(not(target_os = "linux"))]
pub fn advise_huge_pages(_: usize, _: usize) {}

/// Bytes that a processor fetches at a time.
const LINE: usize = 64;

/// Prefetches the cache line of an address. A hint: no later access waits for it.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
fn prefetch_line<const HINT: i32>(address: usize) {
    // SAFETY: a prefetch neither reads nor changes memory that a program can observe, and ignores unmapped addresses.
    unsafe { std::arch::x86_64::_mm_prefetch::<HINT>(std::ptr::without_provenance(address)) };
}

/// Does nothing: the processor has no such hint.
#[cfg(not(target_arch = "x86_64"))]
fn prefetch_line<const HINT: i32>(_: usize) {}

/// x86's codes of the hints: into all caches, and into all but the first.
const NEAR: i32 = 3;
const FAR: i32 = 2;

/// Prefetches all cache lines of a range of addresses.
pub(crate) fn prefetch(address: usize, bytes: usize) {
    (address / LINE * LINE..address + bytes).step_by(LINE).for_each(prefetch_line::<NEAR>);
}

/// Prefetches the cache line where an item begins.
pub(crate) fn prefetch_item<T>(item: &T) {
    prefetch_line::<NEAR>(std::ptr::from_ref(item).addr());
}

pub(crate) fn prefetch_items<T>(items: &[T]) {
    prefetch(items.as_ptr().addr(), size_of_val(items));
}

/// Prefetches all lines of some items into all caches but the first, which allows more prefetches in flight. The items
/// start at a line.
pub(crate) fn prefetch_far<T>(items: &[T]) {
    let (address, bytes) = (items.as_ptr().addr(), size_of_val(items));
    let mut at = 0;
    while at < bytes {
        prefetch_line::<FAR>(address + at);
        at += LINE;
    }
}
