//! Payloads: `decode` reads those of vLLM and SGLang, `dynamo-kv-router` reads ours, and `decode` rejects invalid ones.

#[path = "../examples/fleet/host.rs"]
mod host;
#[path = "../examples/fleet/router.rs"]
mod router;

use dynamo_kv_router::protocols::WorkerWithDpRank;
use dynamo_kv_router::zmq_wire::{RawKvEvent, ZmqEventNormalizer, decode_event_batch};
use host::{Host, HostConfig};
use kvarena::hash::{Hashing, NamespaceNames};
use kvarena::layout::{Groups, Layout, Reach, StatePart};
use kvarena::{Capacity, Engine, EngineConfig, Extend, Namespace, Null, PoolConfig, StepScratch, TokenId};
use kvarena_events::decode::{ErrorKind, Message, StoredPages, WireError, WireEvent, decode};
use kvarena_events::encode::Batch;
use kvarena_events::msgpack::Malformed;
use router::Router;
use serde::Serialize;

/// `VLLM`, `SGLANG` and `REMOVED` are payloads that msgspec encoded with the event types of vLLM 0.33.0 and SGLang
/// 0.5.23. dynamo-kv-router 1.6.1 decodes them.
const VLLM: &str = "\
    93cb3ff800000000000091de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfdabc1234\
    567890abb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f69\
    64c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f6361636865\
    5f737065635f6b696e64ae66756c6c5f617474656e74696f6e00";
const SGLANG: &str = "\
    93cb3ff80000000000009187a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391f9b170617265\
    6e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756d\
    a347505500";
const REMOVED: &str = "93cb3ff80000000000009284a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573920506a66d\
    656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400";

fn bytes(hexadecimal: &str) -> Vec<u8> {
    let digits: Vec<u8> = hexadecimal.bytes().filter(|digit| !digit.is_ascii_whitespace()).collect();
    let byte = |pair: &[u8]| {
        let text = std::str::from_utf8(pair).expect("digits");
        u8::from_str_radix(text, 16).expect("two digits")
    };
    digits.chunks(2).map(byte).collect()
}

fn four_tokens(hash: u64) -> StoredPages {
    StoredPages {
        hashes: vec![hash],
        tokens: vec![1, 2, 3, 4],
        page_size: 4,
        medium: Some("GPU".to_owned()),
        ..StoredPages::default()
    }
}

#[test]
fn payloads_of_other_engines_are_read() {
    let read = |text: &str| decode(&bytes(text)).expect("the payload is valid");
    let message = |events| Message { seconds: 1.5, events, rank: Some(0) };
    assert_eq!(read(VLLM), message(vec![WireEvent::Stored(four_tokens(0xdabc_1234_5678_90ab))]));
    assert_eq!(read(SGLANG), message(vec![WireEvent::Stored(four_tokens((-7_i64).cast_unsigned()))]));
    let removed = WireEvent::Removed { hashes: vec![5, 6], medium: Some("GPU".to_owned()), group: 0 };
    assert_eq!(read(REMOVED), message(vec![removed, WireEvent::Cleared]));
}

/// Returns the payload of one event in array form, in an envelope without a rank.
fn array(event: impl Serialize) -> Vec<u8> {
    rmp_serde::to_vec(&(1.5, [event], ())).expect("a write to memory succeeds")
}

#[test]
fn events_of_older_engines_are_read() {
    let stored = array(("BlockStored", [7, 8], 6, [1, 2, 3, 4], 2, (), "CPU", "adapter"));
    let want = StoredPages {
        hashes: vec![7, 8],
        parent: Some(6),
        tokens: vec![1, 2, 3, 4],
        page_size: 2,
        lora: Some("adapter".to_owned()),
        medium: Some("CPU".to_owned()),
        salt: None,
        group: 0,
    };
    let message = decode(&stored).expect("the payload is valid");
    assert_eq!(message, Message { seconds: 1.5, events: vec![WireEvent::Stored(want)], rank: None });
    let removed = |group| WireEvent::Removed { hashes: vec![7], medium: Some("GPU".to_owned()), group };
    for (payload, want) in [
        (array(("AllBlocksCleared",)), WireEvent::Cleared),
        (array(("BlockRemoved", [7], "GPU")), removed(0)),
        (array(("BlockRemoved", [7], "GPU", 2)), removed(2)),
    ] {
        assert_eq!(decode(&payload).expect("the payload is valid").events, [want]);
    }
    let of_a_group = array(("BlockStored", [7], (), [1], 1, (), "GPU", (), (), 3));
    let message = decode(&of_a_group).expect("the payload is valid");
    assert!(matches!(&message.events[..], [WireEvent::Stored(StoredPages { group: 3, .. })]), "{message:?}");
}

