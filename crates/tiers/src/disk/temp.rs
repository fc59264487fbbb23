//! Temporary files of one process: `tmp/<pid>-<n>/`, a folder that the process keeps locked.

use std::fs::{File, TryLockError};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, Mode};
use rustix::io::Errno;

use super::folder::{Folder, create, entries, open_folder, remove_files};

/// The folder of a process's temporary files. The lock ends with the process, so that others see that it has died.
#[derive(Debug)]
pub(super) struct Temp {
    folder: File,
    files: AtomicU64,
}

impl Temp {
    /// Creates and locks a folder.
    pub fn new(folder: &Folder) -> io::Result<Self> {
        let tmp = folder.make("tmp")?;
        let mut names = (0..).map(|n| format!("{}-{n}", std::process::id()));
        loop {
            let name = names.next().expect("numbers do not end");
            match rustix::fs::mkdirat(&tmp, &name, Mode::RWXU) {
                Ok(()) => {}
                Err(Errno::EXIST) => continue,
                Err(error) => return Err(error.into()),
            }
            if let Some(folder) = lock(tmp.as_fd(), &name)? {
                return Ok(Self { folder, files: AtomicU64::new(0) });
            }
        }
    }

    /// Creates a file. Returns its name in the folder as well.
    pub fn create(&self) -> io::Result<(OwnedFd, String)> {
        let name = self.files.fetch_add(1, Ordering::Relaxed).to_string();
        Ok((create(self.as_fd(), &name)?, name))
    }

    pub fn remove(&self, name: &str) {
        // What remains is removed with the folder.
        let _ = rustix::fs::unlinkat(&self.folder, name, AtFlags::empty());
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }

    /// Removes the folders of processes that have died.
    pub fn remove_dead(folder: &Folder) -> io::Result<()> {
        let tmp = folder.make("tmp")?;
        entries(tmp.as_fd(), |name, is_folder| {
            if is_folder && let Some(dead) = lock(tmp.as_fd(), name)? {
                remove_files(&dead.into())?;
                match rustix::fs::unlinkat(&tmp, name, AtFlags::REMOVEDIR) {
                    Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(true)
        })?;
        Ok(())
    }
}

/// Locks a folder. Returns `None` if a process has locked it, or has removed it meanwhile.
fn lock(tmp: BorrowedFd, name: &str) -> io::Result<Option<File>> {
    let file = match open_folder(tmp, name) {
        Ok(folder) => File::from(folder),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let number = rustix::fs::fstat(&file)?.st_ino;
    let is_there = rustix::fs::statat(tmp, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| stat.st_ino == number);
    Ok(is_there.then_some(file))
}
