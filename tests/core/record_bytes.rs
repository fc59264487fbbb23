//! Shapes, copies and compactions survive a round trip through bytes, and no bytes make a reader or a backend panic.

use kvarena::backend::{Backend, OpenBackend};
use kvarena::config::{EngineShape, PrefixMode, ShapeBytesError};
use kvarena::hash::{HashSeed, Hashing};
use kvarena::id::RowId;
use kvarena::layout::{Groups, Layout, Reach, Scaling, StatePart, TableShape};
use kvarena::plan::{Compaction, PageCopy, PlanBytesError};
use kvarena::testkit::rng::Rng;
use kvarena::*;

fn seed(text: &str) -> Hashing {
    Hashing::VllmSha256CborSeeded(HashSeed::new(text).expect("the text is short"))
}

/// Returns a random config, which is usually valid.
fn random_config(rng: &mut Rng) -> EngineConfig {
    let dtypes = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3];
    let dtype = dtypes[rng.below(4) as usize];
    let heads = KvShape::heads(1 << rng.below(5), rng.within(1, 300) as u32);
    let latent = KvShape::Latent { rank: rng.within(1, 600) as u32, rope: rng.below(80) as u32 };
    let by_token = dtype == KvDtype::Fp8E4M3 && rng.one_in(2);
    let all = Hashing::ALL;
    let hashing = match rng.below(4) {
        0 => None,
        1 => Some(seed(["", "0", "4294967295", "0123456789012345678901234567890"][rng.below(4) as usize])),
        _ => Some(all[rng.below(all.len() as u64) as usize]),
    };
    let layers = rng.within(1, 80) as u32;
    let pages = rng.within(1, 100_000) as u32;
    let pool = PoolConfig {
        layers,
        groups: if rng.one_in(2) { Groups::ONE } else { random_groups(rng, layers) },
        shape: if rng.one_in(4) { latent } else { heads },
        dtype,
        scaling: if by_token { Scaling::ByToken } else { Scaling::Static },
        label_channels: if rng.one_in(3) { 1 } else { 0 },
        page_size: rng.within(1, 1024) as u32,
        capacity: Capacity::Pages(pages),
        swap_pages: rng.below(1 << 20) as u32,
        stage_pages: rng.below(100) as u32,
        extra_bytes: if rng.one_in(4) { rng.below(1 << 20) as u32 } else { 0 },
        layout: if rng.one_in(2) { Layout::LayerFirst } else { Layout::PageFirst },
        tp_size: 1 << rng.below(3),
        tp_rank: 0,
    };
    EngineConfig {
        pool,
        prefix: if rng.one_in(4) { PrefixMode::None } else { PrefixMode::Radix },
        hashing,
        event_pages: if hashing.is_some() { rng.below(1000) as u32 } else { 0 },
        event_cells: rng.one_in(2),
        record_pages: if pool.groups.count() == 1 { 1 << rng.below(7) } else { 1 },
        max_sequences: rng.within(1, 500) as u32,
        max_sequence_len: rng.within(1, 1 << 20) as u32,
        max_tokens: rng.within(1, 1 << 22),
        max_steps: rng.within(1, 10) as u32,
        max_step_tokens: rng.within(1, u32::MAX.into()) as u32,
        promise_ahead: rng.bits() as u32,
        state_margin: rng.bits() as u32,
        state_gap: rng.bits() as u32,
        keep_used_states: rng.one_in(2),
        reserved_pages: if rng.one_in(2) { 0 } else { rng.below(pages.into()) as u32 },
        wide_slots: rng.one_in(2),
        prefault: rng.one_in(2),
    }
}

