//! Records: the bytes of the format, and damage of every kind.

mod common;

use common::{PAGE_SIZE, Sample, random, samples};
use kvarena::id::TokenId;
use kvarena_tiers::check::Secret;
use kvarena_tiers::miss::Miss;
use kvarena_tiers::name::{Fingerprint, Space};
use kvarena_tiers::record::{BLOCK, HEADER, Header, PageChecks, Record, check_page};
use sha2::{Digest, Sha256};

/// Reads a record as a host does, and returns its pages.
fn read(record: &Record, secret: Option<&Secret>, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Miss> {
    if bytes.len() as u64 != record.bytes() {
        return Err(Miss::Length);
    }
    let (head, pages) = bytes.split_at(record.head_bytes());
    record.check_head(head, secret)?;
    let page = |(index, page): (usize, &[u8])| {
        let page = &page[..record.page_bytes as usize];
        check_page(head, index, page, secret).map(|()| page.to_vec())
    };
    pages.chunks_exact((record.page_bytes as usize).next_multiple_of(BLOCK)).enumerate().map(page).collect()
}

#[test]
fn pages_in_pieces_have_the_checks_of_whole_pages() {
    for sample in samples() {
        let (bytes, count) = (sample.bytes(), sample.pages.len());
        let head = &bytes[..sample.record().head_bytes()];
        let compare = |pages: &[Vec<u8>], first: usize, piece: usize, count: usize| {
            let mut checks = PageChecks::new(pages[0].len(), sample.secret.as_ref());
            pages[first..].iter().flat_map(|page| page.chunks(piece)).for_each(|piece| checks.update(piece));
            checks.compare(head, first, count)
        };
        for (first, piece) in (0..count).flat_map(|first| [1, 1000, 4096, 9999].map(|piece| (first, piece))) {
            assert_eq!(compare(&sample.pages, first, piece, count - first), Ok(()));
            assert_eq!(
                compare(&sample.pages, first, piece, count - first - 1),
                Err(Miss::PageCheck),
                "a page too many"
            );
            assert_eq!(compare(&sample.pages, first, piece, count - first + 99), Err(Miss::PageCheck), "pages lack");
            let mut damaged = sample.pages.clone();
            damaged[count - 1][4095] ^= 1;
            assert_eq!(compare(&damaged, first, piece, count - first), Err(Miss::PageCheck));
            damaged[count - 1].truncate(4095);
            assert_eq!(compare(&damaged, first, piece, count - first), Err(Miss::PageCheck), "half a page");
        }
    }
}

#[test]
fn the_bytes_equal_those_of_another_writer() {
    // Names, lengths and SHA-256 of records that a Python program wrote.
    let vectors = include_str!("vectors/record_v1.txt").lines();
    for (sample, line) in samples().iter().zip(vectors) {
        let bytes = sample.bytes();
        let digest: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(format!("{} {} {digest}", sample.record().name(), bytes.len()), line);
    }
}

#[test]
fn intact_records_are_accepted() {
    for sample in samples() {
        let bytes = sample.bytes();
        assert_eq!(read(&sample.record(), sample.secret.as_ref(), &bytes), Ok(sample.pages.clone()));
        let header = Header::read(&bytes).expect("it is intact");
        assert_eq!((header.bytes(), header.places), (Some(bytes.len() as u64), 1));
        assert_eq!(header.first, sample.record().first);
    }
}

#[test]
fn every_truncation_is_a_miss() {
    for sample in samples() {
        let (record, bytes) = (sample.record(), sample.bytes());
        for len in 0..bytes.len() {
            assert_eq!(read(&record, sample.secret.as_ref(), &bytes[..len]), Err(Miss::Length));
            // The same for a reader that trusts the length.
            let cut = [&bytes[..len], &vec![0; bytes.len() - len]].concat();
            let lost = cut != bytes;
            let accepted = read(&record, sample.secret.as_ref(), &cut);
            assert!(accepted == Ok(sample.pages.clone()) || lost && accepted.is_err(), "{len}");
            assert!(len >= HEADER || Header::read(&bytes[..len]) == Err(Miss::Length));
        }
    }
}

#[test]
fn every_flipped_bit_of_the_header_the_checks_and_the_tokens_is_a_miss() {
    for sample in samples() {
        let (record, mut bytes) = (sample.record(), sample.bytes());
        for bit in 0..8 * (HEADER + 16 * sample.pages.len() + 4 * PAGE_SIZE as usize) {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&record, sample.secret.as_ref(), &bytes).is_err(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

#[test]
fn random_flips_never_change_what_a_reader_accepts() {
    let mut random = random(1);
    for sample in samples() {
        let (record, bytes) = (sample.record(), sample.bytes());
        let mut damaged = bytes.clone();
        for _ in 0..50_000 {
            let flips: Vec<_> = (0..1 + random() % 3).map(|_| random() as usize % (8 * bytes.len())).collect();
            flips.iter().for_each(|bit| damaged[bit / 8] ^= 1 << (bit % 8));
            // Flips of padding change nothing that a reader takes.
            if let Ok(pages) = read(&record, sample.secret.as_ref(), &damaged) {
                assert_eq!(pages, sample.pages);
            }
            flips.iter().for_each(|bit| damaged[bit / 8] = bytes[bit / 8]);
        }
    }
}

#[test]
fn random_headers_do_not_panic() {
    let mut random = random(2);
    let sample = &samples()[0];
    let bytes = sample.bytes();
    for _ in 0..100_000 {
        let mut head = bytes[..BLOCK].to_vec();
        for _ in 0..1 + random() % 4 {
            let at = 16 + random() as usize % 24;
            head[at] = random() as u8;
        }
        if let Ok(header) = Header::read(&head) {
            let _ = (header.check(&head, None), header.bytes());
        }
    }
}

#[test]
fn other_records_are_misses_with_their_reason() {
    for sample in samples() {
        let (record, bytes, secret) = (sample.record(), sample.bytes(), sample.secret.as_ref());
        let mut other = record.tokens.to_vec();
        other[3] = TokenId::new(999);
        let others = [
            (Record { fingerprint: Fingerprint([1; 32]), ..record }, Miss::Fingerprint),
            (Record { space: Space([1; 16]), ..record }, Miss::Space),
            (Record { group: 7, ..record }, Miss::Group),
            (Record { page_size: PAGE_SIZE / 2, ..record }, Miss::Sizes),
            (Record { page_bytes: record.page_bytes - 1, ..record }, Miss::Sizes),
            (Record { first: 9, ..record }, Miss::Place),
            (Record { parent: None, ..record }, Miss::Parent),
            (Record { key: [1; 32], ..record }, Miss::Key),
            (Record { tokens: &other, ..record }, Miss::Tokens),
        ];
        for (other, miss) in others {
            assert_eq!(read(&other, secret, &bytes), Err(miss));
        }
        let version = |at: usize, value: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            read(&record, secret, &bytes)
        };
        assert_eq!([version(0, 0), version(8, 2), version(12, 2)], [Miss::Magic, Miss::Version, Miss::Flags].map(Err));
        assert_eq!(version(45, 1), Err(Miss::Malformed));
        assert_eq!(version(170, 1), Err(Miss::Malformed));
        // Other checks: none, another secret.
        let other = if secret.is_some() { None } else { Some(Secret::new([5; 32])) };
        assert_eq!(read(&record, other.as_ref(), &bytes), Err(Miss::Secret));
        if secret.is_some() {
            assert_eq!(read(&record, Some(&Secret::new([5; 32])), &bytes), Err(Miss::HeadCheck));
        }
    }
}

#[test]
fn swapped_pages_and_heads_are_misses() {
    let sample = &samples()[1];
    let (record, bytes, secret) = (sample.record(), sample.bytes(), sample.secret.as_ref());
    let head = record.head_bytes();
    let mut swapped = bytes.clone();
    swapped[head..head + BLOCK].copy_from_slice(&bytes[head + BLOCK..head + 2 * BLOCK]);
    swapped[head + BLOCK..head + 2 * BLOCK].copy_from_slice(&bytes[head..head + BLOCK]);
    assert_eq!(read(&record, secret, &swapped), Err(Miss::PageCheck));
    // With their checks as well, the head's check fails.
    swapped[HEADER..HEADER + 16].copy_from_slice(&bytes[HEADER + 16..HEADER + 32]);
    swapped[HEADER + 16..HEADER + 32].copy_from_slice(&bytes[HEADER..HEADER + 16]);
    assert_eq!(read(&record, secret, &swapped), Err(Miss::HeadCheck));
    // A head of the same record with other pages.
    let other = Sample {
        pages: sample.pages.iter().map(|page| page.iter().map(|x| x ^ 1).collect()).collect(),
        ..sample.clone()
    };
    let mixed = [&other.bytes()[..head], &bytes[head..]].concat();
    assert_eq!(read(&record, secret, &mixed), Err(Miss::PageCheck));
}
