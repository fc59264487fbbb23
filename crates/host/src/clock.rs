//! Measures the time of a run by part of a step's work.

use std::time::{Duration, Instant};

/// A part of a step's work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// The serving loop with the engine's calls: admit, plan, append, commit, complete, finish.
    Engine,
    /// Matrix products of the layers, and all work of experts and of latent projections.
    Products,
    /// The backend's calls: storing K and V, and attention over the cached pages.
    Attention,
    /// Norms, rotation, activation, embedding, residuals.
    Elementwise,
    /// The product that computes logits.
    Logits,
    /// Choosing tokens.
    Sampling,
    /// Launching a step on a GPU.
    Launch,
    /// Waiting for a GPU.
    Wait,
}

impl Part {
    /// All parts, in the order of the report.
    pub const ALL: [Part; 8] = [
        Part::Engine,
        Part::Products,
        Part::Attention,
        Part::Elementwise,
        Part::Logits,
        Part::Sampling,
        Part::Launch,
        Part::Wait,
    ];

    /// Returns the name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Part::Engine => "engine",
            Part::Products => "products",
            Part::Attention => "attention",
            Part::Elementwise => "elementwise",
            Part::Logits => "logits",
            Part::Sampling => "sampling",
            Part::Launch => "launching",
            Part::Wait => "waiting",
        }
    }
}

/// Sums time by part. The time between two laps counts for the part of the later lap.
#[derive(Clone, Debug)]
pub struct Clock {
    last: Instant,
    spent: [Duration; Part::ALL.len()],
}

impl Default for Clock {
    fn default() -> Self {
        Self { last: Instant::now(), spent: Default::default() }
    }
}

impl Clock {
    /// Starts a lap. The time since the previous lap counts for no part.
    pub fn start(&mut self) {
        self.last = Instant::now();
    }

    /// Adds the time since the last lap to `part`.
    pub fn lap(&mut self, part: Part) {
        let now = Instant::now();
        self.spent[part as usize] += now - self.last;
        self.last = now;
    }

    /// Returns the time of `part` so far.
    pub fn spent(&self, part: Part) -> Duration {
        self.spent[part as usize]
    }
}
