//! The contract of backends with states. Layouts of states, by the shapes of published models, and the rejected ones.
//! Random programs check the engine's calls.

use std::sync::atomic::{AtomicBool, Ordering};

use super::seeds;
use kvarena::backend::Either;
use kvarena::config::EngineShape;
use kvarena::layout::{Groups, Layout, Reach, StatePart};
use kvarena::testkit::contract::check_states;
use kvarena::testkit::late::LateOptions;
use kvarena::testkit::posted::PostedOptions;
use kvarena::{Capacity, ConfigError, CpuOptions, EngineConfig, KvDtype, KvShape, PoolConfig};

#[test]
fn backends_keep_the_contract_of_states() {
    let cpu = || CpuOptions::with_threads(1);
    let report = check_states(cpu, seeds(20, 80));
    println!("{report}");
    assert!(report.steps > 10 * report.runs, "{report}");
    println!("{}", check_states(|| LateOptions(cpu()), seeds(4, 20)));
    println!("{}", check_states(|| PostedOptions(cpu()), seeds(4, 20)));
    let is_right = AtomicBool::new(false);
    let either = || match is_right.fetch_not(Ordering::Relaxed) {
        true => Either::Right(cpu()),
        false => Either::Left(cpu()),
    };
    println!("{}", check_states(either, seeds(4, 20)));
}

/// Returns a pool of `attention` layers with this shape in bf16, and `states` layers that keep these parts.
fn pool(attention: usize, states: usize, shape: KvShape, parts: &[(u32, u32)]) -> PoolConfig {
    let layers: Vec<u8> = (0..attention + states).map(|layer| u8::from(layer >= attention)).collect();
    let parts: Vec<_> = parts.iter().map(|&(heads, head_bytes)| StatePart { heads, head_bytes }).collect();
    let groups = Groups::new(&[Reach::All, Reach::State], &layers).and_then(|groups| groups.with_state(1, &parts));
    let (groups, layers) = (groups.expect("two groups"), layers.len() as u32);
    let capacity = Capacity::Pages(200);
    PoolConfig { layers, groups, shape, dtype: KvDtype::Bf16, capacity, ..PoolConfig::default() }
}

/// Sizes of published models: layers, K and V, parts of a state; the bytes of a layer's state, the least page size in
/// multiples of 16 tokens, the pages of a state, and its size in tokens of K and V.
#[test]
fn states_of_published_models_have_their_sizes() {
    let latent = KvShape::Latent { rank: 512, rope: 64 };
    for (name, config, bytes, page_size, pages, tokens) in [
        (
            "Qwen3-Next",
            pool(12, 36, KvShape::heads(2, 256), &[(32, 65_536), (16, 3_072)]),
            2_146_304_u64,
            96,
            36,
            3_144,
        ),
        ("Qwen3.5 9B", pool(8, 24, KvShape::heads(4, 256), &[(32, 65_536), (16, 3_072)]), 2_146_304, 80, 24, 1_572),
        ("Kimi Linear", pool(7, 20, latent, &[(32, 65_536), (32, 2_304)]), 2_170_880, 272, 20, 5_384),
        ("Granite 4", pool(4, 36, KvShape::heads(8, 128), &[(128, 32_768), (1, 50_688)]), 4_244_992, 272, 36, 9_328),
        ("Falcon-H1", pool(72, 72, KvShape::heads(4, 128), &[(32, 131_072), (1, 30_720)]), 4_225_024, 32, 72, 2_064),
        ("Jamba 1.5", pool(4, 28, KvShape::heads(8, 128), &[(8192, 64), (8192, 6)]), 573_440, 48, 28, 981),
        ("LFM2 8B", pool(6, 18, KvShape::heads(8, 64), &[(2048, 4)]), 8_192, 16, 1, 12),
    ] {
        assert_eq!(config.state_page_size(16), Ok(page_size), "{name}");
        let layout = PoolConfig { page_size, ..config }.layout().expect(name);
        let state = layout.state().expect("a group keeps a state");
        assert_eq!((state.pages, state.lane_bytes), (pages, bytes.next_multiple_of(256)), "{name}");
        assert_eq!((layout.tracks(), layout.tracks_of(1), layout.lanes_of(1)), (1, 0, state.lanes), "{name}");
        let part = config.groups.state_parts()[0];
        assert_eq!(state.offsets[..2], [0, u64::from(part.heads) * u64::from(part.head_bytes)], "{name}");
        let per_token = config.bytes_per_token().expect("a sound config");
        let states = u64::from(config.groups.layers_of(1)) * bytes;
        assert!((states / per_token).abs_diff(tokens) <= 1, "{name}: {} is not {tokens}", states / per_token);
        assert_eq!(layout.sequence_bytes(1, 1), u64::from(pages) * layout.page_bytes(), "{name}");
        // A smaller page is rejected, and the error names the least one.
        let min = match (PoolConfig { page_size: 1, ..config }).layout() {
            Err(ConfigError::StatePage { page_size: 1, min }) => min,
            Ok(_) => 1,
            Err(error) => panic!("{name}: {error}"),
        };
        assert_eq!(min.next_multiple_of(16), page_size, "{name}");
        assert!(PoolConfig { page_size: min, ..config }.layout().is_ok(), "{name}");
        let below = PoolConfig { page_size: min - 1, ..config }.layout().map(|_| ());
        let wanted = ConfigError::StatePage { page_size: min - 1, min };
        assert!(min == 1 || below == Err(wanted), "{name}");
    }
}