/// Returns random groups of `layers` layers, or one group if the drawn groups are invalid.
fn random_groups(rng: &mut Rng, layers: u32) -> Groups {
    let size = rng.within(1, 5000) as u32;
    let last = rng.pick(&[Reach::State, Reach::All, Reach::Window(1)]);
    let mut reaches = [Reach::All, Reach::Window(size), last, Reach::Chunk(1 << rng.below(14))];
    reaches[2..].rotate_left(rng.below(2) as usize);
    let count = rng.within(2, 4);
    reaches[1..count as usize].sort_by_key(|reach| *reach == Reach::All);
    let of_layers: Vec<u8> = (0..layers).map(|_| rng.below(count) as u8).collect();
    let mut groups = Groups::new(&reaches[..count as usize], &of_layers).unwrap_or_default();
    if let Some(group) = groups.state_group() {
        let part = |_| StatePart { heads: rng.within(1, 9) as u32, head_bytes: rng.within(1, 3000) as u32 };
        let parts: Vec<_> = (0..1 + size as usize % 4).map(part).collect();
        groups = groups.with_state(group, &parts).expect("valid parts");
    }
    let state = groups.state_group();
    for group in (1..groups.count()).filter(|&group| state != Some(group)) {
        let shape = match rng.below(4) {
            0 => KvShape::heads(rng.within(1, 9) as u32, rng.within(1, 600) as u32),
            1 => KvShape::Latent { rank: rng.within(1, 600) as u32, rope: rng.within(1, 70) as u32 },
            _ => continue,
        };
        let dtype = rng.pick(&[KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3]);
        groups = groups.with_shape(group, shape, dtype).expect("the group exists");
    }
    groups
}

fn random_shapes(rng: &mut Rng, count: usize) -> Vec<EngineShape> {
    std::iter::repeat_with(|| random_config(rng).shape()).flatten().take(count).collect()
}

#[test]
fn shapes_survive_the_way_through_bytes() {
    for shape in random_shapes(&mut Rng::new(1), 3000) {
        let mut shifted = vec![0];
        shifted.extend_from_slice(&shape.to_bytes());
        assert_eq!(EngineShape::from_bytes(&shifted[1..]), Ok(shape));
    }
    // Extreme values of `max_tokens`, for one sequence, and the most layers that several groups can have.
    let one = |max_tokens| {
        let pool = PoolConfig { capacity: Capacity::Pages(u32::MAX - 1), ..Default::default() };
        EngineConfig { max_tokens, max_sequences: 1, max_sequence_len: u32::MAX, ..pool.into() }
    };
    let of: Vec<u8> = (0..=255).map(|layer| layer % 2).collect();
    let groups = Groups::new(&[Reach::All, Reach::Window(7)], &of).expect("256 layers are not too many");
    let layered = PoolConfig { layers: 256, groups, ..Default::default() };
    for config in [one(1), one(u64::from(u32::MAX) / 2), layered.into()] {
        let shape = config.shape().expect("it is a shape");
        assert_eq!(EngineShape::from_bytes(&shape.to_bytes()), Ok(shape));
    }
}

/// Each rank of a model opens its pool with the same bytes.
#[test]
fn ranks_have_one_shape() {
    let bytes = |tp_rank| {
        let pool = PoolConfig { shape: KvShape::heads(8, 64), tp_size: 4, tp_rank, ..Default::default() };
        EngineConfig::from(pool).shape().expect("it is a shape").to_bytes()
    };
    assert!((1..4).all(|rank| bytes(rank) == bytes(0)));
}

#[test]
fn the_byte_forms_are_as_documented() {
    let pool = PoolConfig {
        layers: 36,
        shape: KvShape::heads(8, 128),
        dtype: KvDtype::Bf16,
        label_channels: 7,
        capacity: Capacity::Pages(300),
        swap_pages: 1000,
        stage_pages: 20,
        tp_size: 2,
        ..Default::default()
    };
    let config = EngineConfig {
        hashing: Some(seed("42")),
        event_pages: 50,
        record_pages: 4,
        max_sequences: 3,
        max_sequence_len: 4000,
        max_tokens: 5000,
        max_steps: 2,
        max_step_tokens: 48,
        promise_ahead: 100,
        reserved_pages: 5,
        wide_slots: true,
        ..pool.into()
    };
    let text = u64::from_le_bytes([2, b'4', b'2', 0, 0, 0, 0, 0]);
    let words = [
        u64::from_le_bytes(*b"kvshap04"),
        36,
        0,
        4,
        128,
        2,
        0,
        7,
        16,
        300,
        1, // the pool
        3,
        4,
        64,
        4 + 3,
        4000,
        2,
        0,
        50,
        1,
        5,
        text,
        0,
        0,
        0,
        100, // tokens ahead
        1,   // one group of layers
    ];
    // Swap pages, staged pages, the most tokens of a step; after the groups' own shapes, reserved pages and wide slots.
    let words = words.into_iter().chain([0; 11]).chain([1000, 20, 48]).chain([0; 6]).chain([5, 1]);
    // No parts of a state; the margin and the gap of its marks, whether used states keep their age, the host's bytes,
    // and the pages of a record.
    let words = words.chain([0; 4]).chain([128, 0, 0, 0, 4]);
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    assert_eq!(config.shape().expect("it is a shape").to_bytes()[..], bytes);

    let copies = [(1, 2), (0x0102_0304, 0)];
    let copies = copies.map(|(source, target)| PageCopy { source: PageId::new(source), target: PageId::new(target) });
    let bytes = b"kvcopy01\x02\0\0\0\0\0\0\0\x01\0\0\0\x02\0\0\0\x04\x03\x02\x01\0\0\0\0";
    assert_eq!(PageCopy::list_to_bytes(&copies), bytes);
    let compaction = Compaction { row: RowId::new(3), first: 9, keep: 0b1011 << 60 };
    let bytes = b"kvmove01\x01\0\0\0\0\0\0\0\x03\0\0\0\x09\0\0\0\0\0\0\0\0\0\0\xb0";
    assert_eq!(Compaction::list_to_bytes(&[compaction]), bytes);
}

