//! The state of a connection, and its time limits.
//!
//! A connection waits for a request's headers, is busy with a request until its answer is written, or is idle.

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};

use super::options::Bounds;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// The client has connected, or has begun a request whose headers are incomplete.
    Header,
    /// The server reads a request's body.
    Body,
    /// The server answers a request whose body has been read or dropped.
    Answer,
    /// The last answer is written.
    Idle,
}

impl Phase {
    pub fn is_busy(self) -> bool {
        matches!(self, Self::Body | Self::Answer)
    }
}

#[derive(Clone, Copy, Debug)]
struct State {
    phase: Phase,
    since: Instant,
    /// The time at which the client stopped taking bytes; `None` while it takes bytes.
    stalled: Option<Instant>,
}

/// A connection, shared by the table and its own task.
#[derive(Debug)]
pub struct Peer {
    state: watch::Sender<State>,
    /// Notified if the connection must close for another one.
    pub evicted: Notify,
}

impl Default for Peer {
    fn default() -> Self {
        let now = Instant::now();
        let state = State { phase: Phase::Header, since: now, stalled: None };
        Self { state: watch::Sender::new(state), evicted: Notify::new() }
    }
}

impl Peer {
    pub fn phase(&self) -> Phase {
        self.state.borrow().phase
    }

    /// Returns the time since which the connection has been in its phase.
    pub fn since(&self) -> Instant {
        self.state.borrow().since
    }

    /// Records that the connection enters a phase.
    pub fn enter(&self, phase: Phase) {
        let since = Instant::now();
        self.state.send_modify(|state| (state.phase, state.since) = (phase, since));
    }

    /// Records whether the client takes bytes.
    pub fn takes(&self, takes: bool) {
        self.state.send_if_modified(|state| {
            let changed = state.stalled.is_none() != takes;
            if changed {
                state.stalled = (!takes).then(Instant::now);
            }
            changed
        });
    }

    /// Waits until the connection exceeds a time limit, or must close for another connection.
    pub async fn overdue(&self, bounds: &Bounds) {
        let mut states = self.state.subscribe();
        loop {
            let state = *states.borrow_and_update();
            let deadline = match (state.stalled, state.phase) {
                (Some(since), _) => Some(since + bounds.idle),
                (None, Phase::Header) => Some(state.since + bounds.header),
                (None, Phase::Idle) => Some(state.since + bounds.idle),
                (None, Phase::Body | Phase::Answer) => None,
            };
            let late = async {
                match deadline {
                    Some(deadline) => sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = late => return,
                () = self.evicted.notified() => return,
                // The sender lives as long as `self`.
                _ = states.changed() => {}
            }
        }
    }
}
