//! Stores over real servers: the contract, and a server that ends. `servers.sh` and `mooncake.sh` start the servers.
//!
//! `KVARENA_REDIS` and `KVARENA_REDIS_2` are URLs of Valkey and of Redis. `KVARENA_S3` is a URL, and
//! `KVARENA_S3_2` another endpoint of the same bucket's name. `KVARENA_MOONCAKE` is the command of a child. Without its
//! variable, a test does nothing.

mod common;
#[cfg(feature = "object-store")]
#[path = "common/host.rs"]
mod host;

use kvarena_tiers::name::{Fingerprint, Name, Space};
use kvarena_tiers::store::Store;

/// The contract of stores, after removal of an earlier run's records.
fn contract(store: &dyn Store) {
    for space in [0, 1, 2] {
        store.remove_space(&Fingerprint([9; 32]), Space([space; 16])).expect("it runs");
    }
    kvarena_tiers::testing::contract(store);
}

fn name(number: u8) -> Name {
    Name::new(&Fingerprint([9; 32]), Space([3; 16]), [number; 32], 0)
}

/// Returns the value of a variable, if it is set.
fn variable(name: &str) -> Option<String> {
    let value = std::env::var(name).ok();
    if value.is_none() {
        println!("skipped: no {name}");
    }
    value
}

#[cfg(feature = "redis")]
mod redis {
    use std::time::Duration;

    use kvarena_tiers::redis::{Redis, VALUE_MAX};
    use kvarena_tiers::store::{Store, StoreError};

    use super::common::get;
    use super::{contract, name, variable};

    fn fulfils_the_contract(url: &str) {
        for ttl in [None, Some(Duration::from_secs(600))] {
            let redis = Redis::new(url, ttl).expect("a valid URL");
            contract(&redis);
            assert!(redis.policy_warning().expect("the server runs").is_some_and(|text| text.contains("noeviction")));
        }
        // A user, and another database.
        let mut connection = ::redis::Client::open(url).and_then(|client| client.get_connection()).expect("it runs");
        let user = ["SETUSER", "tests", "on", ">secret", "~*", "+@all"];
        ::redis::cmd("ACL").arg(&user).exec(&mut connection).expect("we may");
        let login = |password| Redis::new(&(url.replace("://", &format!("://tests:{password}@")) + "3"), None);
        contract(&login("secret").expect("a valid URL"));
        let got = get(&login("wrong").expect("a valid URL"), &name(1), 4096);
        assert!(matches!(got, Err(StoreError::Failed { .. })), "{got:?}");
        let redis = Redis::new(url, None).expect("a valid URL");
        let (page, bytes) = (vec![0; VALUE_MAX as usize], VALUE_MAX + 4096);
        assert_eq!(redis.put(&name(1), &[0; 4096], &[&page]), Err(StoreError::TooLarge { bytes, max: VALUE_MAX }));
    }

    #[test]
    fn valkey_fulfils_the_contract() {
        variable("KVARENA_REDIS").iter().for_each(|url| fulfils_the_contract(url));
    }

    #[test]
    fn redis_fulfils_the_contract() {
        variable("KVARENA_REDIS_2").iter().for_each(|url| fulfils_the_contract(url));
    }

    #[test]
    fn an_absent_server_is_a_typed_error() {
        let redis = Redis::new("redis://127.0.0.1:1/", None).expect("a valid URL");
        assert!(matches!(redis.have(&[name(1)]), Err(StoreError::Gone { .. })));
        assert!(matches!(Redis::new("no URL", None), Err(StoreError::Failed { .. })));
    }
}

#[cfg(feature = "object-store")]
mod objects {
    use std::sync::Arc;

    use kvarena::id::Namespace;
    use kvarena::layout::{Groups, Reach};
    use kvarena_tiers::name::{Fingerprint, Name, Space};
    use kvarena_tiers::objects::Objects;
    use kvarena_tiers::store::{Store, StoreError};
    use object_store::memory::InMemory;

    use super::host::{Host, model, text};
    use super::{contract, name, variable};

    fn in_memory(prefix: &str) -> Objects {
        Objects::with_store(Arc::new(InMemory::new()), prefix.into()).expect("threads")
    }

    #[test]
    fn the_client_in_memory_fulfils_the_contract() {
        ["", "a/prefix"].iter().for_each(|prefix| contract(&in_memory(prefix)));
    }

    #[test]
    fn a_search_finds_the_number_of_leading_records() {
        let objects = in_memory("");
        let name = |at: u32, group| {
            let mut key = [0; 32];
            key[..4].copy_from_slice(&at.to_le_bytes());
            Name::new(&Fingerprint([9; 32]), Space([3; 16]), key, group)
        };
        let names: Vec<_> = (0..5000).map(|at| name(at, 0)).chain([name(7, 1), name(4999, 1), name(9999, 1)]).collect();
        let mut stored = 0;
        for count in [0, 1, 2, 63, 64, 65, 128, 129, 1000, 4095, 4096, 4097, 4999, 5000] {
            for name in &names[stored.min(count)..count] {
                objects.put(name, &[0; 4096], &[]).expect("it has room");
            }
            stored = count;
            for len in [1, 64, 65, 100, 4096, 4097, 5000] {
                let expected: Vec<_> = (0..len).map(|at| at < stored).collect();
                assert_eq!(objects.have(&names[..len]), Ok(expected), "{stored} of {len}");
            }
        }
        names[5000..].iter().for_each(|name| objects.put(name, &[0; 4096], &[]).expect("it has room"));
        assert_eq!(objects.have(&names).expect("no failure")[5000..], [true; 3]);
        objects.remove(&names[4000..5000]).expect("no failure");
        // The page of the second cell is absent; that of the third is not among the names.
        assert_eq!(objects.have(&names).expect("no failure")[5000..], [true, false, true]);
    }

