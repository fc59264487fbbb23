//! Servers whose stores end, stop, become slow or full while clients load them: every answer is that of a server
//! without a store, and the store is used again afterwards.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use common::files::Dir;
use common::listening::Listening;
use common::load::{CACHED, Load};
use common::valkey::{Valkey, program};
use kvarena_tiers::disk::Cache;

const CLIENTS: usize = 4;
/// Requests of a phase.
const REQUESTS: usize = 96;

fn serve(options: &[&str]) -> Listening {
    let model = common::folder("qwen3-tiny");
    Listening::start(&[&["--model", &model, "--swap-space", "0.01", "--flush-seconds", "1"], options].concat())
}

/// Loads a server before a disturbance, during it and after it. `records` returns the number of stored records. A
/// second server then hits what the first one puts.
fn survives(options: &[&str], disturb: impl FnOnce(), restore: impl FnOnce(), records: impl Fn() -> u64) {
    let (load, server) = (Load::new(8), serve(options));
    let address = server.address.clone();
    let run = |phase: &str| {
        let salt = |number: usize| Some(format!("{phase} {}", number / load.len() % 4));
        let served = load.run(&address, CLIENTS, REQUESTS, salt);
        assert_eq!(served.answers, REQUESTS, "{phase}");
    };
    run("before");
    while records() == 0 {
        thread::sleep(Duration::from_millis(5));
    }
    thread::scope(|scope| {
        let clients = scope.spawn(|| run("during"));
        disturb();
        clients.join().expect("all answers are those of a server without a store");
    });
    restore();
    // A store that failed is tried again after a while.
    let before = records();
    let mut round = 0;
    while records() <= before {
        load.each(&address, Some(&format!("after {round}")));
        round += 1;
        thread::sleep(Duration::from_millis(100));
    }
    load.each(&address, Some("last"));
    server.end();
    let second = serve(options);
    let cached = load.each(&second.address, Some("last"));
    assert!(cached.contains(&CACHED), "{cached:?}");
}

/// The same over Valkey.
fn survives_over(valkey: &Valkey, port: u16, disturb: impl FnOnce(), restore: impl FnOnce()) {
    let url = format!("redis://127.0.0.1:{port}/");
    survives(&["--cache-url", &url, "--cache-trust"], disturb, restore, || valkey.records());
}

#[test]
fn valkey_ends_and_starts_again() {
    let Some(program) = program() else { return };
    let valkey = std::cell::RefCell::new(Some(Valkey::start(&program)));
    let port = valkey.borrow().as_ref().expect("it runs").port;
    let url = format!("redis://127.0.0.1:{port}/");
    let disturb = || drop(valkey.take());
    let restore = || drop(valkey.replace(Some(Valkey::start_at(&program, port))));
    let records = || valkey.borrow().as_ref().map_or(0, Valkey::records);
    survives(&["--cache-url", &url, "--cache-trust"], disturb, restore, records);
}

#[test]
fn valkey_stops_and_continues() {
    let Some(program) = program() else { return };
    let valkey = Valkey::start(&program);
    survives_over(&valkey, valkey.port, || valkey.signal("-STOP"), || valkey.signal("-CONT"));
}

#[test]
fn valkey_is_full_for_a_while() {
    let Some(program) = program() else { return };
    let valkey = Valkey::start(&program);
    let limit = |bytes: &str| assert_eq!(valkey.command(&format!("CONFIG SET maxmemory {bytes}")), "+OK");
    survives_over(&valkey, valkey.port, || limit("1"), || limit("0"));
}

/// Copies bytes, each piece after a delay in milliseconds.
fn copy(mut from: TcpStream, mut to: TcpStream, delay: &AtomicU64) {
    let mut bytes = [0; 65_536];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        thread::sleep(Duration::from_millis(delay.load(Ordering::Relaxed)));
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[test]
fn valkey_is_slow_for_a_while() {
    let Some(program) = program() else { return };
    let valkey = Valkey::start(&program);
    let (delay, port) = (Arc::new(AtomicU64::new(0)), valkey.port);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let proxy = listener.local_addr().expect("a port").port();
    let of_proxy = Arc::clone(&delay);
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { return };
            let copies = [(&client, &server), (&server, &client)];
            for (from, to) in copies.map(|(from, to)| (from.try_clone(), to.try_clone())) {
                let (from, to, delay) = (from.expect("a socket"), to.expect("a socket"), Arc::clone(&of_proxy));
                thread::spawn(move || copy(from, to, &delay));
            }
        }
    });
    let set = |milliseconds| delay.store(milliseconds, Ordering::Relaxed);
    survives_over(&valkey, proxy, || set(150), || set(0));
}

fn count(folder: &Path) -> u64 {
    let mut count = 0;
    // Files may vanish while they are listed.
    let _ = Cache::open(folder).and_then(|cache| cache.list(|_| count += 1));
    count
}

#[test]
fn a_folder_vanishes() {
    let dir = Dir::new();
    let folder = dir.path().join("cache");
    let remove = || {
        for entry in fs::read_dir(&folder).expect("it is there").flatten() {
            let _ = fs::remove_dir_all(entry.path());
        }
    };
    survives(&["--cache-dir", folder.to_str().expect("UTF-8")], remove, remove, || count(&folder));
}

#[test]
fn a_folder_has_room_for_few_records() {
    let dir = Dir::new();
    let folder = dir.path().join("cache");
    // 300 kB: the collector runs all the time.
    let options = ["--cache-dir", folder.to_str().expect("UTF-8"), "--cache-limit", "0.0003"];
    let (load, server) = (Load::new(8), serve(&options));
    let served = load.run(&server.address, CLIENTS, REQUESTS, |number| Some(format!("{}", number / 16)));
    assert_eq!(served.answers, REQUESTS);
    server.end();
    let second = serve(&options);
    load.each(&second.address, Some("new"));
    let cache = Cache::open(&folder).expect("it is ours");
    let mut names = Vec::new();
    cache.list(|file| names.push(file.name)).expect("no failure");
    assert!(names.iter().all(|name| !matches!(cache.check(name, None), Ok(Err(miss)) if miss.is_damage())));
}
