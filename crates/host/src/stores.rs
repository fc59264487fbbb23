//! Stores of K and V behind the serving loop: the loop's view of a [`Tier`].

use std::fmt::Write;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use kvarena::backend::SwapMemory;
use kvarena::{Engine, Namespace, TokenId};
use kvarena_tiers::tier::{Find, Tier};

use crate::error::{Error, Result, with_cause};

/// Stores of K and V, as the serving loop uses them.
pub trait Stores<B> {
    /// Searches the stores for a prompt. Returns whether the request waits until `turn` reports it.
    fn find(&mut self, id: u64, engine: &Engine<B>, namespace: Namespace, prompt: &[TokenId]) -> bool;

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

    /// Returns lines about each store.
    fn report(&self) -> String;
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
    B: SwapMemory<Read: AsRef<[u8]>, Write: AsMut<[u8]>>,
    B::Error: 'static,
{
    fn find(&mut self, id: u64, engine: &Engine<B>, namespace: Namespace, prompt: &[TokenId]) -> bool {
        self.tier.find(id, engine, namespace, prompt) == Find::Waiting
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

    fn report(&self) -> String {
        let mut report = String::new();
        for stats in self.tier.stats() {
            let (read, put) = (stats.read_bytes as f64 / 1e6, stats.put_bytes as f64 / 1e6);
            _ = writeln!(
                report,
                "store {}: {} of {} records found, {} read ({read:.1} MB), {} put ({put:.1} MB), {} already there, {} calls failed",
                stats.name, stats.found, stats.asked, stats.read, stats.put, stats.known, stats.failed
            );
        }
        let misses: Vec<_> = self.tier.misses().iter().map(|(miss, count)| format!("{count} {miss}")).collect();
        if !misses.is_empty() {
            _ = writeln!(report, "misses: {}", misses.join(", "));
        }
        report
    }
}
