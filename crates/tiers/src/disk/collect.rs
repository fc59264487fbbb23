//! The files of a cache folder by age, and the removal of the oldest ones.

use std::collections::BinaryHeap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, FileType, Timespec, Timestamps, UTIME_OMIT};

use super::folder::{Folder, entries, open_folder};
use crate::name::Name;

const NANOSECONDS: i64 = 1_000_000_000;
/// A collection removes the excess and this part of the limit, so that the next one is not due at once.
const SLACK: u64 = 32;
/// Files from further in the future than this number of seconds get the present time.
const CLOCK_SKEW: i64 = 60;

/// The time of a file's last use: seconds, and nanoseconds that fall with the place.
pub(super) type Age = (i64, i64);

/// A file of a cache folder.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Entry {
    pub age: Age,
    pub bytes: u64,
    pub name: Name,
}

/// The result of a collection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Collected {
    /// Number of files before the collection.
    pub files: u64,
    /// Bytes of these files.
    pub bytes: u64,
    /// Number of removed files.
    pub removed_files: u64,
    /// Bytes of the removed files.
    pub removed_bytes: u64,
}

/// Returns the seconds since 1970.
pub(super) fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs() as i64)
}

/// Sets the time of a file's last use. Of files that were used in the same second, the deepest place is the oldest.
pub(super) fn touch(file: &OwnedFd, seconds: i64, place: u32) -> io::Result<()> {
    let last_modification = Timespec { tv_sec: seconds, tv_nsec: NANOSECONDS - 1 - i64::from(place.min(999_999_999)) };
    let last_access = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    Ok(rustix::fs::futimens(file, &Timestamps { last_access, last_modification })?)
}

/// Calls `visit` with each record of a folder, until `visit` returns false. Returns whether it never did.
pub(super) fn scan(folder: &Folder, mut visit: impl FnMut(Entry) -> bool) -> io::Result<bool> {
    let root = folder.make("v1")?;
    descend(root.as_fd(), "v1", 3, &mut visit)
}

/// Visits the records below a folder, through `levels` levels of folders.
fn descend(at: BorrowedFd, path: &str, levels: u32, visit: &mut dyn FnMut(Entry) -> bool) -> io::Result<bool> {
    entries(at, |name, is_folder| {
        let path = format!("{path}/{name}");
        if levels == 0 {
            let (Ok(record), false) = (path.parse(), is_folder) else { return Ok(true) };
            return Ok(file(at, name, record)?.is_none_or(&mut *visit));
        }
        if !is_folder {
            return Ok(true);
        }
        match open_folder(at, name) {
            Ok(folder) => descend(folder.as_fd(), &path, levels - 1, visit),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
            Err(error) => Err(error),
        }
    })
}

/// Returns the entry of a record. `None` if it has vanished, or is no file. The time of a file from the future, which
/// a clock has left that was set back, becomes the present.
fn file(folder: BorrowedFd, file: &str, name: Name) -> io::Result<Option<Entry>> {
    let Ok(stat) = rustix::fs::statat(folder, file, AtFlags::SYMLINK_NOFOLLOW) else { return Ok(None) };
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Ok(None);
    }
    let (mut seconds, nanoseconds) = (stat.st_mtime, stat.st_mtime_nsec as i64);
    let present = now();
    if seconds > present + CLOCK_SKEW {
        let last_modification = Timespec { tv_sec: present, tv_nsec: nanoseconds };
        let last_access = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        let times = Timestamps { last_access, last_modification };
        // A file of another user keeps its time.
        let _ = rustix::fs::utimensat(folder, file, &times, AtFlags::SYMLINK_NOFOLLOW);
        seconds = present;
    }
    Ok(Some(Entry { age: (seconds, nanoseconds), bytes: stat.st_size as u64, name }))
}

/// Returns the number of bytes to remove from a folder with `bytes` bytes of records: those above the limit, or those
/// missing to the free space.
pub(super) fn excess(folder: &Folder, bytes: u64, limit: u64, free_percent: u32) -> io::Result<u64> {
    let (free, all) = folder.space()?;
    let missing = (all / 100 * u64::from(free_percent)).saturating_sub(free);
    let above = bytes.saturating_sub(limit).max(missing);
    Ok(if above > 0 { above + limit.min(bytes) / SLACK } else { 0 })
}

/// Removes the oldest records until `wanted` bytes are removed. Adds to `collected`, and calls `removed` with
/// each name.
pub(super) fn remove_oldest(
    folder: &Folder,
    wanted: u64,
    collected: &mut Collected,
    mut removed: impl FnMut(&Name),
) -> io::Result<()> {
    // The oldest files that have the wanted bytes together; the youngest of them is on top.
    let (mut oldest, mut sum) = (BinaryHeap::new(), 0);
    scan(folder, |entry| {
        sum += entry.bytes;
        oldest.push(entry);
        while let Some(top) = oldest.peek()
            && sum - top.bytes >= wanted
        {
            sum -= top.bytes;
            oldest.pop();
        }
        true
    })?;
    for entry in oldest.into_sorted_vec() {
        if collected.removed_bytes >= wanted {
            break;
        }
        let bytes = folder.remove(&entry.name)?;
        removed(&entry.name);
        collected.removed_files += u64::from(bytes > 0);
        collected.removed_bytes += bytes;
    }
    Ok(())
}
