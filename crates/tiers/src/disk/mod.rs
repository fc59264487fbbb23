//! [`Disk`]: records as files of a folder.
//!
//! ```text
//! DIR/v1/<fingerprint>/<space>/<key 2>/<key 62>[.<group>]   one file for each record
//! DIR/tmp/<pid>-<n>/<k>                                     files that are being written
//! DIR/trash/                                                removed namespaces, until a thread deletes them
//! DIR/lock                                                  locked by the process that collects
//! ```
//!
//! The store writes a file in `tmp` and renames it, without a sync: after a power loss, checks find torn files. Several
//! processes may use one folder. Files have mode 0600 and folders 0700. The store never reads links or files of other
//! users.
//!
//! The time of a file's last modification is that of its last use. A thread removes the oldest files when the folder
//! exceeds its limit, or when less than 5 % of the disk is free.

mod cache;
mod collect;
mod folder;
mod index;
mod temp;

use std::collections::HashSet;
use std::fs::TryLockError;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

pub use cache::{Cache, Listed};
pub use collect::Collected;
use folder::{Folder, Opened};
use index::Index;
use temp::Temp;

use crate::lock::lock;
use crate::name::{Fingerprint, Name, Space};
use crate::record::first_place;
use crate::store::{Buffers, Got, Store, StoreError, record_bytes};
use crate::vectored::{read_record, write_record};

/// Options of a [`Disk`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskOptions {
    /// The folder. It is created if it is absent.
    pub path: PathBuf,
    /// Maximum number of bytes of records.
    pub limit: u64,
    /// Percentage of the disk that stays free. Default 5.
    pub free_percent: u32,
    /// Whether other users may have the right to write the folder. Default false.
    pub is_shared: bool,
    /// Time between two scans of the folder by the process that collects. Default 60 s.
    pub rescan: Duration,
}

impl DiskOptions {
    /// Creates options with defaults.
    pub fn new(path: impl Into<PathBuf>, limit: u64) -> Self {
        Self { path: path.into(), limit, free_percent: 5, is_shared: false, rescan: Duration::from_secs(60) }
    }
}

