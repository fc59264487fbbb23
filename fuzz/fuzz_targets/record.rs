//! Reads records of stores after damage, and bytes that are no records. A reader takes the written pages and tokens, or
//! nothing.
//!
//! The fuzzer sees the operands of comparisons, so it could copy a check that the reader computes. Contents and secrets
//! therefore depend on the whole input: another input has other checks.
#![no_main]

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use kvarena::id::TokenId;
use kvarena::testkit::rng::Rng;
use kvarena_tiers::check::Secret;
use kvarena_tiers::miss::Miss;
use kvarena_tiers::name::{Fingerprint, Space};
use kvarena_tiers::record::{BLOCK, HEADER, Header, PageChecks, Record, check_page};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    let (mut contents, mut picks) = (Rng::new(hasher.finish()), Rng::from_bytes(bytes));
    match picks.one_in(4) {
        true => read_raw(bytes.get(1..).unwrap_or_default(), &mut contents),
        false => read_damaged(&mut picks, &mut contents),
    }
});

/// A record that owns its tokens and pages.
#[derive(Clone)]
struct Sample {
    fingerprint: [u8; 32],
    space: [u8; 16],
    group: u16,
    page_size: u32,
    first: u32,
    parent: Option<[u8; 32]>,
    key: [u8; 32],
    tokens: Vec<TokenId>,
    pages: Vec<Vec<u8>>,
    secret: Option<Secret>,
}

fn random<const N: usize>(contents: &mut Rng) -> [u8; N] {
    let mut state = contents.bits();
    std::array::from_fn(|_| next(&mut state))
}

/// Returns the next byte of a fast sequence.
fn next(state: &mut u64) -> u8 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    (*state >> 56) as u8
}

impl Sample {
    fn new(picks: &mut Rng, contents: &mut Rng) -> Self {
        let (page_size, places) = (picks.within(1, 32) as u32, picks.within(1, 4) as u32);
        let page_bytes = picks.pick(&[1, 100, 4095, 4096, 4097, 6000]);
        let page = |_| (0..page_bytes).scan(contents.bits(), |state, _| Some(next(state))).collect();
        let pages = (0..picks.within(1, 4)).map(page).collect();
        let is_first = picks.one_in(3);
        Self {
            fingerprint: random(contents),
            space: random(contents),
            group: picks.below(4) as u16,
            page_size,
            first: if is_first { 0 } else { picks.within(1, 1000) as u32 },
            parent: (!is_first).then(|| random(contents)),
            key: random(contents),
            tokens: (0..page_size * places).map(|_| TokenId::new(contents.bits() as u32)).collect(),
            pages,
            secret: picks.one_in(2).then(|| Secret::new(random(contents))),
        }
    }

    /// Returns a record that a reader of this one must not accept: a field or the secret differs, and all pages.
    fn other(&self, picks: &mut Rng, contents: &mut Rng) -> Self {
        let mut other = self.clone();
        let mask = 1 + contents.below(255) as u8;
        other.pages.iter_mut().flatten().for_each(|byte| *byte ^= mask);
        match picks.below(10) {
            0 => other.fingerprint[31] ^= 1,
            1 => other.space[15] ^= 1,
            2 => other.group += 1,
            3 => other.first += 1,
            4 => other.parent = Some([255; 32]),
            5 => other.key[31] ^= 1,
            6 => other.tokens[0] = TokenId::new(other.tokens[0].raw() ^ 1),
            7 => other.pages.push(other.pages[0].clone()),
            8 => other.secret = Some(Secret::new(random(contents))),
            _ if self.secret.is_some() => other.secret = None,
            _ => other.pages.iter_mut().for_each(|page| page.push(0)),
        }
        other
    }

    fn record(&self) -> Record<'_> {
        Record {
            fingerprint: Fingerprint(self.fingerprint),
            space: Space(self.space),
            group: self.group,
            page_size: self.page_size,
            first: self.first,
            pages: self.pages.len() as u32,
            page_bytes: self.pages[0].len() as u32,
            parent: self.parent,
            key: self.key,
            tokens: &self.tokens,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.record().write_head(&self.pages, self.secret.as_ref());
        for page in &self.pages {
            bytes.extend(page);
            bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        }
        bytes
    }

    /// Returns the range of the header, the page checks and the tokens.
    fn checked(&self) -> Range<usize> {
        0..HEADER + 16 * self.pages.len() + 4 * self.tokens.len()
    }

    /// Reads pages from `first` on as a host does.
    fn read(&self, bytes: &[u8], first: usize) -> Result<(), Miss> {
        let (record, page_bytes, secret) = (self.record(), self.pages[0].len(), self.secret.as_ref());
        if bytes.len() as u64 != record.bytes() {
            return Err(Miss::Length);
        }
        let (head, strides) = bytes.split_at(record.head_bytes());
        record.check_head(head, secret)?;
        let strides = strides.chunks(page_bytes.next_multiple_of(BLOCK));
        let pages: Vec<_> = strides.map(|stride| &stride[..page_bytes]).skip(first).collect();
        let mut checks = PageChecks::new(page_bytes, secret);
        pages.iter().flat_map(|page| page.chunks(1000)).for_each(|piece| checks.update(piece));
        let compared = checks.compare(head, first, pages.len());
        let each = (first..).zip(&pages).try_for_each(|(index, page)| check_page(head, index, page, secret));
        assert_eq!(compared, each, "both ways to check pages agree");
        compared
    }
}