/// Returns the payload of a reset and of one prompt, with the given hashing. The prompt's namespace has names if the
/// hashing uses them.
fn payload_of(hashing: Hashing) -> (Vec<u8>, NamespaceNames) {
    let config = HostConfig { page_size: 4, pages: 8, hashing: Some(hashing), event_pages: 64 };
    let mut host = Host::new(config).expect("the config is right");
    let mut names = NamespaceNames::default();
    let mut namespace = Namespace::default();
    if hashing.uses_names() {
        namespace = Namespace::new(3);
        names = NamespaceNames {
            lora: Some("adapter".to_owned()),
            lora_path: Some("/adapter".to_owned()),
            salt: Some("red".to_owned()),
        };
        host.engine.name_namespace(namespace, names.clone()).expect("the names are unused");
    }
    for from in [0, 100] {
        let prompt: Vec<TokenId> = (from..from + 25).map(TokenId::new).collect();
        host.serve(namespace, &prompt, &[]).expect("it fits");
    }
    host.engine.reset();
    let prompt: Vec<TokenId> = (0..25).map(TokenId::new).collect();
    host.serve(namespace, &prompt, &[]).expect("it fits");
    let (payload, count) = host.take_payload(2.5).expect("there are events");
    assert_eq!(count, 2, "cleared, then stored");
    (payload, names)
}

#[test]
fn the_published_parser_reads_what_is_written() {
    for &hashing in Hashing::ALL {
        let (payload, names) = payload_of(hashing);
        let ours = decode(&payload).expect("it is right");
        let [WireEvent::Cleared, WireEvent::Stored(stored)] = &ours.events[..] else {
            panic!("{ours:?}");
        };
        let tokens: Vec<TokenId> = (0..24).map(TokenId::new).collect();
        let chain = hashing.chain(&names, &tokens, 4);
        let ids: Vec<u64> = chain.into_iter().map(|hash| hashing.event_id(hash)).collect();
        assert_eq!(stored.hashes, ids);
        assert_eq!((&stored.lora, &stored.salt), (&names.lora, &names.salt));

        let theirs = decode_event_batch(&payload).expect("the published parser accepts it");
        assert_eq!((theirs.ts, theirs.data_parallel_rank), (2.5, Some(0)));
        let [RawKvEvent::AllBlocksCleared { .. }, stored] = &theirs.events[..] else {
            panic!("{theirs:?}");
        };
        let RawKvEvent::BlockStored {
            block_hashes,
            parent_block_hash,
            token_ids,
            block_size,
            medium,
            lora_name,
            cache_namespace,
            ..
        } = stored
        else {
            panic!("{stored:?}");
        };
        let theirs: Vec<u64> = block_hashes.iter().map(|hash| hash.into_u64()).collect();
        assert_eq!(theirs, ids);
        assert!(parent_block_hash.is_none());
        assert_eq!(token_ids[..], *TokenId::as_raw(&tokens));
        assert_eq!((*block_size, medium.as_deref()), (4, Some("GPU")));
        assert_eq!((lora_name, cache_namespace), (&names.lora, &names.salt));
    }
}

/// A page is saved, leaves the device and comes back.
#[test]
fn swap_memory_has_the_medium_name_of_each_engine() {
    for &hashing in Hashing::ALL {
        let host = if hashing == Hashing::SglangSha256 { "CPU_PINNED" } else { "CPU" };
        let (capacity, swap_pages) = (Capacity::Pages(2), 4);
        let pool = PoolConfig { page_size: 4, capacity, swap_pages, ..PoolConfig::default() };
        let config = EngineConfig { hashing: Some(hashing), event_pages: 64, ..pool.into() };
        let mut engine = Engine::new(config, Null).expect("the config is right");
        let (mut batch, mut scratch) = (Batch::new(hashing, 4), StepScratch::new());
        let mut changes = Vec::new();
        for (own, ahead) in [(1, 1), (2, 0), (1, 0)] {
            let prompt = [TokenId::new(own); 5];
            let seq = engine.admit(Namespace::default(), &prompt, 0).expect("there is room");
            let len = engine.extend_max(seq).expect("it is live");
            let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }]);
            let step = plan.expect("there is room").step();
            engine.commit(step).expect("it is open");
            engine.complete(step).expect("it is committed");
            engine.finish(seq).expect("it is live");
            engine.save_ahead(ahead).expect("it cannot fail");
            engine.drain_events(|event| batch.push(event));
            let payload = batch.take(1.0, 0);
            assert!(decode_event_batch(&payload).is_ok(), "the published parser accepts it");
            let events = decode(&payload).expect("it is right").events;
            changes.push(events.into_iter().map(|event| match event {
                WireEvent::Stored(stored) => ('+', stored.medium.expect("it is named")),
                WireEvent::Removed { medium, .. } => ('-', medium.expect("it is named")),
                WireEvent::Cleared => panic!("nothing was cleared"),
            }));
        }
        let changes: Vec<Vec<_>> = changes.into_iter().map(Iterator::collect).collect();
        let [of_gpu, of_swap] = ["GPU", host].map(|medium| move |change| (change, medium.to_owned()));
        assert_eq!(changes[0], [of_gpu('+'), of_swap('+')], "{hashing:?}");
        assert_eq!(changes[1], [of_gpu('-'), of_gpu('+')], "{hashing:?}");
        let back = [of_gpu('+'), of_swap('-'), of_swap('+'), of_gpu('-')];
        assert_eq!(changes[2], back, "{hashing:?}");
    }
}

