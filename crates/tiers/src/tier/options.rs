//! Options and counters of a tier.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::check::Secret;
use crate::name::Fingerprint;
use crate::store::Store;

/// Whether records are read from a store, or their tokens computed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum LoadRule {
    /// The store is always asked.
    Always,
    /// The store is asked if reading is faster than computing.
    Costs {
        /// Time of a read without its bytes. It counts once for a request, although a thread reads the parts of a
        /// record on several ranks one after another: set it for all of them.
        latency: Duration,
        /// Bytes that the store reads in a second.
        bytes_per_second: f64,
        /// Tokens that the host computes in a second of prefill.
        tokens_per_second: f64,
    },
}

impl LoadRule {
    /// Returns the estimated time of a read. Without costs, 1 GB/s.
    pub fn estimate(&self, bytes: u64) -> Duration {
        let (latency, rate) = match *self {
            Self::Always => (Duration::ZERO, 1e9),
            Self::Costs { latency, bytes_per_second, .. } => (latency, bytes_per_second),
        };
        latency + Duration::try_from_secs_f64(bytes as f64 / rate).unwrap_or(Duration::MAX / 4)
    }

    /// Returns whether to read these bytes instead of computing these tokens.
    pub fn is_worth(&self, tokens: u64, bytes: u64) -> bool {
        match *self {
            Self::Always => true,
            Self::Costs { tokens_per_second, .. } => {
                self.estimate(bytes).as_secs_f64() < tokens as f64 / tokens_per_second
            }
        }
    }
}

/// A store of a tier.
#[derive(Clone)]
pub struct StoreOptions {
    /// Name, for counters and threads.
    pub name: String,
    /// The store.
    pub store: Arc<dyn Store>,
    /// Number of threads. Default 8.
    pub threads: usize,
    /// Whether records are put into the store. Default true.
    pub writes: bool,
    /// Maximum number of bytes that are put in a second. Default 1 GB; `None` for no limit, as for a store in memory.
    pub write_rate: Option<u64>,
    /// Whether damaged records are removed: for a disk that no other user writes. Default false.
    pub removes_damage: bool,
    /// Whether to read from the store. Default [`LoadRule::Always`].
    pub rule: LoadRule,
}

impl StoreOptions {
    /// Creates options with defaults.
    pub fn new(name: &str, store: Arc<dyn Store>) -> Self {
        let (name, write_rate, rule) = (name.to_owned(), Some(1_000_000_000), LoadRule::Always);
        Self { name, store, threads: 8, writes: true, write_rate, removes_damage: false, rule }
    }

    /// Returns the time that puts of these bytes take, at the write rate and at most 1 GB/s.
    pub(super) fn put_time(&self, bytes: f64) -> Duration {
        let rate = self.write_rate.unwrap_or(u64::MAX).clamp(1, 1_000_000_000);
        Duration::from_secs_f64(bytes / rate as f64)
    }
}

impl fmt::Debug for StoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreOptions({})", self.name)
    }
}

/// Options of a [`Tier`](crate::tier::Tier).
#[derive(Clone)]
pub struct TierOptions {
    /// Fingerprint of the model for each rank: [`Identity::of_ranks`](crate::identity::Identity::of_ranks).
    pub fingerprints: Vec<Fingerprint>,
    /// The key of checks. Remote stores, and folders that others can write, need one.
    pub secret: Option<Secret>,
    /// The stores, in the order in which they are asked: fast ones first.
    pub stores: Vec<StoreOptions>,
    /// Time after which a request does not wait any more, besides twice the estimated time. Default 100 ms.
    pub deadline: Duration,
    /// Time for which a find is repeated every 5 ms while no store has the whole prompt, since the stores last had more
    /// of it: another server computes it at the same time. The request may also wait to the deadline of its last
    /// question or fetch. If a question or fetch hangs, the request ends at the later of both times with the pages that
    /// earlier fetches brought: no other question is sent meanwhile. Default 0: a find is not repeated.
    pub patience: Duration,
    /// Time after which [`Tier::confirm`](crate::tier::Tier::confirm) does not wait for puts any more, besides twice
    /// their estimated time. A store hangs if none of its threads makes progress for `put_deadline` and twice the
    /// estimated time of a put: the puts that wait for it go to the next store. If no store has a record, the record
    /// goes back to the engine's queue. Otherwise a store that hangs does not get it later, even if the store is only
    /// slow: [`StoreStats::passed_over`] counts these puts. Default 5 s.
    pub put_deadline: Duration,
    /// Time for which a record that failed counts as absent. Default 10 s.
    pub negative: Duration,
    /// Maximum number of open puts. Set it above the number of a store's threads. Otherwise a store that hangs holds
    /// all open puts. Default 64.
    pub puts_max: usize,
    /// Called when [`Tier::turn`](crate::tier::Tier::turn) has work, so that an idle host does not poll. Threads of the
    /// tier call it, but also the host's own thread within a call of the tier: it must not block, lock what the caller
    /// of the tier holds, or call the tier.
    pub wake: Arc<dyn Fn() + Send + Sync>,
}

impl TierOptions {
    /// Creates options with defaults.
    pub fn new(fingerprints: Vec<Fingerprint>, stores: Vec<StoreOptions>) -> Self {
        let [deadline, put_deadline, negative] = [100, 5_000, 10_000].map(Duration::from_millis);
        let (secret, patience, puts_max, wake) = (None, Duration::ZERO, 64, Arc::new(|| ()));
        Self { fingerprints, secret, stores, deadline, patience, put_deadline, negative, puts_max, wake }
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        #[derive(Debug, Default)]
        pub(super) struct Counters {
            $(pub $name: AtomicU64,)*
        }

        /// What a store has done so far, and its present state. Each rank's part of a record counts as a record, but
        /// finds ask only for those of rank 0.
        #[derive(Clone, PartialEq, Eq, Debug, Default)]
        pub struct StoreStats {
            /// Name of the store.
            pub name: String,
            /// Number of waiting reads and puts.
            pub queue: usize,
            /// Whether the breaker stops the store.
            pub is_stopped: bool,
            $($(#[doc = $doc])* pub $name: u64,)*
        }

        impl Counters {
            pub fn stats(&self, name: &str, queue: usize, is_stopped: bool) -> StoreStats {
                let name = name.to_owned();
                StoreStats { name, queue, is_stopped, $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Names that the store was asked for.
    asked,
    /// Names that it had.
    found,
    /// Records that were read and accepted.
    read,
    /// Bytes of their pages.
    read_bytes,
    /// Records that were put.
    put,
    /// Bytes of these records.
    put_bytes,
    /// Records that the store already had when they were to be put.
    known,
    /// Damaged records that were removed.
    removed,
    /// Puts that the store did not get because it hung or was stopped.
    passed_over,
    /// Failed calls.
    failed,
}

/// Adds to a counter.
pub(super) fn add(counter: &AtomicU64, number: u64) {
    counter.fetch_add(number, Ordering::Relaxed);
}