fn read_damaged(picks: &mut Rng, contents: &mut Rng) {
    let sample = Sample::new(picks, contents);
    let other = sample.other(picks, contents).bytes();
    let written = sample.bytes();
    let mut bytes = written.clone();
    for _ in 0..picks.below(5) {
        damage(&mut bytes, &other, picks);
    }
    let checked = sample.checked();
    // Zeros after the tokens and the pages have no check; no reader uses them.
    let (head, page_bytes) = (sample.record().head_bytes(), sample.pages[0].len());
    let first = picks.below(sample.pages.len() as u64) as usize;
    let mut pages = (first..sample.pages.len()).map(|index| head + index * page_bytes.next_multiple_of(BLOCK));
    let is_intact = bytes.len() == written.len()
        && bytes[checked.clone()] == written[checked]
        && pages.all(|at| bytes[at..at + page_bytes] == written[at..at + page_bytes]);
    assert_eq!(sample.read(&bytes, first).is_ok(), is_intact, "from page {first}");
    // A reader that expects no certain record accepts only heads that a writer wrote.
    if let Some(end) = read_header(&bytes, sample.secret.as_ref()) {
        let is_written = |of: &Vec<u8>| of.len() >= end && of[..end] == bytes[..end];
        assert!(is_written(&written) || is_written(&other), "a forged header");
    }
}

/// Reads a header, its check and pages as a tool does. Returns the end of the tokens of an accepted head.
fn read_header(bytes: &[u8], secret: Option<&Secret>) -> Option<usize> {
    let header = Header::read(bytes).ok()?;
    let len = header.head_bytes().filter(|len| *len <= bytes.len())?;
    assert!(header.bytes().is_none_or(|all| all > len as u64), "a record without pages");
    header.check(&bytes[..len], secret).ok()?;
    for index in 0..header.pages.min(8) as usize {
        let _ = check_page(&bytes[..len], index, &bytes[len..], secret);
    }
    Some(HEADER + 16 * header.pages as usize + 4 * (header.page_size * header.places) as usize)
}

/// Changes some bytes: flips, overwrites, cuts, extends, moves, or takes bytes of another record.
fn damage(bytes: &mut Vec<u8>, other: &[u8], picks: &mut Rng) {
    let place = |picks: &mut Rng, len: usize| -> usize {
        // Half of the places are in the header.
        let bound = if picks.one_in(2) { len.min(2 * HEADER) } else { len };
        picks.below(bound as u64 + 1) as usize
    };
    let (at, from) = (place(picks, bytes.len()), place(picks, bytes.len().min(other.len())));
    let count = picks.below(1 + (bytes.len() - at).min(other.len() - from) as u64) as usize;
    let count = if picks.one_in(2) { count.next_multiple_of(BLOCK) } else { count };
    let count = count.min(bytes.len() - at).min(bytes.len() - from).min(other.len() - from);
    match picks.below(8) {
        0 | 1 if at < bytes.len() => bytes[at] ^= 1 << picks.below(8),
        2 => bytes[at..at + count].fill(picks.below(256) as u8),
        3 => bytes.truncate(at),
        4 => bytes.resize(bytes.len() + count, 0),
        5 => bytes.copy_within(from..from + count, at),
        6 => bytes[at..at + count].copy_from_slice(&other[from..from + count]),
        7 => {
            bytes.clear();
            bytes.extend_from_slice(other);
        }
        _ => {}
    }
}

fn read_raw(bytes: &[u8], contents: &mut Rng) {
    let key = Secret::new(random(contents));
    assert!(read_header(bytes, Some(&key)).is_none(), "a forged header");
    let _ = read_header(bytes, None);
    // Without a secret, a whole record can be made, but not one of other fields or tokens.
    let Ok(header) = Header::read(bytes) else { return };
    let record = |pages, tokens| Record {
        fingerprint: header.fingerprint,
        space: header.space,
        group: header.group,
        page_size: header.page_size,
        first: header.first,
        pages,
        page_bytes: header.page_bytes,
        parent: Some(header.parent),
        key: header.key,
        tokens,
    };
    let tokens: Vec<_> = (0..header.page_size.min(64)).map(|_| TokenId::new(contents.bits() as u32)).collect();
    let record = record(header.pages.min(64), &tokens[..]);
    if tokens.len() == header.page_size as usize {
        for secret in [None, Some(&key)] {
            assert!(record.check_head(bytes, secret).is_err(), "other tokens");
            let head = &bytes[..bytes.len().min(record.head_bytes())];
            assert!(record.check_head(head, secret).is_err(), "other tokens");
        }
    }
}