    #[test]
    fn cells_are_asked_from_the_longest_prefix_down() {
        let window = Groups::new(&[Reach::All, Reach::Window(6)], &[0, 1, 1]).expect("valid groups");
        let objects = Arc::new(in_memory(""));
        let mut first = Host::new(&model(window, 1), Arc::clone(&objects), None);
        let namespace = Namespace::new(0);
        // The engine has the cells of each prompt's end: at the places 6, 7, 10, 11, 14 and 15.
        for len in [33, 49, 65] {
            first.serve(namespace, &text(0..len));
        }
        assert!(first.flush());
        // Returns the cached tokens, the number of names and that of requests without reads.
        let find = |len: u32| {
            let mut host = Host::new(&model(window, 1), Arc::clone(&objects), None);
            let before = objects.requests();
            host.find(namespace, &text(0..len));
            let stats = host.tier.stats()[0].clone();
            assert_eq!(host.misses(), []);
            let requests = objects.requests() - before - stats.read;
            (host.serve(namespace, &text(0..len)), stats.asked, requests)
        };
        // All pages, and the two cells of the longest prefix that is there.
        assert_eq!([65, 81].map(find), [(64, 18, 18), (64, 22, 22)]);
        // The cells at 13 and 12 are absent; the next round asks for four.
        assert_eq!(find(57), (48, 20, 20));
    }

    #[test]
    fn seaweedfs_fulfils_the_contract() {
        let Some(url) = variable("KVARENA_S3") else { return };
        contract(&Objects::new(&url, std::env::vars()).expect("a valid URL"));
    }

    #[test]
    fn s3s_fulfils_the_contract() {
        let (Some(url), Some(endpoint)) = (variable("KVARENA_S3"), variable("KVARENA_S3_2")) else { return };
        let options = std::env::vars().chain([("aws_endpoint".to_owned(), endpoint)]);
        contract(&Objects::new(&url, options).expect("a valid URL"));
    }

    #[test]
    fn an_absent_server_is_a_typed_error() {
        let options = [("aws_endpoint", "http://127.0.0.1:1"), ("allow_http", "true"), ("aws_access_key_id", "a")];
        let options = options.into_iter().chain([("aws_secret_access_key", "b"), ("max_retries", "0")]);
        let options = options.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let objects = Objects::new("s3://bucket/prefix", options).expect("a valid URL");
        assert!(matches!(objects.have(&[name(1)]), Err(StoreError::Gone { .. })));
        assert!(matches!(Objects::new("ftp://bucket", []), Err(StoreError::Failed { .. })));
    }
}

mod child {
    use std::time::Duration;

    use kvarena_tiers::child::Child;
    use kvarena_tiers::store::{Got, Store, StoreError};

    use super::common::get;
    use super::{contract, name, variable};

    fn run(command: &[&str]) -> Child {
        let command: Vec<_> = command.iter().map(|&part| part.to_owned()).collect();
        Child::new(&command, 1 << 20).expect("memory")
    }

    /// A child that keeps records in a dictionary.
    fn dictionary() -> Child {
        run(&["python3", concat!(env!("CARGO_MANIFEST_DIR"), "/mooncake_child.py"), "memory"])
    }

    #[test]
    fn it_fulfils_the_contract() {
        contract(&dictionary());
    }

    #[test]
    fn mooncake_fulfils_the_contract() {
        let Some(command) = variable("KVARENA_MOONCAKE") else { return };
        contract(&run(&command.split_whitespace().collect::<Vec<_>>()));
    }

    #[test]
    fn threads_share_requests() {
        let child = dictionary();
        std::thread::scope(|scope| {
            for thread in 0..48_u8 {
                let child = &child;
                scope.spawn(move || {
                    for round in 0..20_u8 {
                        let page = [thread ^ round; 5000];
                        child.put(&name(thread), &[round; 4096], &[&page]).expect("it has room");
                        let got = get(child, &name(thread), 5000);
                        assert_eq!(got, Ok((Got::Read, vec![round; 4096], page.to_vec())));
                    }
                });
            }
        });
    }

    #[test]
    fn a_child_that_ends_is_a_typed_error() {
        let gone = |command: &[&str]| {
            let child = run(command);
            (0..3).all(|_| matches!(child.have(&[name(1)]), Err(StoreError::Gone { .. })))
        };
        assert!(gone(&["true"]));
        assert!(gone(&["/no/program"]));
        let (max, bytes) = (1 << 20, 4096 + (1 << 20));
        let put = dictionary().put(&name(1), &[0; 4096], &[&vec![0; 1 << 20]]);
        assert_eq!(put, Err(StoreError::TooLarge { bytes, max }));
        assert!(Child::new(&[], 1).is_err());
    }

    #[test]
    fn long_questions_do_not_wait_for_ever() {
        // The names and the answers fill both pipes, if the child answers each record as it reads it.
        let names = vec![name(1); 150_000];
        let each = "import os, sys\nwhile sys.stdin.buffer.read(5):\n  for _ in range(150_000):\n    \
                    sys.stdin.buffer.read(144); os.write(1, b'\\1')";
        for timeout in [Duration::from_secs(60), Duration::MAX] {
            let child = run(&["python3", "-c", each]).with_timeout(timeout);
            assert_eq!(child.have(&names), Ok(vec![true; names.len()]));
        }
        // A child that does not read.
        let child = run(&["python3", "-c", "import time; time.sleep(1000)"]).with_timeout(Duration::from_millis(50));
        assert!(matches!(child.have(&names), Err(StoreError::Gone { .. })));
    }
}
