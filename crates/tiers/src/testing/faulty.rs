//! A store that fails as a test needs it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::sleep;
use std::time::Duration;

use crate::lock::{lock, wait_while};
use crate::name::{Fingerprint, Name, Space};
use crate::store::{Buffers, Got, Store, StoreError};

/// Wraps a store, and fails as its fields describe. Removals are those of the store.
#[derive(Debug)]
pub struct Faulty<S> {
    /// The store.
    pub inner: Arc<S>,
    /// Time before each call.
    pub delay: Duration,
    /// Whether calls fail.
    pub is_gone: AtomicBool,
    /// Number of calls so far.
    pub calls: AtomicU64,
    /// Number of puts that still succeed.
    pub room: AtomicU64,
    /// Number of bytes of the head and of the pages together that a read returns. The others are zeros, as on a disk
    /// after a power loss.
    pub keep: usize,
    /// Whether the store reports every record as stored, and returns the buffers as they are for absent ones.
    pub lies: bool,
    /// The names whose puts are refused as by a full store.
    pub refuses: Mutex<fn(&Name) -> bool>,
    /// The names for which `have_now` fails.
    pub hides: Mutex<fn(&Name) -> bool>,
    /// The calls that are held.
    pub gate: Gate,
}

/// Holds calls until they are released.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    /// Whether questions, reads and puts are held.
    held: [bool; 3],
    waiting: usize,
}

impl Gate {
    /// Holds calls of `have`, `get` and `put` from now on, and releases the others.
    pub fn hold(&self, held: [bool; 3]) {
        lock(&self.state).held = held;
        self.changed.notify_all();
    }

    /// Waits until this number of calls is held.
    pub fn wait_for(&self, count: usize) {
        drop(wait_while(&self.changed, lock(&self.state), |state| state.waiting < count));
    }

    fn pass(&self, call: usize) {
        let mut state = lock(&self.state);
        state.waiting += 1;
        self.changed.notify_all();
        wait_while(&self.changed, state, |state| state.held[call]).waiting -= 1;
    }
}

impl<S> Faulty<S> {
    /// Creates a store without faults.
    pub fn new(inner: Arc<S>) -> Self {
        let [calls, room] = [0, u64::MAX].map(AtomicU64::new);
        let (is_gone, gate) = (AtomicBool::default(), Gate::default());
        let [refuses, hides] = [(); 2].map(|()| Mutex::new((|_: &Name| false) as fn(&Name) -> bool));
        let keep = usize::MAX;
        Self { inner, delay: Duration::ZERO, is_gone, calls, room, keep, lies: false, refuses, hides, gate }
    }

    /// Begins a call of `have`, `get` or `put`.
    fn begin(&self, call: usize) -> Result<(), StoreError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        sleep(self.delay);
        self.gate.pass(call);
        if self.is_gone.load(Ordering::Relaxed) {
            return Err(StoreError::Gone { text: "switched off".to_owned() });
        }
        Ok(())
    }
}

impl<S: Store> Store for Faulty<S> {
    fn have(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        self.begin(0)?;
        if self.lies { Ok(vec![true; names.len()]) } else { self.inner.have(names) }
    }

    fn asks_one_by_one(&self) -> bool {
        self.inner.asks_one_by_one()
    }

    fn have_now(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        self.begin(0)?;
        let hides = *lock(&self.hides);
        if names.iter().any(hides) {
            return Err(StoreError::Gone { text: "hidden".to_owned() });
        }
        if self.lies { Ok(vec![true; names.len()]) } else { self.inner.have_now(names) }
    }

    fn get(&self, name: &Name, into: &mut Buffers) -> Result<Got, StoreError> {
        self.begin(1)?;
        let Buffers { first, of, head, pages, seen: _ } = into;
        let unseen = &mut Buffers { first: *first, of: *of, head, pages, seen: &mut |_| () };
        let mut got = self.inner.get(name, unseen)?;
        let mut keep = self.keep;
        for buffer in std::iter::once(&mut *into.head).chain(into.pages.iter_mut().map(|page| &mut **page)) {
            let kept = keep.min(buffer.len());
            buffer[kept..].fill(0);
            keep -= kept;
        }
        if self.lies {
            got = Got::Read;
        }
        if got == Got::Read {
            into.see_all();
        }
        Ok(got)
    }

    fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> Result<(), StoreError> {
        self.begin(2)?;
        if lock(&self.refuses)(name) {
            return Err(StoreError::Full);
        }
        let taken = self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(1));
        taken.map_err(|_| StoreError::Full)?;
        self.inner.put(name, head, pages)
    }

    fn remove(&self, names: &[Name]) -> Result<(), StoreError> {
        self.inner.remove(names)
    }

    fn remove_space(&self, fingerprint: &Fingerprint, space: Space) -> Result<(), StoreError> {
        self.inner.remove_space(fingerprint, space)
    }
}
