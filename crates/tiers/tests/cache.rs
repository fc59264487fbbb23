//! The program `kvarena-cache`.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use common::samples;
use kvarena::hash::NamespaceNames;
use kvarena_tiers::disk::{Disk, DiskOptions};
use kvarena_tiers::name::Space;
use kvarena_tiers::store::Store;
use sha2::{Digest, Sha256};

/// Returns the exit status and the output.
fn cache(arguments: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvarena-cache")).args(arguments).output().expect("it runs");
    (output.status.code().expect("no signal"), String::from_utf8(output.stdout).expect("text"))
}

#[test]
fn it_lists_checks_collects_and_forgets() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, secret) = (folder.path().join("cache"), folder.path().join("secret"));
    let disk = Disk::open(DiskOptions { free_percent: 0, ..DiskOptions::new(&path, 1 << 30) }).expect("it is ours");
    fs::write(&secret, Sha256::digest("secret")).expect("a file");
    fs::set_permissions(&secret, PermissionsExt::from_mode(0o600)).expect("it is ours");
    let [one, cell] = samples();
    for sample in [&one, &cell] {
        let pages: Vec<_> = sample.pages.iter().map(|page| &page[..]).collect();
        let head = sample.record().write_head(&pages, sample.secret.as_ref());
        disk.put(&sample.record().name(), &head, &pages).expect("there is room");
    }
    drop(disk);
    let [dir, secret] = [&path, &secret].map(|path| path.to_str().expect("text"));
    let (status, listed) = cache(&["ls", dir]);
    assert!(status == 0 && listed.contains("9372c470eeadd5ec e3b0c44298fc1c14 2            28672"), "{listed}");
    // The keyed record is not damaged, but a reader without the secret cannot check it.
    assert_eq!(cache(&["check", dir]), (0, format!("{}: secret\n2 records\n", cell.record().name())));
    assert_eq!(cache(&["check", dir, secret]).0, 0);
    let file = path.join(one.record().name().to_string());
    let mut bytes = fs::read(&file).expect("it is there");
    bytes[5000] ^= 1;
    fs::write(&file, &bytes).expect("it is ours");
    assert_eq!(cache(&["check", dir]).0, 1);
    assert!(cache(&["check", dir]).1.contains(": page check"));
    fs::rename(&file, Path::new(&format!("{}1", file.display()))).expect("it is ours");
    assert_eq!(cache(&["gc", dir, "1000"]), (0, "removed 1 of 1 files, 16384 of 16384 bytes\n".into()));
    assert_eq!(cache(&["forget", dir, "9372c470eeadd5ec", "e3b0c44298fc1c14"]).0, 0);
    assert!(!file.exists() && cache(&["ls", dir]).1.lines().count() == 1);
    let [open, keyed] = [&["space", "salt"][..], &["space", "salt", secret]].map(cache);
    assert_eq!((open.0, open.1.len(), keyed.0, keyed.1.len()), (0, 17, 0, 17));
    assert_ne!(open.1, keyed.1);
    let names = NamespaceNames { salt: Some("salt".to_owned()), ..NamespaceNames::default() };
    assert_eq!(open.1.trim(), Space::of(&names, None).to_string());
    // No server listens there, or no client is built in.
    assert_eq!(cache(&["forget", "redis://127.0.0.1:1/", "9372c470eeadd5ec", "e3b0c44298fc1c14"]).0, 2);
    for wrong in [&["ls"][..], &["forget", dir, "xyz"], &["gc", dir, "many"], &["ls", "/no/folder"], &[]] {
        assert_eq!(cache(wrong).0, 2, "{wrong:?}");
    }
}