/// If bytes are read as a shape, writing the shape returns the same bytes. No bytes make the reader panic.
#[test]
fn garbled_shapes_are_refused() {
    let mut rng = Rng::new(2);
    let (mut read, mut fields, mut configs, mut mixed) = (0, 0, 0, 0);
    let mut check = |bytes: &[u8]| match EngineShape::from_bytes(bytes) {
        Ok(shape) => {
            read += 1;
            assert_eq!(shape.to_bytes()[..], *bytes);
        }
        Err(ShapeBytesError::Field { .. }) => fields += 1,
        Err(ShapeBytesError::Config(_)) => configs += 1,
        Err(ShapeBytesError::Mixed) => mixed += 1,
        Err(error) => panic!("{error}"),
    };
    let ends = [0, 1, 2, 31, 1 << 10, 1 << 16, 1 << 30, u32::MAX.into(), 1 << 32, 1 << 63, u64::MAX];
    for shape in random_shapes(&mut rng, 300) {
        let bytes = shape.to_bytes();
        for at in 8..bytes.len() {
            let mut off = bytes;
            off[at] ^= 1 << rng.below(8);
            check(&off);
        }
        for _ in 0..100 {
            let mut off = bytes;
            for _ in 0..rng.within(1, 4) {
                let at = 8 * rng.within(1, EngineShape::BYTES as u64 / 8 - 1) as usize;
                let value = match rng.below(3) {
                    0 => rng.bits(),
                    1 => rng.below(200),
                    _ => ends[rng.below(ends.len() as u64) as usize],
                };
                off[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            check(&off);
        }
        for at in 0..8 {
            let mut off = bytes;
            off[at] ^= 1 << rng.below(8);
            assert_eq!(EngineShape::from_bytes(&off), Err(ShapeBytesError::Magic));
        }
    }
    assert!(read.min(fields).min(configs).min(mixed) > 1000, "{read} {fields} {configs} {mixed}");
}

#[test]
fn wrong_shapes_are_refused_by_name() {
    let config = EngineConfig { hashing: Some(seed("7")), ..EngineConfig::default() };
    let bytes = config.shape().expect("it is a shape").to_bytes();
    let with = |word: usize, value: u64| {
        let mut off = bytes;
        off[word * 8..][..8].copy_from_slice(&value.to_le_bytes());
        EngineShape::from_bytes(&off).map(|_| ())
    };
    let field = |name, value| Err(ShapeBytesError::Field { name, value });
    // The upper half of a word.
    assert_eq!(with(18, 2 << 32), field("event_cells", 2));
    assert_eq!(with(18, 1 << 32 | 3), Err(ShapeBytesError::Mixed), "there are no groups of limited reach");
    for (word, name, value) in [
        (1, "layers", 1 << 32),
        (2, "shape", 2),
        (3, "shape sizes", u64::MAX),
        (5, "dtype", 4),
        (6, "scaling", 2),
        (10, "layout", 2),
        (17, "prefix", 2),
        (19, "prefault", 2),
        (20, "hashing", 7),
        (20, "hashing", 1 << 32 | 5),
    ] {
        assert_eq!(with(word, value), field(name, value));
    }
    // A seed longer than its field, one with bytes after its end, one that is not text, and one of a recipe without a
    // seed.
    assert_eq!(with(21, 32), field("hashing", 5));
    assert_eq!(with(22, 1), field("hashing", 5));
    assert_eq!(with(21, 0xff01), field("hashing", 5));
    assert_eq!(with(20, 4), field("hashing", 4));
    assert_eq!(with(1, 0), Err(ShapeBytesError::Config(ConfigError::Zero { name: "layers" })));
    assert_eq!(with(26, 5), field("groups", 5));
    assert_eq!(with(26, 1 << 32 | 2), field("groups", 1 << 32 | 2));
    assert_eq!(with(41, 2), field("group shape", 2));
    assert_eq!(with(42, 1), field("group shape", 0));
    assert_eq!(with(45, 1 | 2 << 3), field("group shape", 1 | 2 << 3));
    let no_group = ConfigError::GroupShape { group: 2, groups: 1 };
    assert_eq!(with(43, 1), Err(ShapeBytesError::Config(no_group)));
    for (word, value) in [(11, u32::MAX.into()), (13, u64::MAX), (14, 0), (12, 1), (15, 1 << 20), (27, 8), (37, 1)] {
        assert_eq!(with(word, value), Err(ShapeBytesError::Mixed), "word {word} = {value}");
    }
    let none = ConfigError::Zero { name: "max_step_tokens" };
    assert_eq!(with(40, 0), Err(ShapeBytesError::Config(none)));
    for actual in (0..EngineShape::BYTES).chain([EngineShape::BYTES + 1, 4096]) {
        let mut other = bytes.to_vec();
        other.resize(actual, 0);
        assert_eq!(EngineShape::from_bytes(&other), Err(ShapeBytesError::Length { actual }));
    }
    let errors = [
        ShapeBytesError::Magic,
        ShapeBytesError::Mixed,
        ShapeBytesError::Length { actual: 3 },
        ShapeBytesError::Field { name: "layout", value: 9 },
        ShapeBytesError::Config(ConfigError::Zero { name: "layers" }),
    ];
    assert!(errors.iter().all(|error| !error.to_string().is_empty()));
    assert!(std::error::Error::source(&errors[4]).is_some());
}

fn random_lists(rng: &mut Rng) -> (Vec<PageCopy>, Vec<Compaction>) {
    let page = |rng: &mut Rng| PageId::new(rng.bits() as u32);
    let copies = (0..rng.below(6)).map(|_| PageCopy { source: page(rng), target: page(rng) }).collect();
    let count = rng.below(6);
    let compaction = |_| {
        let (row, keep) = (RowId::new(rng.bits() as u32), rng.bits());
        Compaction { row, first: rng.below(u64::from(u32::MAX) - 63) as u32, keep }
    };
    (copies, (0..count).map(compaction).collect())
}

#[test]
fn lists_survive_the_way_through_bytes() {
    let mut rng = Rng::new(3);
    for _ in 0..500 {
        let (copies, compactions) = random_lists(&mut rng);
        let both = [PageCopy::list_to_bytes(&copies), Compaction::list_to_bytes(&compactions)];
        // The bytes may begin at any address.
        let [of_copies, of_compactions] = both.map(|bytes| [&[0], &bytes[..]].concat());
        assert_eq!(PageCopy::list_from_bytes(&of_copies[1..]), Ok(copies));
        assert_eq!(Compaction::list_from_bytes(&of_compactions[1..]), Ok(compactions));
        // Each reader accepts only its own records.
        assert_eq!(PageCopy::list_from_bytes(&of_compactions[1..]), Err(PlanBytesError::Magic));
        assert_eq!(Compaction::list_from_bytes(&of_copies[1..]), Err(PlanBytesError::Magic));
    }
}

#[test]
fn lists_of_another_length_are_refused() {
    let mut rng = Rng::new(4);
    for _ in 0..100 {
        let (copies, compactions) = random_lists(&mut rng);
        let both = [PageCopy::list_to_bytes(&copies), Compaction::list_to_bytes(&compactions)];
        for (i, bytes) in both.iter().enumerate() {
            let read = |bytes: &[u8]| match i {
                0 => PageCopy::list_from_bytes(bytes).map(|_| ()),
                _ => Compaction::list_from_bytes(bytes).map(|_| ()),
            };
            let length = |actual| Err(PlanBytesError::Length { actual });
            for actual in (0..bytes.len()).chain([1, 7, 8, 16].map(|more| bytes.len() + more)) {
                let mut other = bytes.clone();
                other.resize(actual, 0);
                assert_eq!(read(&other), length(actual));
            }
            // Wrong counts; some overflow, or equal the length modulo 2^64.
            let count = u64::from_le_bytes(bytes[8..16].try_into().expect("8 bytes"));
            for wrong in [count + 1, count + (1 << 60), count + (1 << 61), 1 << 63, u64::MAX] {
                let mut other = bytes.clone();
                other[8..16].copy_from_slice(&wrong.to_le_bytes());
                assert_eq!(read(&other), length(other.len()), "{wrong} in place of {count}");
            }
        }
    }
}

#[test]
fn places_beyond_32_bits_are_refused() {
    let list = |first, keep| {
        let good = Compaction { row: RowId::new(0), first: 0, keep: u64::MAX };
        let list = [good, Compaction { first, keep, ..good }];
        Compaction::list_from_bytes(&Compaction::list_to_bytes(&list)).map(|_| ())
    };
    let refused = Err(PlanBytesError::Compaction { index: 1 });
    assert_eq!(list(u32::MAX - 63, 1 << 63), Ok(()));
    assert_eq!(list(u32::MAX - 62, 1 << 63), refused);
    assert_eq!(list(u32::MAX, 1), Ok(()));
    assert_eq!(list(u32::MAX, 0b10), refused);
    assert_eq!(list(u32::MAX, u64::MAX), refused);
    assert_eq!(list(u32::MAX, 0), Ok(()), "it keeps nothing");
    assert!(PlanBytesError::Compaction { index: 1 }.to_string().contains('1'));
}

/// A backend rejects pages, rows and places that its pool does not have. A rejected call changes no byte, and any other
/// call only its targets.
#[test]
fn garbled_lists_are_refused_or_stay_within_the_pool() {
    let config = PoolConfig {
        layers: 1,
        shape: KvShape::heads(1, 8),
        page_size: 4,
        capacity: Capacity::Pages(8),
        ..Default::default()
    };
    let layout = config.layout().expect("a valid pool");
    let table = TableShape::new(4, 3, 30, 60).expect("a small table");
    let mut cpu = CpuOptions::with_threads(1).open(&layout, &table, 2).expect("a small pool");
    let pages = || (0..8).map(PageId::new);
    let contents = |cpu: &Cpu| -> Vec<Vec<u8>> {
        let page = |page| {
            let mut bytes = vec![0; layout.page_bytes() as usize];
            cpu.read_page(page, &mut bytes).expect("the pool has it");
            bytes
        };
        pages().map(page).collect()
    };
    let mut rng = Rng::new(5);
    let (mut read, mut refused, mut done) = (0, 0, 0);
    for _ in 0..20_000 {
        for page in pages() {
            let bytes: Vec<u8> = (0..layout.page_bytes()).map(|_| rng.bits() as u8).collect();
            cpu.write_page(page, &bytes).expect("the pool has it");
        }
        let mut wanted = contents(&cpu);
        let copy = PageCopy { source: PageId::new(rng.below(9) as u32), target: PageId::new(rng.below(8) as u32) };
        let (row, first) = (RowId::new(rng.below(4) as u32), rng.below(20) as u32);
        let compaction = Compaction { row, first, keep: rng.below(32) };
        let is_copy = rng.one_in(2);
        let mut bytes =
            if is_copy { PageCopy::list_to_bytes(&[copy]) } else { Compaction::list_to_bytes(&[compaction]) };
        let at = rng.below(bytes.len() as u64) as usize;
        bytes[at] = if rng.one_in(2) { rng.below(8) as u8 } else { rng.bits() as u8 };
        let result = match is_copy {
            true => PageCopy::list_from_bytes(&bytes).map(|list| {
                let result = cpu.copy_pages(&list);
                for copy in list.iter().filter(|_| result.is_ok()) {
                    wanted[copy.target.index()] = wanted[copy.source.index()].clone();
                }
                result
            }),
            false => Compaction::list_from_bytes(&bytes).map(|list| {
                let result = cpu.compact(&list);
                // No plan has written the page tables, so they name page 0 alone.
                if result.is_ok() {
                    wanted[0].clone_from(&contents(&cpu)[0]);
                }
                result
            }),
        };
        let Ok(result) = result else { continue };
        assert!(contents(&cpu) == wanted, "{copy:?} or {compaction:?}: {result:?}");
        read += 1;
        match result {
            Ok(()) => done += 1,
            Err(_) => refused += 1,
        }
    }
    assert!(read > 1000 && refused > 500 && done > 500, "{read} {refused} {done}");
}
