//! The names that a folder is known to contain.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;

use crate::lock::lock;
use crate::name::Name;

/// The names that a folder is known to contain, as hashes of 8 bytes. The hashes have a random key, so equal hashes of
/// two names happen by chance alone; they cause a miss.
#[derive(Debug, Default)]
pub(super) struct Index {
    hasher: RandomState,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// The number of the last scan that saw the name, or before which it was added.
    names: HashMap<u64, u32>,
    scan: u32,
}

impl Index {
    pub fn insert(&self, name: &Name) {
        let mut known = lock(&self.known);
        let scan = known.scan;
        known.names.insert(self.hasher.hash_one(name), scan);
    }

    pub fn remove(&self, name: &Name) {
        lock(&self.known).names.remove(&self.hasher.hash_one(name));
    }

    pub fn clear(&self) {
        lock(&self.known).names.clear();
    }

    /// Returns, for each name, whether it is known.
    pub fn has(&self, names: &[Name]) -> Vec<bool> {
        let known = lock(&self.known);
        names.iter().map(|name| known.names.contains_key(&self.hasher.hash_one(name))).collect()
    }

    pub fn begin_scan(&self) {
        lock(&self.known).scan += 1;
    }

    /// Removes the names that have been neither seen nor added since the begin of the scan.
    pub fn end_scan(&self) {
        let mut known = lock(&self.known);
        let scan = known.scan;
        known.names.retain(|_, &mut seen| seen == scan);
    }
}
