//! [`Store`]: a place that keeps records by name.

use std::sync::Arc;
use std::{fmt, io};

use crate::name::{Fingerprint, Name, Space};
use crate::record::BLOCK;

/// The part of a record's pages that a caller reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// Index of the first page to read.
    pub first: u32,
    /// Number of pages of the whole record.
    pub of: u32,
}

impl Part {
    /// Returns the offset of the first page, for a record with this head and pages of `page_bytes` bytes.
    pub fn start(self, head_bytes: usize, page_bytes: usize) -> u64 {
        head_bytes as u64 + u64::from(self.first) * stride(page_bytes) as u64
    }

    /// Returns the number of bytes of the whole record.
    pub fn record_bytes(self, head_bytes: usize, page_bytes: usize) -> u64 {
        head_bytes as u64 + u64::from(self.of) * stride(page_bytes) as u64
    }
}

/// Returns the bytes from one page of a record to the next.
pub fn stride(page_bytes: usize) -> usize {
    page_bytes.next_multiple_of(BLOCK)
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

    /// Reads the head and some pages of a record: `pages` are consecutive and begin with page [`Part::first`]. The
    /// contents of the buffers are unspecified unless the result is [`Got::Read`].
    ///
    /// # Errors
    /// If the store fails.
    fn get(&self, name: &Name, part: Part, head: &mut [u8], pages: &mut [&mut [u8]]) -> Result<Got, StoreError>;

    /// Reads as [`Store::get`] does. Before it returns [`Got::Read`], it calls `seen` with all bytes of `pages` in
    /// order, each piece within one page. A store that reads pieces calls it while they are in the processor's cache,
    /// where checks cost less.
    ///
    /// # Errors
    /// As [`Store::get`].
    fn get_seen(
        &self,
        name: &Name,
        part: Part,
        head: &mut [u8],
        pages: &mut [&mut [u8]],
        seen: &mut dyn FnMut(&[u8]),
    ) -> Result<Got, StoreError> {
        let got = self.get(name, part, head, pages)?;
        if got == Got::Read {
            pages.iter().for_each(|page| seen(page));
        }
        Ok(got)
    }

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

impl<S: Store + ?Sized> Store for Arc<S> {
    fn have(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        (**self).have(names)
    }

    fn asks_one_by_one(&self) -> bool {
        (**self).asks_one_by_one()
    }

    fn have_now(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        (**self).have_now(names)
    }

    fn get(&self, name: &Name, part: Part, head: &mut [u8], pages: &mut [&mut [u8]]) -> Result<Got, StoreError> {
        (**self).get(name, part, head, pages)
    }

    fn get_seen(
        &self,
        name: &Name,
        part: Part,
        head: &mut [u8],
        pages: &mut [&mut [u8]],
        seen: &mut dyn FnMut(&[u8]),
    ) -> Result<Got, StoreError> {
        (**self).get_seen(name, part, head, pages, seen)
    }

    fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> Result<(), StoreError> {
        (**self).put(name, head, pages)
    }

    fn remove(&self, names: &[Name]) -> Result<(), StoreError> {
        (**self).remove(names)
    }

    fn remove_space(&self, fingerprint: &Fingerprint, space: Space) -> Result<(), StoreError> {
        (**self).remove_space(fingerprint, space)
    }
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
