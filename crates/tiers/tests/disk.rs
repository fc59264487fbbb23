//! The disk: damage, other users, limits, several processes, restarts.

mod common;

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::thread::{sleep, yield_now};
use std::time::{Duration, SystemTime};

use kvarena_tiers::disk::{Disk, DiskOptions};
use kvarena_tiers::name::{Fingerprint, Name, Space};
use kvarena_tiers::store::{Got, Store, StoreError};
use kvarena_tiers::testing::contract;
use rustix::time::{ClockId, clock_gettime};
use tempfile::TempDir;

/// Runs the current test as another user would be: see `child`.
const CHILD: &str = "KVARENA_TIERS_CHILD";

fn options(path: &Path, limit: u64) -> DiskOptions {
    DiskOptions { free_percent: 0, ..DiskOptions::new(path, limit) }
}

fn open(path: &Path) -> Disk {
    Disk::open(options(path, 1 << 40)).expect("the folder is ours")
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

fn wait(mut done: impl FnMut() -> bool) {
    while !done() {
        yield_now();
    }
}

fn name(number: u32) -> Name {
    let mut key = [number as u8; 32];
    key[4..8].copy_from_slice(&number.to_le_bytes());
    Name::new(&Fingerprint([1; 32]), Space([2; 16]), key, 0)
}

/// A head with a first place, as a record has it.
fn head(place: u32) -> Vec<u8> {
    let mut head = vec![0; 4096];
    head[20..24].copy_from_slice(&place.to_le_bytes());
    head
}

fn put(disk: &Disk, number: u32, place: u32) -> Result<(), StoreError> {
    disk.put(&name(number), &head(place), &[&[number as u8; 4096]])
}

fn get(disk: &Disk, number: u32) -> Result<Got, StoreError> {
    let (got, _, page) = common::get(disk, &name(number), 4096)?;
    assert!(got != Got::Read || page == [number as u8; 4096]);
    Ok(got)
}

fn has(disk: &Disk, numbers: impl Iterator<Item = u32>) -> Vec<bool> {
    // One name in each question: names after an absent one count as absent.
    numbers.flat_map(|number| disk.have(&[name(number)]).expect("no failure")).collect()
}

fn set_time(folder: &Path, number: u32, time: SystemTime) {
    let file = File::options().write(true).open(path(folder, number)).expect("it is there");
    file.set_modified(time).expect("it is ours");
}

fn path(folder: &Path, number: u32) -> std::path::PathBuf {
    folder.join(name(number).to_string())
}

#[test]
fn it_fulfils_the_contract() {
    let folder = folder();
    contract(&open(folder.path()));
}

#[test]
fn a_restart_finds_all_records_and_removes_what_a_killed_process_left() {
    let folder = folder();
    let disk = open(folder.path());
    (0..20).for_each(|number| put(&disk, number, 0).expect("there is room"));
    drop(disk);
    // The folder of a process that died while it wrote, and that of one that lives.
    let tmp = folder.path().join("tmp");
    fs::create_dir(tmp.join("77-0")).expect("a folder");
    fs::write(tmp.join("77-0/3"), "half a record").expect("a file");
    fs::create_dir(tmp.join("78-0")).expect("a folder");
    let alive = File::open(tmp.join("78-0")).expect("a folder");
    alive.lock().expect("nobody has locked it");
    let disk = open(folder.path());
    wait(|| disk.is_scanned());
    assert_eq!((has(&disk, 0..21), disk.used()), ([vec![true; 20], vec![false]].concat(), 20 * 8192));
    assert!((0..20).all(|number| get(&disk, number) == Ok(Got::Read)));
    let left: Vec<_> =
        fs::read_dir(&tmp).expect("it is there").map(|entry| entry.expect("an entry").file_name()).collect();
    assert!(left.iter().any(|name| name == "78-0") && !left.iter().any(|name| name == "77-0"), "{left:?}");
    assert_eq!(left.len(), 2, "the disk's own folder and that of the living process: {left:?}");
}

#[test]
fn only_the_owner_can_read_files() {
    let folder = folder();
    let disk = open(folder.path());
    put(&disk, 1, 0).expect("there is room");
    let mode = |path: &Path| fs::metadata(path).expect("it is there").mode() & 0o777;
    assert_eq!(mode(&path(folder.path(), 1)), 0o600);
    path(folder.path(), 1).ancestors().skip(1).take(4).for_each(|path| assert_eq!(mode(path), 0o700, "{path:?}"));
    fs::set_permissions(folder.path(), Permissions::from_mode(0o770)).expect("it is ours");
    let shared = |is_shared| Disk::open(DiskOptions { is_shared, ..options(folder.path(), 1 << 30) }).is_ok();
    assert_eq!([false, true].map(shared), [false, true]);
}

#[test]
fn links_and_files_of_others_are_not_read() {
    let (folder, other) = (folder(), self::folder());
    let (disk, outside) = (open(folder.path()), open(other.path()));
    for number in 0..3 {
        put(&disk, number, 0).expect("there is room");
        put(&outside, number, 0).expect("there is room");
    }
    fs::remove_file(path(folder.path(), 0)).expect("it is ours");
    symlink(path(other.path(), 0), path(folder.path(), 0)).expect("a link");
    assert_eq!(get(&disk, 0), Ok(Got::Foreign));
    // A link instead of a folder.
    let parent = |at: &Path| path(at, 1).parent().expect("a folder").to_owned();
    fs::remove_dir_all(parent(folder.path())).expect("it is ours");
    symlink(parent(other.path()), parent(folder.path())).expect("a link");
    assert_eq!(get(&disk, 1), Ok(Got::Foreign));
    assert!(put(&disk, 1, 0).is_err());
    disk.remove(&[name(1)]).expect("a link hides the record");
    assert_eq!(get(&outside, 1), Ok(Got::Read));
    fs::create_dir(path(folder.path(), 9).parent().expect("a folder")).expect("a folder");
    fs::create_dir(path(folder.path(), 9)).expect("a folder");
    assert_eq!(get(&disk, 9), Ok(Got::Foreign));
    if std::os::unix::fs::chown(path(folder.path(), 2), Some(12345), None).is_ok() {
        assert_eq!(get(&disk, 2), Ok(Got::Foreign));
    } else {
        println!("skipped: only root gives files to another user");
    }
}

#[test]
fn the_oldest_and_then_the_deepest_files_go_first() {
    let folder = folder();
    let disk = open(folder.path());
    wait(|| disk.is_scanned());
    // Deeper places first, as engines put no order among places.
    (0..64).for_each(|number| put(&disk, number, 63 - number).expect("there is room"));
    let an_hour_ago = |number: u32| {
        let old = SystemTime::now() - Duration::from_secs(3600);
        let seconds = old.duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs();
        let time = Duration::new(seconds, 999_999_999 - (63 - number));
        set_time(folder.path(), number, SystemTime::UNIX_EPOCH + time);
    };
    (0..64).for_each(an_hour_ago);
    assert_eq!(get(&disk, 0), Ok(Got::Read)); // the deepest place, used now
    drop(disk);
    let disk = Disk::open(options(folder.path(), 32 * 8192)).expect("the folder is ours");
    wait(|| disk.is_scanned() && disk.used() <= 32 * 8192);
    let left = has(&disk, 0..64);
    // A collection removes a thirty-second part of the limit more.
    let expected: Vec<_> = (0..64).map(|number| number == 0 || number >= 64 - 30).collect();
    assert_eq!(left, expected);
    assert_eq!(disk.used(), 31 * 8192);
}

#[test]
fn puts_beyond_the_limit_start_a_collection() {
    let folder = folder();
    let disk = Disk::open(options(folder.path(), 40 * 8192)).expect("the folder is ours");
    for number in 0..400 {
        put(&disk, number, 0).expect("there is room");
        wait(|| disk.used() <= 48 * 8192);
    }
    wait(|| disk.used() <= 40 * 8192);
    let left = has(&disk, 0..400).iter().filter(|has| **has).count();
    assert!((30..=48).contains(&left), "{left}");
}

#[test]
fn a_clock_that_goes_back_leaves_an_order() {
    let folder = folder();
    let disk = open(folder.path());
    (0..8).for_each(|number| put(&disk, number, 0).expect("there is room"));
    drop(disk);
    // These files are from the future, as if the clock had been set back by a year.
    let future = SystemTime::now() + Duration::from_secs(365 * 86_400);
    (0..8).for_each(|number| set_time(folder.path(), number, future));
    let disk = open(folder.path());
    wait(|| disk.is_scanned());
    let age = |number| fs::metadata(path(folder.path(), number)).expect("it is there").modified().expect("a time");
    (0..8).for_each(|number| assert!(age(number) < SystemTime::now() + Duration::from_secs(2)));
    assert_eq!(get(&disk, 3), Ok(Got::Read));
    assert!((0..8).all(|number| age(number) <= age(3)));
}

#[test]
fn forgetting_removes_one_namespace_at_once() {
    let folder = folder();
    let disk = open(folder.path());
    let other = Name { space: [3; 8], ..name(1) };
    (0..5).for_each(|number| put(&disk, number, 0).expect("there is room"));
    disk.put(&other, &head(0), &[&[1; 4096]]).expect("there is room");
    disk.remove_space(&Fingerprint([1; 32]), Space([2; 16])).expect("no failure");
    assert_eq!(has(&disk, 0..5), [false; 5]);
    assert_eq!(disk.have(&[other]), Ok(vec![true]));
    wait(|| fs::read_dir(folder.path().join("trash")).expect("it is there").next().is_none());
    disk.remove_space(&Fingerprint([1; 32]), Space([2; 16])).expect("nothing is there");
    put(&disk, 1, 0).expect("there is room");
    assert_eq!(get(&disk, 1), Ok(Got::Read));
}

#[test]
fn an_exact_question_sees_what_others_removed() {
    let folder = folder();
    let disk = open(folder.path());
    wait(|| disk.is_scanned());
    (0..4).for_each(|number| put(&disk, number, number).expect("there is room"));
    for number in [1, 3] {
        fs::remove_file(path(folder.path(), number)).expect("it is there");
    }
    let names: Vec<_> = (0..4).map(name).collect();
    assert_eq!(disk.have(&names), Ok(vec![true; 4]), "the process remembers its files");
    assert_eq!(disk.have_now(&names), Ok(vec![true, false, true, false]));
    assert_eq!(has(&disk, 0..4), [true, false, true, false]);
}

#[test]
fn a_vanished_folder_is_a_typed_error_and_comes_back() {
    let folder = folder();
    let disk = open(folder.path());
    wait(|| disk.is_scanned());
    put(&disk, 1, 0).expect("there is room");
    for entry in ["v1", "tmp", "trash"] {
        fs::remove_dir_all(folder.path().join(entry)).expect("it is ours");
    }
    assert_eq!(get(&disk, 1), Ok(Got::Absent));
    assert_eq!(has(&disk, 1..2), [false]);
    put(&disk, 1, 0).expect("the folders come back");
    assert_eq!(get(&disk, 1), Ok(Got::Read));
    fs::remove_dir_all(folder.path()).expect("it is ours");
    assert!(matches!(put(&disk, 1, 0), Err(StoreError::Gone { .. })));
    assert_eq!(get(&disk, 1), Ok(Got::Absent));
}

#[test]
fn two_processes_share_a_folder() {
    let folder = folder();
    let disk = open(folder.path());
    wait(|| disk.is_scanned());
    let own = std::env::current_exe().expect("this program");
    let mut other = Command::new(own);
    other.args(["--exact", "child", "--nocapture"]).env(CHILD, format!("put {}", folder.path().display()));
    let mut other = other.spawn().expect("it runs");
    for number in 0..200 {
        put(&disk, number, 0).expect("there is room");
        assert_eq!(get(&disk, number), Ok(Got::Read));
    }
    assert!(other.wait().expect("it ran").success());
    // The files of the other process count without a scan.
    assert_eq!(has(&disk, 0..400), [true; 400]);
    assert!((0..400).all(|number| get(&disk, number) == Ok(Got::Read)));
}

#[test]
fn a_full_disk_ends_puts() {
    let folder = folder();
    let mut other = Command::new("unshare");
    other.args(["--user", "--map-root-user", "--mount", "--"]).arg(std::env::current_exe().expect("this program"));
    other.args(["--exact", "child", "--nocapture"]).env(CHILD, format!("fill {}", folder.path().display()));
    let ran = other.output();
    match ran {
        Ok(output) if output.status.success() => {}
        Ok(output) if String::from_utf8_lossy(&output.stderr).contains("panicked") => {
            panic!("{}", String::from_utf8_lossy(&output.stderr))
        }
        _ => println!("skipped: no mounts without rights"),
    }
}

/// A disk of 1 MiB, of which nothing, and then a tenth, must stay free; then a disk that cannot be written.
fn fill(path: &Path) {
    let mount = |options: &str| {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(path).status().is_ok_and(|status| status.success())
    };
    if !mount("size=1m,mode=700") {
        return println!("skipped: no mounts without rights");
    }
    let disk = open(path);
    let puts = (0..1000).take_while(|&number| put(&disk, number, 0) == Ok(())).count() as u32;
    assert!((64..=128).contains(&puts), "{puts}");
    assert_eq!(put(&disk, 5000, 0), Err(StoreError::Full));
    assert!((0..puts).all(|number| get(&disk, number) == Ok(Got::Read)));
    assert_eq!(get(&disk, 5000), Ok(Got::Absent));
    drop(disk);
    let disk = Disk::open(DiskOptions { free_percent: 10, ..options(path, 1 << 30) }).expect("the folder is ours");
    wait(|| disk.is_scanned() && put(&disk, 1, 0).is_ok());
    // A put may succeed before the collection ends.
    wait(|| disk.used() < u64::from(puts) * 8192 - 100_000);
    assert!(mount("remount,ro"));
    assert_eq!(put(&disk, 2, 0), Err(StoreError::ReadOnly));
    assert_eq!(get(&disk, 1), Ok(Got::Read));
}

/// The other process of a test. Without its variable, it does nothing.
#[test]
fn child() {
    let Ok(work) = std::env::var(CHILD) else { return };
    let (verb, path) = work.split_once(' ').expect("a verb and a folder");
    match verb {
        "put" => {
            let disk = open(Path::new(path));
            (200..400).for_each(|number| put(&disk, number, 0).expect("there is room"));
            // Both processes write some of the records.
            (100..150).for_each(|number| put(&disk, number, 0).expect("there is room"));
        }
        _ => fill(Path::new(path)),
    }
}

/// Returns the CPU time of the process in seconds.
fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Fills a folder with files without blocks, and scans, asks and collects.
fn many(files: u32) {
    let folder = folder();
    let disk = open(folder.path());
    wait(|| disk.is_scanned());
    (0..256).for_each(|number| put(&disk, number, 0).expect("there is room")); // makes the folders
    for number in 256..files {
        let path = path(folder.path(), number);
        File::create(path).expect("a file").set_len(8192).expect("no blocks are written");
    }
    drop(disk);
    let (begin, disk) = (cpu(), open(folder.path()));
    let mut reads = 0;
    while !disk.is_scanned() {
        // The store serves meanwhile.
        assert_eq!((get(&disk, reads % 256), has(&disk, reads..reads + 1)), (Ok(Got::Read), vec![true]));
        reads += 1;
        sleep(Duration::from_millis(1));
    }
    println!("{files} files: scanned in {:.2} s of CPU, with {reads} reads meanwhile", cpu() - begin);
    drop(disk);
    let disk = Disk::open(options(folder.path(), u64::from(files) * 8192 / 2)).expect("the folder is ours");
    wait(|| disk.is_scanned() && disk.used() <= u64::from(files) * 8192 / 2);
    let left = has(&disk, 0..files).iter().filter(|has| **has).count() as u64;
    assert_eq!(left * 8192, disk.used());
    assert_eq!(left, u64::from(files / 2 - files / 64));
}

#[test]
fn a_hundred_thousand_files_are_scanned_and_collected() {
    many(102_400);
}

#[test]
#[ignore = "a minute"]
fn a_million_files_are_scanned_and_collected() {
    many(1_024_000);
}
