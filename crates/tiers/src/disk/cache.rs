//! [`Cache`]: a cache folder for tools. It starts no thread.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

use super::collect::{Collected, excess, remove_oldest, scan};
use super::folder::{Folder, Opened};
use crate::check::Secret;
use crate::miss::Miss;
use crate::name::Name;
use crate::record::{HEADER, Header, check_page};
use crate::store::Buffers;
use crate::vectored::read_record;

/// A file of a cache folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Listed {
    /// The record's name.
    pub name: Name,
    /// Bytes of the file.
    pub bytes: u64,
    /// Time of the last use, in seconds since 1970.
    pub used: i64,
}

/// A cache folder.
#[derive(Debug)]
pub struct Cache(Folder);

impl Cache {
    /// Opens an existing cache folder.
    ///
    /// # Errors
    /// With `NotFound` if the folder is absent; if another user owns it.
    pub fn open(path: &Path) -> io::Result<Self> {
        std::fs::metadata(path)?;
        Folder::open(path, true).map(Self)
    }

    /// Calls `visit` with each file.
    ///
    /// # Errors
    /// If a folder cannot be read.
    pub fn list(&self, mut visit: impl FnMut(Listed)) -> io::Result<()> {
        let each = |entry: super::collect::Entry| {
            visit(Listed { name: entry.name, bytes: entry.bytes, used: entry.age.0 });
            true
        };
        scan(&self.0, each).map(drop)
    }

    /// Checks all bytes of a record, and that it belongs to its name.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn check(&self, name: &Name, secret: Option<&Secret>) -> io::Result<Result<(), Miss>> {
        let (file, bytes) = match self.0.open_record(name)? {
            Opened::Record(file, bytes) => (file, bytes),
            Opened::Absent => return Ok(Err(Miss::Absent)),
            Opened::Foreign => return Ok(Err(Miss::Foreign)),
        };
        let read = |first: u32, of: u32, head: &mut [u8], pages: &mut [&mut [u8]]| {
            read_record(&file, 0, &mut Buffers { first, of, head, pages, seen: &mut |_| () })
        };
        let mut head = vec![0; HEADER];
        if !read(0, 0, &mut head, &mut [])? {
            return Ok(Err(Miss::Length));
        }
        let header = match Header::read(&head) {
            Ok(header) if header.bytes() == Some(bytes) => header,
            Ok(_) => return Ok(Err(Miss::Length)),
            Err(miss) => return Ok(Err(miss)),
        };
        head.resize(header.head_bytes().expect("it is smaller than the file"), 0);
        let (of, mut page) = (header.pages, vec![0; header.page_bytes as usize]);
        for first in 0..of {
            if !read(first, of, &mut head, &mut [&mut page])? {
                return Ok(Err(Miss::Length));
            }
            let checked = if first == 0 { header.check(&head, secret) } else { Ok(()) };
            if let Err(miss) = checked.and_then(|()| check_page(&head, first as usize, &page, secret)) {
                return Ok(Err(miss));
            }
        }
        let is_named = Name::new(&header.fingerprint, header.space, header.key, header.group) == *name;
        Ok(if is_named { Ok(()) } else { Err(Miss::Key) })
    }

    /// Removes the oldest records until `limit` bytes remain. `None` if another process collects.
    ///
    /// # Errors
    /// If a folder cannot be read or written.
    pub fn collect(&self, limit: u64) -> io::Result<Option<Collected>> {
        let lock: File = self.0.lock_file("lock")?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let mut collected = Collected::default();
        self.list(|file| {
            collected.files += 1;
            collected.bytes += file.bytes;
        })?;
        let wanted = excess(&self.0, collected.bytes, limit, 0)?;
        if wanted > 0 {
            remove_oldest(&self.0, wanted, &mut collected, |_| ())?;
        }
        Ok(Some(collected))
    }

    /// Removes the records of a model, or of one of its namespaces. Both are given as they are in names.
    ///
    /// # Errors
    /// If a folder cannot be written.
    pub fn forget(&self, fingerprint: [u8; 8], space: Option<[u8; 8]>) -> io::Result<()> {
        let hex = |bytes: [u8; 8]| format!("{:016x}", u64::from_be_bytes(bytes));
        let space = space.map_or(String::new(), |space| format!("/{}", hex(space)));
        self.0.trash(&format!("v1/{}{space}", hex(fingerprint)))?;
        self.0.empty_trash()
    }
}