/// The cells of a window and of a state have the keys of their groups. The published router ignores them, so that its
/// index has the pages of group 0 alone.
#[test]
fn cells_have_the_keys_of_their_groups() {
    let groups = Groups::new(&[Reach::All, Reach::Window(6), Reach::State], &[0, 1, 2]).expect("three groups");
    let groups = groups.with_state(2, &[StatePart { heads: 1, head_bytes: 64 }]).expect("it keeps a state");
    let (page_size, capacity) = (4, Capacity::Pages(40));
    let pool =
        PoolConfig { layers: 3, groups, page_size, capacity, layout: Layout::PageFirst, ..PoolConfig::default() };
    let hashing = Some(Hashing::Dynamo);
    let config = EngineConfig { hashing, event_pages: 64, event_cells: true, state_margin: 0, ..pool.into() };
    let mut engine = Engine::new(config, Null).expect("the config is right");
    let (mut batch, mut scratch) = (Batch::new(Hashing::Dynamo, 4).with_groups(groups), StepScratch::new());
    let prompt: Vec<TokenId> = (0..22).map(TokenId::new).collect();
    let seq = engine.admit(Namespace::default(), &prompt, 22).expect("there is room");
    while engine.cached_len(seq).expect("it is live") < 22 {
        let len = engine.next_len(seq, 22).expect("it is live");
        let step = engine.plan_batch(&mut scratch, &[Extend { seq, len }]).expect("it is promised").step();
        engine.commit(step).expect("it is open");
        engine.complete(step).expect("it is committed");
    }
    engine.finish(seq).expect("it is live");
    engine.drain_events(|event| batch.push(event));
    let stored = batch.take(1.0, 0);
    let chain = Hashing::Dynamo.chain(&NamespaceNames::default(), &prompt, 4);
    let chain: Vec<u64> = chain.into_iter().map(|hash| Hashing::Dynamo.event_id(hash)).collect();
    let events = decode(&stored).expect("it is right").events;
    let of_group = |group| {
        let stored = events.iter().filter_map(|event| match event {
            WireEvent::Stored(stored) if stored.group == group => Some(stored.hashes.clone()),
            _ => None,
        });
        stored.collect::<Vec<_>>().concat()
    };
    // The prompt ends in page 5, so that 5 pages are whole. The next token, 20, reads the window from token 15 on.
    assert_eq!(of_group(0), chain[..5]);
    assert_eq!(of_group(1), chain[3..5]);
    assert_eq!(of_group(2), chain[4..5]);
    let text = String::from_utf8_lossy(&stored);
    for key in ["full_attention", "sliding_window", "kv_cache_spec_sliding_window", "mamba"] {
        assert!(text.contains(key), "{key}");
    }
    let mut normalizer = ZmqEventNormalizer::new(4);
    let mut kept = |payload: &[u8]| {
        let batch = decode_event_batch(payload).expect("the published parser accepts it");
        let worker = || WorkerWithDpRank::new(1, 0);
        let events = batch.events.into_iter().map(|event| normalizer.normalize(event, 1, worker()));
        let (kept, dropped): (Vec<_>, Vec<_>) = events.partition(Option::is_some);
        (kept.len(), dropped.len())
    };
    let (pages, cells) = kept(&stored);
    assert!(pages > 0 && cells > 0, "{pages} events of pages, {cells} of cells");
    // A longer prompt evicts cells and pages.
    let other: Vec<TokenId> = (100..172).map(TokenId::new).collect();
    let seq = engine.admit(Namespace::default(), &other, 0).expect("there is room");
    let len = engine.next_len(seq, 72).expect("it is live");
    let step = engine.plan_batch(&mut scratch, &[Extend { seq, len }]).expect("pages are evicted").step();
    engine.drain_events(|event| batch.push(event));
    let removed = decode(&batch.take(2.0, 0)).expect("it is right").events;
    let groups = removed.iter().map(|event| match event {
        WireEvent::Removed { hashes, group, .. } => (*group, hashes.len()),
        other => panic!("{other:?}"),
    });
    let groups: Vec<_> = groups.collect();
    assert!(groups.iter().any(|&(group, _)| group > 0), "{groups:?}");
    engine.abort(step).expect("it is open");
}