/// A store of records as files of a folder.
#[derive(Debug)]
pub struct Disk {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The state that calls and the collecting thread share.
#[derive(Debug)]
struct Shared {
    folder: Folder,
    options: DiskOptions,
    index: Index,
    temp: Mutex<Arc<Temp>>,
    /// Bytes of records: those of the last scan and of later puts.
    used: AtomicU64,
    /// The latest time that was given to a file, so that times do not fall when the clock is set back.
    latest: AtomicI64,
    /// Whether the first scan has ended.
    is_scanned: AtomicBool,
    /// Whether the thread shall end.
    is_ending: AtomicBool,
    /// Whether the thread shall collect now.
    is_due: Mutex<bool>,
    due: Condvar,
}

impl Disk {
    /// Opens a folder, and starts a thread that scans and collects.
    ///
    /// # Errors
    /// If the folder cannot be created or opened, or if another user owns it. If others can write it and
    /// [`DiskOptions::is_shared`] is not set.
    pub fn open(options: DiskOptions) -> io::Result<Self> {
        let folder = Folder::open(&options.path, options.is_shared)?;
        let temp = Mutex::new(Arc::new(Temp::new(&folder)?));
        let shared = Arc::new(Shared {
            folder,
            options,
            index: Index::default(),
            temp,
            used: AtomicU64::new(0),
            latest: AtomicI64::new(0),
            is_scanned: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            is_due: Mutex::new(false),
            due: Condvar::new(),
        });
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("kvarena-disk".to_owned()).spawn(move || own.maintain())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Returns whether the first scan of the folder has ended. Earlier, each name is looked up on the disk.
    pub fn is_scanned(&self) -> bool {
        self.shared.is_scanned.load(Ordering::Acquire)
    }

    /// Returns whether the folder's file system keeps its files in memory, as a tmpfs does. False on other systems than
    /// Linux.
    pub fn is_in_memory(&self) -> bool {
        self.shared.folder.is_in_memory()
    }

    /// Returns the bytes of records: those of the last scan and of this process's later puts.
    pub fn used(&self) -> u64 {
        self.shared.used.load(Ordering::Relaxed)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has ended its work, and nothing else.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn wake(&self) {
        *lock(&self.is_due) = true;
        self.due.notify_one();
    }

    /// Scans and collects until the disk is dropped. Failures end a round; the next one tries again.
    fn maintain(&self) {
        let _ = Temp::remove_dead(&self.folder);
        while !self.is_ending.load(Ordering::Acquire) {
            let _ = self.folder.empty_trash();
            let _ = self.round();
            let waited = self.due.wait_timeout_while(lock(&self.is_due), self.options.rescan, |due| !*due);
            *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
        }
    }

    /// One scan and collection, if no other process collects. The first round always scans.
    fn round(&self) -> io::Result<()> {
        let lock = self.folder.lock_file("lock")?;
        let is_ours = match lock.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => false,
            Err(TryLockError::Error(error)) => return Err(error),
        };
        if !is_ours && self.is_scanned.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut collected = Collected::default();
        self.index.begin_scan();
        let before = self.used.load(Ordering::Relaxed);
        let is_complete = collect::scan(&self.folder, |entry| {
            self.index.insert(&entry.name);
            self.latest.fetch_max(entry.age.0, Ordering::Relaxed);
            collected.files += 1;
            collected.bytes += entry.bytes;
            !self.is_ending.load(Ordering::Relaxed)
        })?;
        if !is_complete {
            return Ok(());
        }
        self.index.end_scan();
        // Puts during the scan may count twice, until the next one.
        let puts = self.used.load(Ordering::Relaxed) - before;
        self.used.store(collected.bytes + puts, Ordering::Relaxed);
        self.is_scanned.store(true, Ordering::Release);
        if is_ours {
            let wanted = collect::excess(&self.folder, collected.bytes, self.options.limit, self.options.free_percent)?;
            if wanted > 0 {
                collect::remove_oldest(&self.folder, wanted, &mut collected, |name| self.index.remove(name))?;
                self.used.store(collected.bytes + puts - collected.removed_bytes, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Returns the present time, or the latest time that was given to a file.
    fn now(&self) -> i64 {
        let now = collect::now();
        self.latest.fetch_max(now, Ordering::Relaxed).max(now)
    }

    fn temp(&self) -> Arc<Temp> {
        Arc::clone(&lock(&self.temp))
    }

    fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> io::Result<()> {
        let temp = self.temp();
        let (file, file_name) = temp.create()?;
        let written = write_record(&file, 0, head, pages)
            .and_then(|()| collect::touch(&file, self.now(), first_place(head)))
            .and_then(|()| self.folder.move_in(temp.as_fd(), &file_name, name));
        if written.is_err() {
            temp.remove(&file_name);
        }
        written
    }
}

impl Store for Disk {
    fn have(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        let mut have = self.shared.index.has(names);
        // After the first absent page of a prompt, no record is of use.
        let mut absent = HashSet::new();
        for (name, has) in names.iter().zip(&mut have) {
            if if name.group == 0 { !absent.is_empty() } else { absent.contains(&name.key) } {
                *has = false;
            } else if !*has {
                *has = self.shared.folder.has(name)?;
                if *has {
                    self.shared.index.insert(name);
                }
            }
            if name.group == 0 && !*has {
                absent.insert(name.key);
            }
        }
        Ok(have)
    }

    fn have_now(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        let look = |name: &Name| {
            let has = self.shared.folder.has(name)?;
            if has {
                self.shared.index.insert(name);
            } else {
                self.shared.index.remove(name);
            }
            Ok(has)
        };
        names.iter().map(look).collect()
    }

    fn get(&self, name: &Name, into: &mut Buffers) -> Result<Got, StoreError> {
        let (file, bytes) = match self.shared.folder.open_record(name)? {
            Opened::Record(file, bytes) => (file, bytes),
            Opened::Absent => {
                self.shared.index.remove(name);
                return Ok(Got::Absent);
            }
            Opened::Foreign => return Ok(Got::Foreign),
        };
        if bytes != into.record_bytes() || !read_record(&file, 0, into)? {
            return Ok(Got::Length);
        }
        // A folder that cannot be written keeps the times.
        let _ = collect::touch(&file, self.shared.now(), first_place(into.head));
        Ok(Got::Read)
    }

    fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> Result<(), StoreError> {
        let shared = &self.shared;
        let (free, all) = shared.folder.space()?;
        if free < all / 100 * u64::from(shared.options.free_percent) {
            shared.wake();
            return Err(StoreError::Full);
        }
        let mut put = shared.put(name, head, pages);
        if put.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
            // The folder of temporary files has vanished.
            *lock(&shared.temp) = Arc::new(Temp::new(&shared.folder)?);
            put = shared.put(name, head, pages);
        }
        if put.as_ref().is_err_and(|error| error.kind() == ErrorKind::StorageFull) {
            shared.wake();
        }
        put?;
        shared.index.insert(name);
        let bytes = record_bytes(head.len(), pages.len(), pages.first().map_or(0, |page| page.len()));
        if shared.used.fetch_add(bytes, Ordering::Relaxed) + bytes > shared.options.limit {
            shared.wake();
        }
        Ok(())
    }

    fn remove(&self, names: &[Name]) -> Result<(), StoreError> {
        for name in names {
            self.shared.index.remove(name);
            self.shared.folder.remove(name)?;
        }
        Ok(())
    }

    fn remove_space(&self, fingerprint: &Fingerprint, space: Space) -> Result<(), StoreError> {
        self.shared.folder.trash(&format!("v1/{fingerprint}/{space}"))?;
        self.shared.index.clear();
        self.shared.wake();
        Ok(())
    }
}
