//! Two servers at one store: each hits what the other has computed, both put the same records at the same time, and one
//! loses a namespace while the other puts.

mod common;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::files::Dir;
use common::listening::Listening;
use common::load::{CACHED, Load};
use common::valkey::{Valkey, program};
use kvarena::hash::NamespaceNames;
use kvarena_tiers::disk::Cache;
use kvarena_tiers::name::{Fingerprint, Name, Space, read_hex};
use kvarena_tiers::redis::Redis;
use kvarena_tiers::store::Store;

/// Pages of 16 tokens of a prompt, of which the first two are those of other prompts, too.
const PAGES: u64 = CACHED / 16;

fn serve(options: &[&str]) -> Listening {
    let model = common::folder("qwen3-tiny");
    Listening::start(&[&["--model", &model, "--swap-space", "0.01"], options].concat())
}

fn space(salt: &str) -> Space {
    let names = NamespaceNames { salt: Some(salt.to_owned()), ..NamespaceNames::default() };
    Space::of(&names, None)
}

fn wait(mut done: impl FnMut() -> bool) {
    while !done() {
        thread::sleep(Duration::from_millis(5));
    }
}

/// Two servers at one store. `records` returns the number of records of a salt, and `forget` removes them.
fn share(options: &[&str], records: &dyn Fn(&str) -> u64, forget: &(dyn Fn(&str) + Sync)) {
    let load = Load::new(8);
    let servers = [serve(options), serve(options)];
    let [first, second] = servers.each_ref().map(|server| &server.address[..]);
    // Prompts of four share 40 tokens: two whole pages.
    let all = 2 * (2 + 4 * (PAGES - 2));
    for (salt, from, to) in [("a", first, second), ("b", second, first)] {
        assert_eq!(load.each(from, Some(salt)).iter().max(), Some(&32), "the other prompts' pages");
        wait(|| records(salt) == all);
        assert_eq!(load.each(to, Some(salt)), vec![CACHED; load.len()]);
    }
    // Both compute and put the same prompts at the same time.
    let salt = |number: usize| Some(format!("c {}", number / load.len()));
    let run = |address| load.run(address, 4, 4 * load.len(), salt).answers;
    let answers = thread::scope(|scope| [first, second].map(|at| scope.spawn(move || run(at))).map(|run| run.join()));
    assert_eq!(answers.map(|answers| answers.expect("no panic")), [4 * load.len(); 2]);
    (0..4).for_each(|number| wait(|| records(&format!("c {number}")) == all));
    // One namespace is forgotten again and again, while both servers read and put it.
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let clients = scope.spawn(|| {
            let salt = |number: usize| {
                Some(if number.is_multiple_of(2) { "gone".to_owned() } else { format!("kept {}", number / 16) })
            };
            let run = |address| load.run(address, 2, 6 * load.len(), salt).answers;
            let runs = thread::scope(|scope| {
                [first, second].map(|at| scope.spawn(move || run(at))).map(|run| run.join().expect("no panic"))
            });
            ended.store(true, Ordering::Relaxed);
            runs
        });
        while !ended.load(Ordering::Relaxed) {
            forget("gone");
        }
        assert_eq!(clients.join().expect("all words are equal"), [6 * load.len(); 2]);
    });
    servers.into_iter().for_each(Listening::end);
    forget("gone");
    assert_eq!(records("gone"), 0);
    for salt in ["a", "b", "c 0", "c 1", "c 2", "c 3"] {
        assert_eq!(records(salt), all, "{salt}");
    }
    let third = serve(options);
    assert_eq!(load.each(&third.address, Some("a")), vec![CACHED; load.len()]);
    assert_eq!(load.each(&third.address, Some("gone")).iter().max(), Some(&32));
}

/// Returns the names of a folder's records, all of which are whole.
fn names(folder: &Path) -> Vec<Name> {
    let cache = Cache::open(folder).expect("it is ours");
    let mut names = Vec::new();
    // Folders may vanish while they are listed.
    let _ = cache.list(|file| names.push(file.name));
    for name in &names {
        assert!(!matches!(cache.check(name, None), Ok(Err(miss)) if miss.is_damage()), "{name}");
    }
    names
}

#[test]
fn two_servers_share_a_folder() {
    let dir = Dir::new();
    let folder = dir.path().join("cache");
    let records = |salt: &str| {
        let own = |name: &&Name| name.space == space(salt).0[..8];
        names(&folder).iter().filter(own).count() as u64
    };
    let forget = |salt: &str| {
        let cache = Cache::open(&folder).expect("it is ours");
        for model in fs::read_dir(folder.join("v1")).expect("it is there").flatten() {
            let model = read_hex(model.file_name().to_str().expect("a name")).expect("a fingerprint");
            cache.forget(model, Some(space(salt).0[..8].try_into().expect("8 bytes"))).expect("no failure");
        }
    };
    share(&["--cache-dir", folder.to_str().expect("UTF-8")], &records, &forget);
}

#[test]
fn two_servers_share_a_valkey() {
    let Some(program) = program() else { return };
    let valkey = Valkey::start(&program);
    let url = format!("redis://127.0.0.1:{}/", valkey.port);
    let redis = Redis::new(&url, None).expect("a valid URL");
    let records = |salt: &str| {
        let keys = valkey.command(&format!("EVAL \"return #redis.call('KEYS','v1:*:{}:*')\" 0", space(salt)));
        keys.strip_prefix(':').expect("a number").parse().expect("a number")
    };
    let forget = |salt: &str| {
        let mut fingerprint = [0; 32];
        fingerprint[..8].copy_from_slice(&model_of(&valkey).expect("a record"));
        redis.remove_space(&Fingerprint(fingerprint), space(salt)).expect("it runs");
    };
    share(&["--cache-url", &url, "--cache-trust"], &records, &forget);
}

/// Returns the fingerprint in the name of some record.
fn model_of(valkey: &Valkey) -> Option<[u8; 8]> {
    let line = valkey.command("EVAL \"return {err=redis.call('RANDOMKEY')}\" 0");
    line.split(':').nth(1).and_then(|text| read_hex(text).ok())
}