#[test]
fn errors_contain_the_offset() {
    let good = bytes(VLLM);
    let refused = |payload: &[u8]| {
        let error = decode(payload).expect_err("it is wrong");
        (error.at, error.kind)
    };
    // Envelopes of two items, the older form without a rank, are rejected.
    let mut two = good.clone();
    two[0] = 0x92;
    assert_eq!(refused(&two), (0, ErrorKind::Envelope { len: 2 }));
    assert_eq!(refused(&[0xc0]), (0, ErrorKind::Type { expected: "an array", found: "nil" }));
    // An unknown type is an error at the offset of its name.
    let at = good.windows(11).position(|name| name == b"BlockStored").expect("it is there") - 1;
    let mut unknown = good.clone();
    unknown[at + 1..at + 12].copy_from_slice(b"BlockForged");
    assert_eq!(refused(&unknown), (at, ErrorKind::EventType { name: "BlockForged".to_owned() }));
    // A hash of 7 bytes is invalid; a hash of 32 bytes is vLLM's digest.
    let at = good.iter().position(|&byte| byte == 0xcf).expect("the hash");
    let hash = |digest: &[u8]| {
        let mut payload = good[..at].to_vec();
        rmp::encode::write_bin(&mut payload, digest).expect("a write to memory succeeds");
        payload.extend_from_slice(&good[at + 9..]);
        payload
    };
    assert_eq!(refused(&hash(&[1; 7])), (at, ErrorKind::HashWidth { bytes: 7 }));
    let text = decode(&hash(&[1; 8])).expect_err("it is no digest").to_string();
    assert!(text.ends_with("a hash of 8 bytes, not of 32"), "{text}");
    let digest: Vec<u8> = (0..32).collect();
    let message = decode(&hash(&digest)).expect("a digest is a hash");
    assert_eq!(message.events, [WireEvent::Stored(four_tokens(0x1819_1a1b_1c1d_1e1f))]);
    // The four tokens do not fill one page exactly.
    let size = good.windows(10).position(|name| name == b"block_size").expect("it is there") + 10;
    let tokens = good.windows(9).position(|name| name == b"token_ids").expect("it is there") + 9;
    for page_size in [3, 5, 0] {
        let mut odd = good.clone();
        odd[size] = page_size;
        let kind = ErrorKind::TokenCount { tokens: 4, pages: 1, page_size: page_size.into() };
        assert_eq!(refused(&odd), (tokens, kind));
    }
    // Missing fields, truncated bytes and trailing bytes are errors.
    let mut nameless = good.clone();
    nameless[size - 1] = b'?';
    let (_, kind) = refused(&nameless);
    assert_eq!(kind, ErrorKind::Missing { field: "block_size" });
    let mut longer = good.clone();
    longer.push(0);
    assert_eq!(refused(&longer), (good.len(), ErrorKind::Trailing { bytes: 1 }));
    for len in 0..good.len() {
        let (at, kind) = refused(&good[..len]);
        assert_eq!(kind, ErrorKind::Malformed(Malformed::Short));
        assert!(at <= len);
    }
    let false_length = [0x93, 0x00, 0xdd, 0xff, 0xff, 0xff, 0xff];
    assert_eq!(refused(&false_length), (7, ErrorKind::Malformed(Malformed::Short)));
    let text = decode(&two).expect_err("it is wrong").to_string();
    assert_eq!(text, "byte 0: a payload of 2 items, not of time, events and rank");
}

#[test]
fn no_bytes_cause_a_panic() {
    let good = [VLLM, SGLANG, REMOVED].map(bytes);
    let mut random = 1_u64;
    for round in 0..200_000_usize {
        let mut bytes = good[round % 3].clone();
        for _ in 0..1 + round % 4 {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            let at = (random >> 33) as usize % bytes.len();
            bytes[at] = (random >> 24) as u8;
        }
        if let Err(error) = decode(&bytes) {
            assert!(error.at <= bytes.len());
        }
    }
}

#[test]
fn a_wrong_payload_changes_nothing() {
    let (payload, names) = payload_of(Hashing::Dynamo);
    let prompt: Vec<TokenId> = (0..24).map(TokenId::new).collect();
    let mut router = Router::new(4);
    // A valid event precedes the truncation.
    let refused = router.check_and_apply(1, &payload[..payload.len() - 1]);
    assert!(refused.is_err_and(|error| error.is::<WireError>()));
    assert_eq!((router.pages(), router.overlap(&names, &prompt)), (0, vec![]));
    router.check_and_apply(1, &payload).expect("it is right");
    assert_eq!((router.pages(), router.overlap(&names, &prompt)), (6, vec![(1, 6)]));
    assert_eq!(router.overlap(&NamespaceNames::default(), &prompt), []);
}
