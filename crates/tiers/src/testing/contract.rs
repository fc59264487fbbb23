//! The contract of stores.

use std::thread;

use crate::name::{Fingerprint, Name, Space};
use crate::record::BLOCK;
use crate::store::{Buffers, Got, Store};

/// A record of the contract: its name, head and pages.
struct Sample {
    name: Name,
    head: Vec<u8>,
    pages: Vec<Vec<u8>>,
}

fn sample(space: u8, number: u32, group: u16, pages: usize, page_bytes: usize) -> Sample {
    let mut key = [number as u8; 32];
    key[1..5].copy_from_slice(&number.to_le_bytes());
    let name = Name::new(&Fingerprint([9; 32]), Space([space; 16]), key, group);
    let byte = |page: usize, at: usize| (page * 31 + at * 7 + number as usize + group as usize) as u8;
    let page = |index| (0..page_bytes).map(|at| byte(index, at)).collect();
    Sample { name, head: (0..BLOCK).map(|at| byte(99, at)).collect(), pages: (0..pages).map(page).collect() }
}

impl Sample {
    fn put(&self, store: &dyn Store) {
        let pages: Vec<_> = self.pages.iter().map(|page| &page[..]).collect();
        store.put(&self.name, &self.head, &pages).unwrap_or_else(|error| panic!("{:?}: {error}", self.name));
    }

    /// Reads `count` pages from `first` on. Returns the head and the pages.
    fn get(&self, store: &dyn Store, first: u32, count: usize) -> (Got, Vec<u8>, Vec<Vec<u8>>) {
        let mut head = vec![1; self.head.len()];
        let mut pages = vec![vec![1; self.pages[0].len()]; count];
        let mut buffers: Vec<_> = pages.iter_mut().map(|page| &mut page[..]).collect();
        let (of, mut seen) = (self.pages.len() as u32, Vec::new());
        let add = &mut |piece: &[u8]| seen.extend_from_slice(piece);
        let into = &mut Buffers { first, of, head: &mut head, pages: &mut buffers, seen: add };
        let got = store.get(&self.name, into).expect("no failure");
        assert!(got != Got::Read || seen == pages.concat(), "pieces in order");
        (got, head, pages)
    }

    fn check(&self, store: &dyn Store) {
        for first in 0..self.pages.len() {
            for count in 1..=self.pages.len() - first {
                let (got, head, pages) = self.get(store, first as u32, count);
                assert_eq!((got, head == self.head), (Got::Read, true));
                assert!(pages == self.pages[first..first + count], "pages {first} to {}", first + count);
            }
        }
    }
}

/// Checks a store against the promises of [`Store`]. The store is empty and has room for 1 MiB. All puts succeed.
///
/// # Panics
/// If the store breaks a promise.
pub fn contract(store: &dyn Store) {
    let samples = [
        sample(1, 1, 0, 1, 4096),
        sample(1, 2, 0, 4, 6000), // pages with padding
        sample(1, 2, 3, 3, 8192), // the same key in another group
        sample(2, 2, 0, 2, 100),  // the same key in another namespace
        sample(0, 3, 0, 8, 4096), // the default namespace
    ];
    let names: Vec<_> = samples.iter().map(|sample| sample.name).collect();
    // One name in each question: a store may derive the presence of a record from others.
    let have = |names: &[Name]| -> Vec<bool> {
        names.iter().flat_map(|name| store.have(&[*name]).expect("no failure")).collect()
    };
    assert_eq!(have(&names), [false; 5]);
    assert_eq!(samples[0].get(store, 0, 1).0, Got::Absent);
    for (index, sample) in samples.iter().enumerate() {
        sample.put(store);
        let stored: Vec<_> = (0..5).map(|at| at <= index).collect();
        assert_eq!(have(&names), stored);
    }
    samples.iter().for_each(|sample| sample.check(store));
    assert!(store.have(&[]).expect("no failure").is_empty());
    lengths(store, &samples[1]);
    overwrites(store);
    many_names(store);

    store.remove(&[names[1], names[1], sample(1, 77, 0, 1, 1).name]).expect("absent records are no error");
    assert_eq!(have(&names), [true, false, true, true, true]);
    assert_eq!(samples[1].get(store, 0, 1).0, Got::Absent);
    store.remove_space(&Fingerprint([8; 32]), Space([1; 16])).expect("no failure");
    assert_eq!(have(&names), [true, false, true, true, true]);
    store.remove_space(&Fingerprint([9; 32]), Space([1; 16])).expect("no failure");
    assert_eq!(have(&names), [false, false, false, true, true]);
    assert_eq!(samples[2].get(store, 0, 1).0, Got::Absent);
    samples[3..].iter().for_each(|sample| sample.check(store));
    samples[0].put(store);
    samples[0].check(store);
}

/// A reader that expects another length does not get the record.
fn lengths(store: &dyn Store, stored: &Sample) {
    for pages in [3, 5] {
        let other = sample(1, 2, 0, pages, 6000);
        assert_eq!(other.get(store, 0, 1).0, Got::Length, "{pages} of {}", stored.pages.len());
    }
    let longer = sample(1, 2, 0, 4, 6000 + BLOCK);
    assert_eq!(longer.get(store, 0, 1).0, Got::Length);
}

/// Later puts replace earlier ones as a whole, also if they run at the same time.
fn overwrites(store: &dyn Store) {
    let first = sample(1, 5, 0, 2, 4096);
    first.put(store);
    let second = Sample { pages: vec![vec![7; 8192]; 3], ..sample(1, 5, 0, 3, 8192) };
    second.put(store);
    second.check(store);
    first.put(store);
    first.check(store);
    let others: Vec<_> = (0..4_u8).map(|i| Sample { pages: vec![vec![i; 4096]; 2], ..sample(1, 5, 0, 2, 1) }).collect();
    thread::scope(|scope| {
        for other in &others {
            scope.spawn(|| (0..8).for_each(|_| other.put(store)));
        }
        for _ in 0..32 {
            let (got, _, pages) = first.get(store, 0, 2);
            let is_whole = pages == first.pages || others.iter().any(|other| pages == other.pages);
            assert!(got != Got::Read || is_whole, "a record of two writers");
        }
    });
}

/// `have` of many names, of which the first three are stored.
fn many_names(store: &dyn Store) {
    let samples: Vec<_> = (0..3).map(|number| sample(1, 1000 + number, 0, 1, 100)).collect();
    samples.iter().for_each(|sample| sample.put(store));
    let absent = (0..2045).map(|number| sample(1, 2000 + number, 0, 1, 1).name);
    let names: Vec<_> = samples.iter().map(|sample| sample.name).chain(absent).collect();
    let expected: Vec<_> = (0..2048).map(|at| at < 3).collect();
    assert_eq!(store.have(&names).expect("no failure"), expected);
    assert_eq!(store.have(&names[3..]).expect("no failure"), vec![false; 2045]);
}
