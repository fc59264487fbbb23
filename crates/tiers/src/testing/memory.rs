//! A store in memory.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::lock::lock;
use crate::name::{Fingerprint, Name, Space};
use crate::store::{Buffers, Got, Store, StoreError, stride};

/// A store in memory.
#[derive(Debug, Default)]
pub struct Memory(Mutex<HashMap<Name, Vec<u8>>>);

impl Memory {
    /// Returns the stored names, in order.
    pub fn names(&self) -> Vec<Name> {
        let mut names: Vec<_> = lock(&self.0).keys().copied().collect();
        names.sort();
        names
    }

    /// Returns the bytes of a record.
    pub fn record(&self, name: &Name) -> Option<Vec<u8>> {
        lock(&self.0).get(name).cloned()
    }

    /// Stores any bytes under a name.
    pub fn set(&self, name: Name, bytes: Vec<u8>) {
        lock(&self.0).insert(name, bytes);
    }
}

/// Returns the bytes of a record.
pub(crate) fn concat(head: &[u8], pages: &[&[u8]]) -> Vec<u8> {
    let mut bytes = head.to_vec();
    for page in pages {
        bytes.extend_from_slice(page);
        bytes.resize(bytes.len() + stride(page.len()) - page.len(), 0);
    }
    bytes
}

/// Copies a record from memory into a reader's buffers.
fn read_from(bytes: &[u8], into: &mut Buffers) -> Got {
    if bytes.len() as u64 != into.record_bytes() {
        return Got::Length;
    }
    into.head.copy_from_slice(&bytes[..into.head.len()]);
    let (page_bytes, start) = (into.page_bytes(), into.range().start as usize);
    for (page, bytes) in into.pages.iter_mut().zip(bytes[start..].chunks(stride(page_bytes).max(1))) {
        page.copy_from_slice(&bytes[..page_bytes]);
    }
    into.see_all();
    Got::Read
}

impl Store for Memory {
    fn have(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        let records = lock(&self.0);
        Ok(names.iter().map(|name| records.contains_key(name)).collect())
    }

    fn get(&self, name: &Name, into: &mut Buffers) -> Result<Got, StoreError> {
        Ok(lock(&self.0).get(name).map_or(Got::Absent, |bytes| read_from(bytes, into)))
    }

    fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> Result<(), StoreError> {
        self.set(*name, concat(head, pages));
        Ok(())
    }

    fn remove(&self, names: &[Name]) -> Result<(), StoreError> {
        let mut records = lock(&self.0);
        names.iter().for_each(|name| drop(records.remove(name)));
        Ok(())
    }

    fn remove_space(&self, fingerprint: &Fingerprint, space: Space) -> Result<(), StoreError> {
        let gone = Name::new(fingerprint, space, [0; 32], 0);
        lock(&self.0).retain(|name, _| (name.fingerprint, name.space) != (gone.fingerprint, gone.space));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_fulfils_the_contract() {
        super::super::contract(&Memory::default());
    }

    #[test]
    fn pages_have_padding() {
        let (store, name) = (Memory::default(), Name::new(&Fingerprint([1; 32]), Space::default(), [2; 32], 0));
        store.put(&name, &[1; 4096], &[&[2; 6000], &[3; 6000]]).expect("it has room");
        let bytes = store.record(&name).expect("it is stored");
        assert_eq!((bytes.len(), bytes[4096 + 6000], bytes[4096 + 8192]), (5 * 4096, 0, 3));
    }
}
