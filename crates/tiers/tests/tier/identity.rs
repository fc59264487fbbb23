//! Engines whose pages have another meaning never read each other's records.

use std::sync::Arc;

use kvarena::hash::{Hashing, NamespaceNames};
use kvarena::id::Namespace;
use kvarena::layout::Groups;
use kvarena::{EngineConfig, KvDtype, PoolConfig};
use kvarena_tiers::identity::Identity;
use kvarena_tiers::miss::Miss;
use kvarena_tiers::name::{Fingerprint, Name};
use kvarena_tiers::testing::Memory;
use kvarena_tiers::tier::TierOptions;

use super::host::{Host, model, of, options, text};
use super::{ALL, memory};

const OTHER: Namespace = Namespace::new(1);

type Change = fn(&mut Identity<'_>);

/// Returns the fingerprint of a config, with a change of its identity.
fn fingerprint(config: &EngineConfig, change: Change) -> Fingerprint {
    let layout = config.pool.layout().expect("a valid pool");
    let (layers, heads) = (layout.layers(), layout.most_kv_heads());
    let mut identity = Identity {
        weights: [1; 32],
        hashing: config.hashing.expect("the model is hashed"),
        layout: &layout,
        scales: None,
        labels: None,
        rope: "theta 10000",
        layers: 0..layers,
        heads: 0..heads,
        heads_of_model: 2 * heads,
        numerics: "cpu",
    };
    change(&mut identity);
    identity.fingerprint()
}

fn host(config: &EngineConfig, fingerprint: Fingerprint, store: &Arc<Memory>) -> Host {
    Host::with(config, TierOptions { fingerprints: vec![fingerprint], ..options(vec![of(store, 2)]) })
}

/// Returns a store with the prompt's records under the base identity.
fn filled(config: &EngineConfig) -> Arc<Memory> {
    let store = memory();
    let mut first = host(config, fingerprint(config, |_| ()), &store);
    first.serve(ALL, &text(0..33));
    assert!(first.flush());
    assert_eq!(store.names().len(), 8);
    store
}

#[test]
fn another_identity_hits_nothing() {
    let base = model(Groups::ONE, 1);
    let pool = |change: fn(&mut PoolConfig)| {
        let mut config = base;
        change(&mut config.pool);
        config
    };
    let same: Change = |_| ();
    let cases: [(&str, EngineConfig, Change); 9] = [
        ("weights", base, |identity| identity.weights = [2; 32]),
        ("heads of another rank", base, |identity| identity.heads = 1..2),
        ("number of ranks", base, |identity| identity.heads_of_model = 4),
        ("layers of another rank", base, |identity| identity.layers = 2..4),
        ("rotary embedding", base, |identity| identity.rope = "theta 1000000"),
        ("kernels", base, |identity| identity.numerics = "cuda"),
        ("hash recipe", EngineConfig { hashing: Some(Hashing::VllmSha256Cbor), ..base }, same),
        ("page size", pool(|pool| pool.page_size = 8), same),
        ("dtype", pool(|pool| pool.dtype = KvDtype::F16), same),
    ];
    let store = filled(&base);
    for (name, config, change) in cases {
        let mut other = host(&config, fingerprint(&config, change), &store);
        assert_eq!(other.find(ALL, &text(0..33)), 0, "{name}");
        assert_eq!(other.tier.stats()[0].found, 0, "{name}");
        assert!(other.tier.stats()[0].asked > 0, "{name}");
    }
    assert_eq!(host(&base, fingerprint(&base, same), &store).find(ALL, &text(0..33)), 8);
}

#[test]
fn another_adapter_or_salt_hits_nothing() {
    let base = model(Groups::ONE, 1);
    let store = filled(&base);
    let some = || Some("name".to_owned());
    let adapter = NamespaceNames { lora: some(), ..NamespaceNames::default() };
    let salted = NamespaceNames { salt: some(), ..NamespaceNames::default() };
    let both = NamespaceNames { lora: some(), ..salted.clone() };
    let other = NamespaceNames { salt: Some("other".to_owned()), ..NamespaceNames::default() };
    for names in [adapter, salted, both, other] {
        let new = || {
            let mut host = host(&base, fingerprint(&base, |_| ()), &store);
            host.engine.name_namespace(OTHER, names.clone()).expect("the name is free");
            host
        };
        let mut host = new();
        assert_eq!(host.find(OTHER, &text(0..33)), 0, "{names:?}");
        // From then on, the namespace has its own records.
        host.serve(OTHER, &text(0..33));
        assert!(host.flush());
        assert_eq!(new().find(OTHER, &text(0..33)), 8, "{names:?}");
    }
    assert_eq!(store.names().len(), 5 * 8);
}

/// Whoever can rename records cannot make them those of another model.
#[test]
fn records_under_the_name_of_another_identity_are_misses() {
    let base = model(Groups::ONE, 1);
    let changes: [fn(&mut Identity<'_>); 3] =
        [|identity| identity.weights = [2; 32], |identity| identity.heads = 1..2, |identity| identity.layers = 2..4];
    for change in changes {
        let (store, fingerprint) = (filled(&base), fingerprint(&base, change));
        for name in store.names() {
            let forged = Name { fingerprint: fingerprint.0[..8].try_into().expect("8 bytes"), ..name };
            store.set(forged, store.record(&name).expect("it is stored"));
        }
        let mut other = host(&base, fingerprint, &store);
        assert_eq!(other.find(ALL, &text(0..33)), 0);
        assert_eq!(other.misses(), [(Miss::Fingerprint, 8)]);
        assert_eq!(other.serve(ALL, &text(0..33)), 0);
    }
}
