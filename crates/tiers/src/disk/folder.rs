//! A cache folder: its handle, and the files below it. No call follows a link below the folder.

use std::fs::{DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use crate::name::Name;

/// Mode of files: only the owner reads and writes them.
const FILE: Mode = Mode::RUSR.union(Mode::WUSR);
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY);

/// A cache folder.
#[derive(Debug)]
pub(super) struct Folder {
    pub root: OwnedFd,
    /// Number of folders that were moved to the trash.
    trashed: AtomicU64,
}

/// An opened record.
pub(super) enum Opened {
    Record(OwnedFd, u64),
    Absent,
    /// A link or no file, or a file of another user.
    Foreign,
}

impl Folder {
    /// Opens a cache folder, and creates it if it is absent.
    ///
    /// # Errors
    /// With `PermissionDenied` if another user owns the folder, or if others can write it and `is_shared` is not set.
    pub fn open(path: &Path, is_shared: bool) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        let root = rustix::fs::open(path, FOLDER | OFlags::CLOEXEC, Mode::empty())?;
        let stat = rustix::fs::fstat(&root)?;
        let denied = |text: &str| io::Error::new(ErrorKind::PermissionDenied, format!("{}: {text}", path.display()));
        if !is_own(&stat) {
            return Err(denied("another user owns the folder"));
        }
        if stat.st_mode & 0o022 != 0 && !is_shared {
            return Err(denied("other users can write the folder"));
        }
        Ok(Self { root, trashed: AtomicU64::new(0) })
    }

    /// Opens a record to read it.
    pub fn open_record(&self, name: &Name) -> io::Result<Opened> {
        let fd = match open_below(self.root.as_fd(), &name.to_string(), OFlags::RDONLY | OFlags::NONBLOCK) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(Opened::Absent),
            Err(Errno::LOOP | Errno::NOTDIR | Errno::XDEV | Errno::NXIO) => return Ok(Opened::Foreign),
            Err(error) => return Err(error.into()),
        };
        let stat = rustix::fs::fstat(&fd)?;
        if !is_own(&stat) || FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(Opened::Foreign);
        }
        Ok(Opened::Record(fd, stat.st_size as u64))
    }

    /// Returns whether there is a file of this name.
    pub fn has(&self, name: &Name) -> io::Result<bool> {
        match rustix::fs::statat(&self.root, name.to_string(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Moves a file below another folder to the name of a record.
    pub fn move_in(&self, from: BorrowedFd, file: &str, name: &Name) -> io::Result<()> {
        let folder = name.folder();
        let parent = match open_below(self.root.as_fd(), &folder, FOLDER) {
            Err(Errno::NOENT) => self.make(&folder)?,
            parent => parent?,
        };
        Ok(rustix::fs::renameat(from, file, parent, name.file())?)
    }

    /// Creates and opens a folder below the root.
    pub fn make(&self, path: &str) -> io::Result<OwnedFd> {
        let mut at = 0;
        while at < path.len() {
            at += path[at..].find('/').unwrap_or(path.len() - at);
            match rustix::fs::mkdirat(&self.root, &path[..at], Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => at += 1,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(open_below(self.root.as_fd(), path, FOLDER)?)
    }

    /// Removes a record. Returns its number of bytes; 0 if it is absent.
    pub fn remove(&self, name: &Name) -> io::Result<u64> {
        let parent = match open_below(self.root.as_fd(), &name.folder(), FOLDER) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(0),
            parent => parent?,
        };
        let bytes = rustix::fs::statat(&parent, name.file(), AtFlags::SYMLINK_NOFOLLOW).map_or(0, |stat| stat.st_size);
        match rustix::fs::unlinkat(&parent, name.file(), AtFlags::empty()) {
            Ok(()) => Ok(bytes as u64),
            Err(Errno::NOENT) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens a file that contains nothing but a lock, and creates it if it is absent.
    pub fn lock_file(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.root, name, flags, FILE)?.into())
    }

    /// Moves a folder to the trash: its files are unreachable at once. Absent folders are no error.
    pub fn trash(&self, path: &str) -> io::Result<()> {
        let trash = self.make("trash")?;
        loop {
            let number = self.trashed.fetch_add(1, Ordering::Relaxed);
            let to = format!("{}-{number}", std::process::id());
            match rustix::fs::renameat_with(&self.root, path, &trash, to, RenameFlags::NOREPLACE) {
                Ok(()) | Err(Errno::NOENT) => return Ok(()),
                Err(Errno::EXIST | Errno::NOTEMPTY) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Removes everything from the trash.
    pub fn empty_trash(&self) -> io::Result<()> {
        remove_files(&self.make("trash")?)
    }

    /// Returns the free bytes and all bytes of the file system.
    pub fn space(&self) -> io::Result<(u64, u64)> {
        let stat = rustix::fs::fstatvfs(&self.root)?;
        Ok((stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize))
    }

    /// Returns whether the file system keeps its files in memory (statfs(2): `TMPFS_MAGIC`, `RAMFS_MAGIC`). False on
    /// other systems than Linux.
    pub fn is_in_memory(&self) -> bool {
        #[cfg(target_os = "linux")]
        return rustix::fs::fstatfs(&self.root).is_ok_and(|stat| [0x0102_1994, 0x8584_58f6].contains(&stat.f_type));
        #[cfg(not(target_os = "linux"))]
        false
    }
}

/// Returns whether this process's user owns a file.
fn is_own(stat: &Stat) -> bool {
    stat.st_uid == rustix::process::geteuid().as_raw()
}

/// Opens a path below a folder. A link at any place of the path is an error.
fn open_below(root: BorrowedFd, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::CLOEXEC;
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::ResolveFlags;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let opened = rustix::fs::openat2(root, path, flags, Mode::empty(), resolve);
        // Old kernels, and filters of system calls.
        if !matches!(opened, Err(Errno::NOSYS | Errno::PERM)) {
            return opened;
        }
    }
    walk_below(root, path, flags)
}

/// The same, with a call for each part of the path.
fn walk_below(root: BorrowedFd, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let mut folder = None;
    let (parents, last) = path.rsplit_once('/').unwrap_or(("", path));
    for part in parents.split('/').filter(|part| !part.is_empty()) {
        let at = folder.as_ref().map_or(root, OwnedFd::as_fd);
        folder = Some(rustix::fs::openat(at, part, FOLDER | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?);
    }
    let at = folder.as_ref().map_or(root, OwnedFd::as_fd);
    rustix::fs::openat(at, last, flags | OFlags::NOFOLLOW, Mode::empty())
}

/// Opens a folder in another folder. A link is an error.
pub(super) fn open_folder(at: BorrowedFd, name: &str) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(at, name, FOLDER | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
}

/// Calls `visit` with the name of each entry of a folder, and whether it is a folder, until `visit` returns false. A
/// folder that another process removes meanwhile has no further entries.
pub(super) fn entries(folder: BorrowedFd, mut visit: impl FnMut(&str, bool) -> io::Result<bool>) -> io::Result<bool> {
    let read = match Dir::read_from(folder) {
        Err(Errno::NOENT) => return Ok(true),
        read => read?,
    };
    for entry in read {
        let entry = match entry {
            Err(Errno::NOENT) => return Ok(true),
            entry => entry?,
        };
        let Ok(name) = entry.file_name().to_str() else { continue };
        if name != "." && name != ".." && !visit(name, entry.file_type() == FileType::Directory)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Removes everything in a folder. Other processes may do the same, or add files, which then stay.
pub(super) fn remove_files(folder: &OwnedFd) -> io::Result<()> {
    entries(folder.as_fd(), |name, is_folder| {
        if is_folder {
            match open_folder(folder.as_fd(), name) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
                inner => remove_files(&inner?)?,
            }
        }
        let flags = if is_folder { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        match rustix::fs::unlinkat(folder, name, flags) {
            Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY) => Ok(true),
            Err(error) => Err(error.into()),
        }
    })?;
    Ok(())
}

/// Creates a file that only its owner reads and writes.
pub(super) fn create(folder: BorrowedFd, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(folder, name, flags, FILE)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn both_ways_below_a_folder_refuse_links() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path();
        std::fs::create_dir_all(path.join("a/b")).expect("a folder");
        std::fs::write(path.join("a/b/file"), "x").expect("a file");
        symlink("b", path.join("a/link")).expect("a link");
        symlink("file", path.join("a/b/link")).expect("a link");
        let folder = Folder::open(path, true).expect("it is ours");
        for open in [open_below, walk_below] {
            let opens = |path| open(folder.root.as_fd(), path, OFlags::RDONLY).is_ok();
            assert_eq!(["a/b/file", "a/link/file", "a/b/link", "a/b/no"].map(opens), [true, false, false, false]);
        }
    }
}
