//! Stores of K and V behind the serving loop: the loop's view of a [`Tier`].

use std::sync::mpsc::Receiver;
use std::time::Duration;

use kvarena::backend::SwapMemory;
use kvarena::{Engine, Namespace, TokenId};
use kvarena_tiers::miss::Miss;
use kvarena_tiers::tier::{Find, RankMemory, StoreStats, Tier, WaitStats};

use crate::error::{Error, Result, with_cause};

/// Stores of K and V, as the serving loop uses them.
pub trait Stores<B> {
    /// Searches the stores for a prompt. Returns whether the request waits until `turn` reports it.
    fn find(&mut self, id: u64, engine: &Engine<B>, namespace: Namespace, prompt: &[TokenId]) -> bool;

    /// Makes sure that the stores have what the engine has of a prompt. Returns whether the request waits until `turn`
    /// reports it.
    fn confirm(&mut self, id: u64, engine: &mut Engine<B>, namespace: Namespace, prompt: &[TokenId]) -> bool;

    /// Ends the wait of a request.
    fn cancel(&mut self, id: u64);

    /// Ends and begins fetches and puts. Calls `ready` with the requests that wait no more. Returns whether work
    /// remains.
    ///
    /// # Errors
    /// The backend failed.
    fn turn(&mut self, engine: &mut Engine<B>, ready: &mut dyn FnMut(u64)) -> Result<bool>;

    /// Waits until `turn` has work, or until the time has passed.
    fn wait(&mut self, time: Duration);

    /// Puts all records. Returns whether nothing is left.
    ///
    /// # Errors
    /// The backend failed.
    fn flush(&mut self, engine: &mut Engine<B>, limit: Duration) -> Result<bool>;

    /// Returns what the stores have done.
    fn counters(&self) -> StoreCounters;
}

/// What stores have done so far.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StoreCounters {
    /// Counters of each store, in the order in which they are asked.
    pub stores: Vec<StoreStats>,
    /// Number of records that were not accepted, for each reason.
    pub misses: Vec<(&'static str, u64)>,
    /// Waits of requests.
    pub waits: WaitStats,
}

impl StoreCounters {
    /// Returns the report at the end of a run: a line for each store, the waits, and the misses, if any.
    pub fn report(&self) -> String {
        let mut lines = Vec::new();
        for stats in &self.stores {
            let (read, put) = (stats.read_bytes as f64 / 1e6, stats.put_bytes as f64 / 1e6);
            lines.push(format!(
                "store {}: {} of {} records found, {} read ({read:.1} MB), {} put ({put:.1} MB), {} already there, \
                 {} removed, {} passed over, {} calls failed",
                stats.name,
                stats.found,
                stats.asked,
                stats.read,
                stats.put,
                stats.known,
                stats.removed,
                stats.passed_over,
                stats.failed
            ));
        }
        let WaitStats { waited, late, time, pages, confirmed, unconfirmed, compared: _ } = self.waits;
        let mean = time.as_secs_f64() * 1e3 / waited.max(1) as f64;
        lines.push(format!(
            "waits for stores: {waited} of {mean:.1} ms on average, {late} too late; {pages} pages of prompts read"
        ));
        if confirmed > 0 {
            lines.push(format!("prompts for other servers: {confirmed}, {unconfirmed} of them not whole in a store"));
        }
        let misses = self.misses.iter().filter(|(_, count)| *count > 0);
        let misses: Vec<_> = misses.map(|(miss, count)| format!("{count} {miss}")).collect();
        if !misses.is_empty() {
            lines.push(format!("misses: {}", misses.join(", ")));
        }
        lines.join("\n") + "\n"
    }
}

/// A tier whose `wake` sends to `woken`.
pub struct TierStores<B: SwapMemory> {
    tier: Tier<B>,
    woken: Receiver<()>,
}

impl<B: SwapMemory> TierStores<B> {
    /// Creates the loop's view of a tier.
    pub fn new(tier: Tier<B>, woken: Receiver<()>) -> Self {
        Self { tier, woken }
    }
}

impl<B> Stores<B> for TierStores<B>
where
    B: RankMemory,
    B::Error: 'static,
{
    fn find(&mut self, id: u64, engine: &Engine<B>, namespace: Namespace, prompt: &[TokenId]) -> bool {
        self.tier.find(id, engine, namespace, prompt) == Find::Waiting
    }

    fn confirm(&mut self, id: u64, engine: &mut Engine<B>, namespace: Namespace, prompt: &[TokenId]) -> bool {
        self.tier.confirm(id, engine, namespace, prompt) == Find::Waiting
    }

    fn cancel(&mut self, id: u64) {
        self.tier.cancel(id);
    }

    fn turn(&mut self, engine: &mut Engine<B>, ready: &mut dyn FnMut(u64)) -> Result<bool> {
        self.woken.try_iter().for_each(drop);
        self.tier.turn(engine, |id, _| ready(id)).map_err(|error| Error::run(with_cause(&error)))?;
        Ok(!self.tier.is_idle())
    }

    fn wait(&mut self, time: Duration) {
        // Without a message, the time has passed.
        let _ = self.woken.recv_timeout(time);
    }

    fn flush(&mut self, engine: &mut Engine<B>, limit: Duration) -> Result<bool> {
        self.tier.flush(engine, limit).map_err(|error| Error::run(with_cause(&error)))
    }

    fn counters(&self) -> StoreCounters {
        let misses = Miss::ALL.iter().map(|&miss| (miss.text(), self.tier.misses().get(miss))).collect();
        StoreCounters { stores: self.tier.stats(), misses, waits: self.tier.waits() }
    }
}