#[test]
fn ranks_share_the_heads_of_a_state() {
    let config = pool(12, 36, KvShape::heads(2, 256), &[(32, 65_536), (16, 3_072)]);
    for (tp_size, page_size) in [(1, 96), (2, 96), (4, 48), (8, 32)] {
        let config = PoolConfig { tp_size, ..config };
        assert_eq!(config.state_page_size(16), Ok(page_size), "{tp_size} ranks");
        let layout = PoolConfig { page_size, ..config }.layout().expect("it holds a state");
        assert_eq!(layout.state().expect("a state").lane_bytes, 2_146_304 / u64::from(tp_size));
    }
    let split = PoolConfig { tp_size: 3, page_size: 1024, ..config }.layout().map(|_| ());
    assert!(matches!(split, Err(ConfigError::HeadSplit { .. })), "{split:?}");
}

#[test]
fn unfit_states_are_refused() {
    let part = StatePart { heads: 1, head_bytes: 256 };
    let groups = Groups::new(&[Reach::All, Reach::Window(4), Reach::State], &[0, 1, 2]).expect("three groups");
    assert_eq!(groups.state_group(), Some(2));
    assert_eq!(groups.with_state(1, &[part]), Err(ConfigError::StateGroup { group: 1 }));
    assert_eq!(groups.with_state(7, &[part]), Err(ConfigError::StateGroup { group: 7 }));
    let limit = ConfigError::Limit { name: "parts of a state", value: 5, max: 4 };
    assert_eq!(groups.with_state(2, &[part; 5]), Err(limit));
    for parts in [&[][..], &[StatePart { heads: 0, ..part }], &[part, StatePart { head_bytes: 0, ..part }]] {
        assert_eq!(groups.with_state(2, parts), Err(ConfigError::Zero { name: "bytes of a state's part" }));
    }
    let second = Groups::new(&[Reach::All, Reach::State, Reach::State], &[0, 1, 2]);
    assert_eq!(second, Err(ConfigError::Reach { group: 2, reach: Reach::State }));
    let first = Groups::new(&[Reach::State], &[0]);
    assert_eq!(first, Err(ConfigError::Reach { group: 0, reach: Reach::State }));
    let without = PoolConfig { layers: 3, groups, ..PoolConfig::default() };
    assert_eq!(without.layout(), Err(ConfigError::StateGroup { group: 2 }));
    let with = groups.with_state(2, &[part]).expect("a part");
    let by_layer = PoolConfig { groups: with, layout: Layout::LayerFirst, ..without };
    assert_eq!(by_layer.layout(), Err(ConfigError::LayerFirst { group: 2 }));
    let vast = StatePart { heads: u32::MAX, head_bytes: u32::MAX };
    let vast = PoolConfig { groups: groups.with_state(2, &[vast; 4]).expect("four parts"), ..without };
    assert_eq!(vast.layout(), Err(ConfigError::Overflow { name: "bytes of a state" }));
    let large = StatePart { heads: 1, head_bytes: u32::MAX };
    let large = PoolConfig { groups: groups.with_state(2, &[large]).expect("a part"), ..without };
    assert!(matches!(large.state_page_size(8), Err(ConfigError::PageSize { max: 1024, .. })));
    assert_eq!(large.state_page_size(0), Err(ConfigError::Zero { name: "multiple" }));
    assert_eq!(PoolConfig::default().state_page_size(8), Ok(8));
}

#[test]
fn the_null_page_belongs_to_no_sequence() {
    let config = pool(1, 1, KvShape::heads(1, 128), &[(1, 256)]);
    let usable = |reserved_pages| {
        let config = EngineConfig { reserved_pages, ..EngineConfig::from(config) };
        config.shape().map(|shape: EngineShape| shape.usable_pages())
    };
    assert_eq!([0, 1, 5].map(usable), [Ok(199), Ok(199), Ok(195)]);
    let one = EngineConfig::from(PoolConfig { capacity: Capacity::Pages(1), ..config }).shape();
    assert_eq!(one.map(|_| ()), Err(ConfigError::Limit { name: "reserved_pages", value: 1, max: 0 }));
    let shape = EngineConfig::from(config).shape().expect("a sound config");
    // Two states: the one that a step reads, and the one that it writes.
    assert_eq!((shape.most_pages(0), shape.most_pages(1), shape.most_pages(17)), (0, 3, 4));
}
