//! Records lie in the space of their namespace, so that a namespace can be forgotten.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvarena::hash::NamespaceNames;
use kvarena::id::Namespace;
use kvarena::layout::Groups;
use kvarena_tiers::check::Secret;
use kvarena_tiers::disk::Cache;
use kvarena_tiers::name::{Name, Space};
use kvarena_tiers::store::Store;

use super::host::{Host, disk, model, models, text};
use super::{faulty, memory};

/// Salts of the namespaces 0, 1 and 2.
const SALTS: [Option<&str>; 3] = [None, Some("one"), Some("two")];

fn names(namespace: usize) -> NamespaceNames {
    NamespaceNames { salt: SALTS[namespace].map(str::to_owned), ..NamespaceNames::default() }
}

fn namespace(number: usize) -> Namespace {
    Namespace::new(number as u64)
}

/// A host with three namespaces.
fn tenants(config: &kvarena::EngineConfig, store: &Arc<impl Store>, secret: Option<Secret>) -> Host {
    let mut host = Host::new(config, Arc::clone(store), secret);
    (1..3).for_each(|number| host.name(namespace(number), SALTS[number].expect("a salt")));
    host
}

/// Serves a prompt in a namespace. Returns the cached tokens.
fn serve(host: &mut Host, number: usize, tokens: std::ops::Range<u32>) -> u32 {
    host.find(namespace(number), &text(tokens.clone()));
    host.serve(namespace(number), &text(tokens))
}

/// Returns the number of records by the first bytes of their space.
fn count(names: &[Name]) -> BTreeMap<[u8; 8], usize> {
    let mut counts = BTreeMap::new();
    names.iter().for_each(|name| *counts.entry(name.space).or_default() += 1);
    counts
}

fn short(space: Space) -> [u8; 8] {
    space.0[..8].try_into().expect("8 bytes")
}

#[test]
fn a_forgotten_namespace_leaves_no_record_and_the_others_stay() {
    for config in models() {
        for secret in [None, Some(Secret::new([3; 32]))] {
            let store = memory();
            let mut host = tenants(&config, &store, secret.clone());
            // A shared text, one text of each namespace, and a branch of the shared text, which splits its node.
            for number in [0, 1, 2, 1, 0, 2] {
                serve(&mut host, number, 0..33);
                serve(&mut host, number, 100 * number as u32 + 100..100 * number as u32 + 117);
                let branch = [text(0..16), text(900..921)].concat();
                host.find(namespace(number), &branch);
                host.serve(namespace(number), &branch);
            }
            assert!(host.flush());
            let all = store.names();
            let spaces = [0, 1, 2].map(|number| Space::of(&names(number), secret.as_ref()));
            let counts = count(&all);
            assert_eq!((counts.len(), spaces[0]), (3, Space::default()));
            assert!(spaces.iter().all(|space| counts[&short(*space)] == all.len() / 3), "{counts:?}");
            // A host that has not named the namespace forgets it, too.
            let mut other = Host::new(&config, Arc::clone(&store), secret.clone());
            let answers: Vec<_> = other.tier.forget(&names(1)).iter().take(1).collect();
            assert_eq!(answers, [("store".to_owned(), Ok(()))]);
            let kept: Vec<_> = all.into_iter().filter(|name| name.space != short(spaces[1])).collect();
            assert_eq!(store.names(), kept);
            let mut host = tenants(&config, &store, secret.clone());
            assert_eq!([0, 1, 2].map(|number| serve(&mut host, number, 0..33)), [32, 0, 32]);
        }
    }
}

#[test]
fn open_and_queued_puts_of_a_forgotten_namespace_leave_no_record() {
    let store = Arc::new(faulty());
    store.gate.hold([false, false, true]);
    let mut host = tenants(&model(Groups::ONE, 1), &store, None);
    (0..2).for_each(|number| _ = host.serve(namespace(number), &text(0..33)));
    // Two puts wait in the store, and the others in the queue.
    host.turn();
    store.gate.wait_for(2);
    // The engine has pages that the tier has not seen.
    host.serve(namespace(1), &text(200..233));
    let answers = host.tier.forget(&names(1));
    store.gate.hold([false; 3]);
    assert_eq!(answers.recv().expect("an answer").1, Ok(()));
    assert!(host.flush());
    assert_eq!(count(&store.inner.names()), [([0; 8], 8)].into());
    // The engine still hits its own pages, and puts new ones from the next search on.
    assert_eq!(serve(&mut host, 1, 0..33), 32);
    serve(&mut host, 1, 300..333);
    assert!(host.flush());
    let counts = |own: usize| [([0; 8], 8), (short(Space::of(&names(1), None)), own)].into();
    assert_eq!(count(&store.inner.names()), counts(8));
    // The pages that were passed meanwhile come only with a confirmation.
    host.tier.confirm(7, &mut host.engine, namespace(1), &text(200..233));
    assert_eq!(host.reports(1), [(7, 0)]);
    assert_eq!(count(&store.inner.names()), counts(16));
}

#[test]
fn a_folder_forgets_a_namespace() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = || disk(folder.path());
    let cache = Cache::open(folder.path()).expect("it is ours");
    let listed = || {
        let mut names = Vec::new();
        cache.list(|file| names.push(file.name)).expect("no failure");
        count(&names)
    };
    let spaces = [0, 1, 2].map(|number| short(Space::of(&names(number), None)));
    let fill = || {
        let mut host = tenants(&model(Groups::ONE, 1), &open(), None);
        (0..3).for_each(|number| _ = serve(&mut host, number, 0..33));
        assert!(host.flush());
        assert_eq!(listed(), spaces.map(|space| (space, 8)).into());
        host
    };
    // By the tier, by the program without a server, and by the program while a server has the folder open.
    let mut host = fill();
    assert_eq!(host.tier.forget(&names(1)).recv().expect("an answer").1, Ok(()));
    assert_eq!(listed(), [(spaces[0], 8), (spaces[2], 8)].into());
    drop(fill());
    cache.forget([7; 8], Some(spaces[2])).expect("no failure");
    assert_eq!(listed(), [(spaces[0], 8), (spaces[1], 8)].into());
    let mut host = fill();
    cache.forget([7; 8], Some(spaces[0])).expect("no failure");
    host.engine.reset();
    // The server's index may still have the names; their reads are misses.
    assert_eq!([0, 1].map(|number| serve(&mut host, number, 0..33)), [0, 32]);
    assert!(host.flush());
    assert_eq!(listed(), spaces.map(|space| (space, 8)).into());
}
