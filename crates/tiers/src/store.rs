//! [`Store`]: a place that keeps records by name.

use std::ops::Range;
use std::{fmt, io};

use crate::name::{Fingerprint, Name, Space};
use crate::record::BLOCK;

/// Returns the bytes from one page of a record to the next.
pub fn stride(page_bytes: usize) -> usize {
    page_bytes.next_multiple_of(BLOCK)
}

/// Where to read the head and some consecutive pages of a record.
pub struct Buffers<'a, 'p> {
    /// Index of the first page to read.
    pub first: u32,
    /// Number of pages of the whole record.
    pub of: u32,
    /// The head.
    pub head: &'a mut [u8],
    /// The pages, of equal length.
    pub pages: &'a mut [&'p mut [u8]],
    /// Called with all bytes of the pages in order, each piece within one page: see [`Store::get`].
    pub seen: &'a mut dyn FnMut(&[u8]),
}

impl Buffers<'_, '_> {
    /// Returns the number of bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.pages.first().map_or(0, |page| page.len())
    }

    /// Returns the number of bytes of the whole record.
    pub fn record_bytes(&self) -> u64 {
        record_bytes(self.head.len(), self.of as usize, self.page_bytes())
    }

    /// Returns the bytes of the pages in the record, with their padding.
    pub fn range(&self) -> Range<u64> {
        let [start, end] = [0, self.pages.len()].map(|at| self.first as usize + at);
        record_bytes(self.head.len(), start, self.page_bytes())..record_bytes(self.head.len(), end, self.page_bytes())
    }

    /// Calls `seen` with each page, for stores that do not read pieces.
    pub fn see_all(&mut self) {
        self.pages.iter().for_each(|page| (self.seen)(page));
    }
}

/// Returns the number of bytes of a record with this head and number of pages.
pub fn record_bytes(head_bytes: usize, pages: usize, page_bytes: usize) -> u64 {
    head_bytes as u64 + pages as u64 * stride(page_bytes) as u64
}

/// The result of a read without an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Got {
    /// The buffers contain the stored bytes. The reader checks them.
    Read,
    /// The store does not have the record.
    Absent,
    /// The stored record has another length than the caller expects.
    Length,
    /// The record is a link or a folder, or another user owns it.
    Foreign,
}

/// A place that keeps records by name. All calls block; several threads make them at the same time.
///
/// A record is `head`, then each page followed by zeros to a multiple of [`BLOCK`] bytes. All pages of a record have
/// the same length. A store does not check records: readers do. It may lose any record at any time. A reader sees a
/// record as one writer has put it, or not at all, as far as the store can promise it.
pub trait Store: Send + Sync + 'static {
    /// Returns, for each name, whether the store has the record. Makes one round trip, or few.
    ///
    /// Names of group 0 come first, in the order of a prompt. A store that makes a request for each name may derive
    /// some: a name of group 0 is absent if an earlier one is, and stored if a later one is. A cell is absent if the
    /// page of group 0 with its key is.
    ///
    /// # Errors
    /// If the store cannot be asked.
    fn have(&self, names: &[Name]) -> Result<Vec<bool>, StoreError>;

    /// Returns whether `have` makes a request for each name. A tier asks such a store for the cells of the longest
    /// prefix, then for those of shorter ones, until a prefix has all of its cells. Default false.
    fn asks_one_by_one(&self) -> bool {
        false
    }

    /// Returns the same as [`Store::have`] from the store itself, and not from what this process remembers of it. By
    /// default [`Store::have`].
    ///
    /// # Errors
    /// If the store cannot be asked.
    fn have_now(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        self.have(names)
    }

    /// Reads the head and some pages of a record. The contents of the buffers are unspecified unless the result is
    /// [`Got::Read`]. Before it returns this, it calls [`Buffers::seen`] with all bytes of the pages in order, and with
    /// none of them twice: a store that repeats a read within the call passes only the bytes that follow. A store that
    /// reads pieces calls it while they are in the processor's cache, where checks cost less.
    ///
    /// # Errors
    /// If the store fails.
    fn get(&self, name: &Name, into: &mut Buffers) -> Result<Got, StoreError>;

    /// Puts a record, instead of an earlier one of the same name.
    ///
    /// # Errors
    /// If the store is full, cannot be written, or fails. An earlier record of the name is unchanged, or absent.
    fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> Result<(), StoreError>;

    /// Removes records. Absent ones are no error.
    ///
    /// # Errors
    /// If the store fails: any of the records may remain.
    fn remove(&self, names: &[Name]) -> Result<(), StoreError>;

    /// Removes all records of a namespace of a model.
    ///
    /// # Errors
    /// If the store fails: any of the records may remain.
    fn remove_space(&self, fingerprint: &Fingerprint, space: Space) -> Result<(), StoreError>;
}

/// The error of a store.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum StoreError {
    /// The store has no room for the record.
    Full,
    /// The store cannot be written.
    ReadOnly,
    /// The record is larger than the store accepts.
    TooLarge {
        /// Bytes of the record.
        bytes: u64,
        /// Maximum number of bytes.
        max: u64,
    },
    /// The store cannot be reached, or has vanished.
    Gone {
        /// The cause.
        text: String,
    },
    /// The store failed in another way.
    Failed {
        /// The cause.
        text: String,
    },
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("the store is full"),
            Self::ReadOnly => f.write_str("the store cannot be written"),
            Self::TooLarge { bytes, max } => {
                write!(f, "a record of {bytes} bytes, but the store accepts at most {max}")
            }
            Self::Gone { text } => write!(f, "the store cannot be reached: {text}"),
            Self::Failed { text } => write!(f, "the store failed: {text}"),
        }
    }
}

impl std::error::Error for StoreError {}

impl From<io::Error> for StoreError {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind::*;
        match error.kind() {
            StorageFull | QuotaExceeded => Self::Full,
            ReadOnlyFilesystem | PermissionDenied => Self::ReadOnly,
            NotFound
            | ConnectionRefused
            | ConnectionReset
            | ConnectionAborted
            | NotConnected
            | BrokenPipe
            | TimedOut
            | WouldBlock
            | UnexpectedEof
            | StaleNetworkFileHandle => Self::Gone { text: error.to_string() },
            _ => Self::Failed { text: error.to_string() },
        }
    }
}
