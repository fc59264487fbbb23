//! The counters of a run, and its report.

use kvarena::stats::Stats;

use crate::clock::{Clock, Part};
use crate::histogram::Histogram;

/// Counts of a run.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Tally {
    /// Tokens of all prompts submitted.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub new_tokens: u64,
    /// Steps that were committed.
    pub steps: u64,
    /// Steps that failed.
    pub failed_steps: u64,
    /// Steps that failed or were planned after one that failed.
    pub aborted_steps: u64,
    /// Streams that were preempted because pages ran out, or went back to the queue in favour of another group of
    /// requests.
    pub preemptions: u64,
    /// Samples that share their parent's pages.
    pub forks: u64,
    /// Streams that were [cancelled](crate::stream::Finish::Cancelled).
    pub cancelled: u64,
    /// Prompt tokens of first samples that were cached at the first admission.
    pub cached_tokens: u64,
    /// Streams that a plan left out because their pages were loading, counted in each attempt to plan a step.
    pub load_waits: u64,
    /// For each stream that waited for its pages: time from the first step without the stream to the first step with
    /// it.
    pub load_time: Histogram,
    /// Drafts that steps checked.
    pub drafted: u64,
    /// Accepted drafts.
    pub accepted: u64,
    /// Streams whose drafts were checked, counted in each step.
    pub checks: u64,
    /// Wall-clock time of serving, in seconds.
    pub seconds: f64,
    /// Time until a step ends, from the end of the previous step. After an idle time, it begins at the step's start.
    pub step_time: Histogram,
    /// Time from the submission of a request to each stream's first token.
    pub first_token: Histogram,
}

impl Tally {
    /// Returns the report at the end of a run: a few lines for a person.
    pub fn report(&self, stats: &Stats, clock: &Clock) -> String {
        let seconds = self.seconds.max(1e-9);
        let ms = |seconds: f64| seconds * 1e3;
        let mut lines = vec![
            format!(
                "{} new tokens in {seconds:.2} s: {:.1} tokens/s, {} steps of {:.1} computed tokens",
                self.new_tokens,
                self.new_tokens as f64 / seconds,
                self.steps,
                stats.computed_tokens as f64 / self.steps.max(1) as f64,
            ),
            format!(
                "time to first token: median {:.1} ms, worst {:.1} ms",
                ms(self.first_token.quantile(0.5)),
                ms(self.first_token.greatest()),
            ),
            format!(
                "reuse: {} of {} prompt tokens needed no computing; {} pages evicted",
                self.cached_tokens, self.prompt_tokens, stats.evicted_pages,
            ),
            format!(
                "forks {}, preemptions {}, aborted steps {}, cancelled {}",
                self.forks, self.preemptions, self.aborted_steps, self.cancelled,
            ),
        ];
        if stats.saved_pages + stats.loaded_pages > 0 {
            lines.push(format!(
                "swap memory: {} tokens hit; {} pages saved ({} at their eviction), {} loaded, {} evicted; {} waits, \
                 median {:.1} ms, worst {:.1} ms",
                stats.swap_hit_tokens,
                stats.saved_pages,
                stats.forced_pages,
                stats.loaded_pages,
                stats.swap_evicted_pages,
                self.load_time.count(),
                ms(self.load_time.quantile(0.5)),
                ms(self.load_time.greatest()),
            ));
        }
        if stats.kept_states > 0 {
            lines.push(format!(
                "states: {} cached, {} superseded by later ones, {} marks given up; {} tokens had K and V but no state: \
                 {} were behind no mark, {} before a state evicted for a later one, {} before another evicted state, \
                 {} did not fit",
                stats.kept_states,
                stats.superseded_states,
                stats.given_up_marks,
                stats.lost_hit_tokens,
                stats.unmarked_hit_tokens(),
                stats.superseded_hit_tokens,
                stats.evicted_hit_tokens,
                stats.ignored_hit_tokens,
            ));
        }
        if self.checks > 0 {
            let Self { accepted, drafted, checks, .. } = self;
            let each = *accepted as f64 / *checks as f64;
            lines.push(format!("drafts: {accepted} of {drafted} accepted, {each:.2} per stream and step with drafts"));
        }
        let parts = Part::ALL.into_iter().filter(|&part| !clock.spent(part).is_zero());
        let share = |part| clock.spent(part).as_secs_f64() / seconds * 100.0;
        let parts: Vec<_> = parts.map(|part| format!(" {} {:.1} %", part.name(), share(part))).collect();
        lines.push(format!("time:{}\n", parts.join(",")));
        lines.join("\n")
    }
}
