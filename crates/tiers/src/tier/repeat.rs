//! Finds that are repeated while another server computes the prompt.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvarena::Engine;

use super::Tier;
use super::alarm::after;
use super::jobs::Ask;
use super::ranks::RankMemory;

/// Time between two questions. It is longer if the stores take long to answer, so that questions fill at most a fifth
/// of the time.
const PAUSE: Duration = Duration::from_millis(5);

/// The repetition of a find.
pub(super) struct Repeat {
    /// When to send the next one; `None` while one or a fetch is open.
    again: Option<Instant>,
    /// When to stop. No deadline is earlier.
    pub end: Instant,
    /// The most pages that the engine and the stores had.
    most: u32,
}

impl Repeat {
    pub fn new(now: Instant, patience: Duration) -> Self {
        Self { again: None, end: after(now, patience), most: 0 }
    }
}

impl<B> Tier<B>
where
    B: RankMemory,
{
    /// Returns whether a request waits for records that no store has yet. More pages than before renew its patience.
    pub(super) fn is_patient(&mut self, engine: &Engine<B>, serial: u64) -> bool {
        let (now, patience) = (Instant::now(), self.options.patience);
        if patience.is_zero() || !self.shared.has_use(self.requests[&serial].most, now) {
            return false;
        }
        let Some((_, target)) = self.target(engine, serial) else { return false };
        let (page_size, record_pages) = (self.shared.page_size, self.shared.record_pages);
        let request = self.requests.get_mut(&serial).expect("the caller has found it");
        if target > request.repeat.most {
            (request.repeat.most, request.repeat.end) = (target, after(now, patience));
        }
        let whole = (request.prompt.len() as u32 - 1) / page_size / record_pages * record_pages;
        target < whole && now < request.repeat.end
    }

    /// Lets a request search again after a pause.
    pub(super) fn pause(&mut self, serial: u64) {
        let request = self.requests.get_mut(&serial).expect("the caller has found it");
        let now = Instant::now();
        let took = request.ask.as_ref().map_or(Duration::ZERO, |ask| ask.took);
        let again = (now + PAUSE.max(4 * took)).min(request.repeat.end);
        request.repeat.again = Some(again);
        request.deadline = (again + self.options.deadline).max(request.repeat.end);
        self.alarm.set(again);
    }

    /// Sends the questions that are due again.
    pub(super) fn repeat(&mut self, engine: &Engine<B>, ready: &mut Vec<(u64, u32)>) {
        let now = Instant::now();
        for (&serial, request) in &mut self.requests {
            if request.repeat.again.take_if(|again| *again <= now).is_none() {
                continue;
            }
            let Ok(Some(lookup)) = engine.lookup(request.namespace, &request.prompt) else {
                ready.push((serial, request.pages));
                continue;
            };
            let (keys, located) = request.ask.take().map(|ask| (ask.keys, ask.located)).unwrap_or_default();
            let (wanted, prompt) = (lookup.wanted(), Arc::clone(&request.prompt));
            let space = self.shared.space(lookup.names());
            let ask = Ask { keys, located, ..Ask::new(serial, space, lookup, prompt, request.most, wanted) };
            self.alarm.set(request.deadline);
            self.shared.ask(0, Box::new(ask));
        }
    }
}
