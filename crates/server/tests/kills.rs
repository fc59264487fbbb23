//! A server over a folder that is killed while clients load it. `KVARENA_KILLS` is the number of kills; the default
//! takes seconds.

mod common;

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use common::files::Dir;
use common::listening::Listening;
use common::load::{CACHED, Load};
use kvarena_tiers::disk::Cache;
use kvarena_tiers::name::Name;

const KILLS: usize = 5;
/// The longest time from the first request to a kill.
const LIFE_MS: u64 = 400;

/// Returns all records of a folder. Checks each of them.
fn records(folder: &Path) -> HashMap<Name, Vec<u8>> {
    let cache = Cache::open(folder).expect("it is ours");
    let mut names = Vec::new();
    cache.list(|file| names.push(file.name)).expect("no failure");
    let read = |name: Name| {
        assert_eq!(cache.check(&name, None).expect("no failure"), Ok(()), "{name}");
        (name, fs::read(folder.join(name.to_string())).expect("it is there"))
    };
    names.into_iter().map(read).collect()
}

/// Returns the folders of temporary files.
fn temporary(folder: &Path) -> usize {
    fs::read_dir(folder.join("tmp")).map_or(0, Iterator::count)
}

#[test]
fn kills_lose_no_accepted_record_and_leave_no_temporary_file() {
    let kills = std::env::var("KVARENA_KILLS").map_or(KILLS, |kills| kills.parse().expect("a number"));
    let (load, dir) = (Load::new(16), Dir::new());
    let folder = dir.path().join("cache");
    let model = common::folder("qwen3-tiny");
    let options = ["--model", &model, "--swap-space", "0.01", "--cache-dir", folder.to_str().expect("UTF-8")];
    let (mut known, mut answers, mut cached, mut left) = (HashMap::new(), 0, 0, 0);
    let mut random = std::process::id() as u64 | 1;
    for kill in 0..kills {
        let server = Listening::start(&options);
        // A thread removes what earlier processes have left.
        while temporary(&folder) > 1 {
            thread::yield_now();
        }
        let address = server.address.clone();
        // Every second request reads records of the last run, and the others write.
        let salt = |number: usize| Some(format!("run {}", kill + number % 2));
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let life = Duration::from_millis(random % LIFE_MS);
        let served = thread::scope(|scope| {
            let clients = scope.spawn(|| load.run(&address, 4, usize::MAX, salt));
            thread::sleep(life);
            drop(server); // SIGKILL
            clients.join().expect("all answers are those of a server without a store")
        });
        (answers, cached) = (answers + served.answers, cached + served.cached);
        left += temporary(&folder);
        let now = records(&folder);
        for (name, bytes) in &known {
            assert!(now.get(name) == Some(bytes), "a kill changed {name}");
        }
        known = now;
    }
    println!("{kills} kills: {answers} answers, {cached} cached tokens, {} records, {left} folders left", known.len());
    // The last run writes everything, and the next one hits it.
    for is_second in [false, true] {
        let server = Listening::start(&options);
        let cached = load.each(&server.address, Some("last"));
        assert!(!is_second || cached.iter().all(|&tokens| tokens == CACHED), "{cached:?}");
        server.end();
    }
}
