//! Stores that fail: each wraps another store and breaks one promise.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use crate::name::{Fingerprint, Name, Space};
use crate::store::{Got, Part, Store, StoreError};

/// Forwards the calls that a double does not change.
macro_rules! forward {
    (have) => {
        fn have(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
            self.inner.have(names)
        }
    };
    (get) => {
        fn get(&self, name: &Name, part: Part, head: &mut [u8], pages: &mut [&mut [u8]]) -> Result<Got, StoreError> {
            self.inner.get(name, part, head, pages)
        }
    };
    (put) => {
        fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> Result<(), StoreError> {
            self.inner.put(name, head, pages)
        }
    };
    (remove) => {
        fn remove(&self, names: &[Name]) -> Result<(), StoreError> {
            self.inner.remove(names)
        }

        fn remove_space(&self, fingerprint: &Fingerprint, space: Space) -> Result<(), StoreError> {
            self.inner.remove_space(fingerprint, space)
        }
    };
}

/// Loses the last bytes of what it reads, as a disk may after a power loss.
#[derive(Debug)]
pub struct Torn<S> {
    /// The store.
    pub inner: S,
    /// Number of bytes of the head and of the pages together that remain; the others are zeros.
    pub keep: usize,
}

impl<S: Store> Store for Torn<S> {
    forward!(have);
    forward!(put);
    forward!(remove);

    fn get(&self, name: &Name, part: Part, head: &mut [u8], pages: &mut [&mut [u8]]) -> Result<Got, StoreError> {
        let got = self.inner.get(name, part, head, pages)?;
        let mut keep = self.keep;
        for buffer in std::iter::once(head).chain(pages.iter_mut().map(|page| &mut **page)) {
            let kept = keep.min(buffer.len());
            buffer[kept..].fill(0);
            keep -= kept;
        }
        Ok(got)
    }
}

/// Waits before every call.
#[derive(Debug)]
pub struct Slow<S> {
    /// The store.
    pub inner: S,
    /// The time of a call.
    pub delay: Duration,
}

impl<S: Store> Store for Slow<S> {
    forward!(remove);

    fn have(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        sleep(self.delay);
        self.inner.have(names)
    }

    fn get(&self, name: &Name, part: Part, head: &mut [u8], pages: &mut [&mut [u8]]) -> Result<Got, StoreError> {
        sleep(self.delay);
        self.inner.get(name, part, head, pages)
    }

    fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> Result<(), StoreError> {
        sleep(self.delay);
        self.inner.put(name, head, pages)
    }
}

/// Fails every call while the switch is on, and counts the calls.
#[derive(Debug, Default)]
pub struct Gone<S> {
    /// The store.
    pub inner: S,
    /// Whether calls fail.
    pub is_gone: AtomicBool,
    /// Number of calls.
    pub calls: AtomicU64,
}

impl<S> Gone<S> {
    fn check(&self) -> Result<(), StoreError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        match self.is_gone.load(Ordering::Relaxed) {
            true => Err(StoreError::Gone { text: "switched off".to_owned() }),
            false => Ok(()),
        }
    }
}

impl<S: Store> Store for Gone<S> {
    forward!(remove);

    fn have(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        self.check()?;
        self.inner.have(names)
    }

    fn get(&self, name: &Name, part: Part, head: &mut [u8], pages: &mut [&mut [u8]]) -> Result<Got, StoreError> {
        self.check()?;
        self.inner.get(name, part, head, pages)
    }

    fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> Result<(), StoreError> {
        self.check()?;
        self.inner.put(name, head, pages)
    }
}

/// Has room for a number of puts.
#[derive(Debug)]
pub struct Full<S> {
    /// The store.
    pub inner: S,
    /// Number of puts that still succeed.
    pub room: AtomicU64,
}

impl<S: Store> Store for Full<S> {
    forward!(have);
    forward!(get);
    forward!(remove);

    fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> Result<(), StoreError> {
        let taken = self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(1));
        taken.map_err(|_| StoreError::Full)?;
        self.inner.put(name, head, pages)
    }
}

/// Claims to have every record, and returns zeros for absent ones.
#[derive(Debug)]
pub struct Liar<S> {
    /// The store.
    pub inner: S,
}

impl<S: Store> Store for Liar<S> {
    forward!(put);
    forward!(remove);

    fn have(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        Ok(vec![true; names.len()])
    }

    fn get(&self, name: &Name, part: Part, head: &mut [u8], pages: &mut [&mut [u8]]) -> Result<Got, StoreError> {
        self.inner.get(name, part, head, pages).map(|_| Got::Read)
    }
}

/// Holds calls until they are released.
#[derive(Debug, Default)]
pub struct Held<S> {
    /// The store.
    pub inner: S,
    gate: Mutex<Gate>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Gate {
    /// Whether questions, reads and puts are held.
    held: [bool; 3],
    waiting: usize,
}

impl<S> Held<S> {
    /// Creates a store that holds no call.
    pub fn new(inner: S) -> Self {
        Self { inner, gate: Mutex::default(), changed: Condvar::new() }
    }

    /// Holds calls of `have`, `get` and `put` from now on, and releases the others.
    pub fn hold(&self, held: [bool; 3]) {
        self.gate().held = held;
        self.changed.notify_all();
    }

    /// Waits until this number of calls is held.
    pub fn wait_for(&self, count: usize) {
        let gate = self.changed.wait_while(self.gate(), |gate| gate.waiting < count);
        drop(gate.unwrap_or_else(PoisonError::into_inner));
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass(&self, call: usize) {
        let mut gate = self.gate();
        gate.waiting += 1;
        self.changed.notify_all();
        let gate = self.changed.wait_while(gate, |gate| gate.held[call]);
        gate.unwrap_or_else(PoisonError::into_inner).waiting -= 1;
    }
}

impl<S: Store> Store for Held<S> {
    forward!(remove);

    fn have(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        self.pass(0);
        self.inner.have(names)
    }

    fn get(&self, name: &Name, part: Part, head: &mut [u8], pages: &mut [&mut [u8]]) -> Result<Got, StoreError> {
        self.pass(1);
        self.inner.get(name, part, head, pages)
    }

    fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> Result<(), StoreError> {
        self.pass(2);
        self.inner.put(name, head, pages)
    }
}
