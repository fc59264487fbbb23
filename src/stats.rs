//! The counters and levels of an engine: [`Stats`].

// `system/` and `engine/` update some counters; `Engine::stats` reads the others and the levels from the tables.

use std::fmt;
use std::ops::{Add, Sub};

use crate::error::Error;

/// Defines [`Stats`] and the list of its fields. The documentation of a field is its help text in Prometheus's format.
macro_rules! stats {
    (
        counters { $(#[doc = $counter_help:literal] $counter:ident,)* }
        levels { $(#[doc = $level_help:literal] $level:ident,)* }
    ) => {
        /// Counters and levels of an engine. Reading them is O(1).
        ///
        /// `later - earlier` contains the differences of the counters, and the levels of `later`. `{stats}` prints a
        /// summary, and [`Stats::prometheus`] formats all numbers for a monitor.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
        #[non_exhaustive]
        pub struct Stats {
            $(#[doc = $counter_help] pub $counter: u64,)*
            $(#[doc = $level_help] pub $level: u32,)*
        }

        impl Sub for Stats {
            type Output = Self;

            fn sub(self, earlier: Self) -> Self {
                Self { $($counter: self.$counter.saturating_sub(earlier.$counter),)* ..self }
            }
        }

        impl Add for Stats {
            type Output = Self;

            /// Returns the sums of the counters, and the levels of `self`: those of the engine that runs now, if
            /// `earlier` is of an engine before it.
            fn add(self, earlier: Self) -> Self {
                Self { $($counter: self.$counter + earlier.$counter,)* ..self }
            }
        }

        impl Stats {
            fn numbers(&self) -> impl Iterator<Item = Number> {
                let counters = [$((stringify!($counter), $counter_help, self.$counter)),*];
                let levels = [$((stringify!($level), $level_help, u64::from(self.$level))),*];
                let number = |is_counter, (name, help, value): (&'static str, &'static str, u64)| {
                    Number { name, help: help.trim(), is_counter, value }
                };
                let counters = counters.into_iter().map(move |one| number(true, one));
                counters.chain(levels.into_iter().map(move |one| number(false, one)))
            }
        }
    };
}

stats! {
    counters {
        /// Admitted prompts with at least one committed step. A preempted and resumed prompt counts once.
        prompts,
        /// Tokens of the prompts that `prompts` counts.
        prompt_tokens,
        /// Tokens of `prompt_tokens` that were cached, counted when a prompt's first step is committed.
        hit_tokens,
        /// Tokens of resumed sequences that were still cached, counted at the first commit after the resume.
        resume_hit_tokens,
        /// Tokens that group 0 had cached, but that admitted and resumed sequences must compute again.
        lost_hit_tokens,
        /// Tokens of `lost_hit_tokens` behind which cells were cached that have been evicted.
        evicted_hit_tokens,
        /// Tokens of `lost_hit_tokens` behind which a state was cached that has been evicted for a later one.
        superseded_hit_tokens,
        /// Tokens of `lost_hit_tokens` that were a hit, but the sequence fit the pool only without it.
        ignored_hit_tokens,
        /// Tokens whose K and V committed steps computed, of sequences that still ran at the commit.
        computed_tokens,
        /// Prompts admitted.
        admissions,
        /// Calls other than `append` and `admission` that were rejected for lack of pages, rows, tokens or steps.
        refusals,
        /// Sequences preempted.
        preemptions,
        /// Preempted sequences resumed.
        resumes,
        /// Steps aborted.
        aborts,
        /// Children of forks.
        forks,
        /// Sequences rolled back.
        rollbacks,
        /// Verified drafts, which are drafts passed to `accept`.
        drafts,
        /// Guessed tokens of verified drafts. The root of a draft is no guess if it is the last sampled token.
        draft_tokens,
        /// Guessed tokens that `accept` kept.
        accepted_tokens,
        /// Computed pages that sequences added to the prefix tree.
        published_pages,
        /// Computed pages released because the tree already contained the same tokens.
        duplicate_pages,
        /// Pages of group 0 evicted from the device.
        evicted_pages,
        /// Cells evicted: cached pages of one group of layers other than group 0.
        evicted_cells,
        /// States of sequences that became cells at marks.
        kept_states,
        /// Cells with a state that their last user superseded by a later state.
        superseded_states,
        /// Marks given up because pages for a second state lacked.
        given_up_marks,
        /// Tokens of matches that were in swap memory alone and were loaded.
        swap_hit_tokens,
        /// Pages saved to swap memory, including failed and cancelled saves.
        saved_pages,
        /// Pages that were copied to swap memory at their eviction, because no earlier save had copied them.
        forced_pages,
        /// Pages copied from swap memory to the device.
        loaded_pages,
        /// Pages that came from a store.
        fetched_pages,
        /// Pages that stores have taken.
        put_pages,
        /// Pages dropped from swap memory to make room.
        swap_evicted_pages,
        /// Cached pages dropped from the last tier that had them, unless a store has them; 0 without swap memory.
        lost_pages,
        /// Pages whose copy to swap memory failed.
        failed_saves,
    }
    levels {
        /// Pages free now.
        free_pages,
        /// Pages that belong to one sequence.
        private_pages,
        /// Pages in the tree: evictable and protected.
        cached_pages,
        /// Released pages that an unfinished step may still access.
        fenced_pages,
        /// Pages promised to sequences and not yet taken.
        outstanding_pages,
        /// Pages of the tree that no sequence or fetch uses.
        evictable_pages,
        /// Pages of the tree that sequences or fetches use.
        protected_pages,
        /// Cells in the tree: cached pages of one group of layers other than group 0.
        cells,
        /// Pages of the tree that cells of windows and chunks have.
        cell_pages,
        /// Pages of the tree that cached states have.
        state_pages,
        /// Evictable pages that have a copy in swap memory.
        clean_pages,
        /// Swap pages that contain cached pages.
        swap_cached_pages,
        /// Swap pages that are free and ready to be written.
        swap_free_pages,
        /// Sequences, preempted ones included.
        sequences,
        /// Steps planned and not yet complete.
        steps,
    }
}

struct Number {
    name: &'static str,
    help: &'static str,
    is_counter: bool,
    value: u64,
}

impl Stats {
    /// Returns `result`, and counts it if it is a rejection for lack of resources.
    pub(crate) fn count_refusal<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        self.refusals += u64::from(result.as_ref().is_err_and(Error::is_shortage));
        result
    }

    /// Returns the fraction of prompt tokens that were cached, from 0 to 1; 0 without prompts.
    pub fn hit_rate(&self) -> f64 {
        if self.prompt_tokens == 0 { 0.0 } else { self.hit_tokens as f64 / self.prompt_tokens as f64 }
    }

    /// Returns the tokens of [`Stats::lost_hit_tokens`] behind which no state, or not every page of a window or a
    /// chunk, was ever cached: there was no mark, or a mark was given up, or promises needed the pages.
    pub fn unmarked_hit_tokens(&self) -> u64 {
        let others = self.evicted_hit_tokens + self.superseded_hit_tokens + self.ignored_hit_tokens;
        self.lost_hit_tokens.saturating_sub(others)
    }

    /// Formats the stats in Prometheus's text format (version 0.0.4). Field NAME becomes the metric
    /// `kvarena_NAME_total` if it is a counter and `kvarena_NAME` if it is a level, with help and type.
    ///
    /// ```
    /// # use kvarena::stats::Stats;
    /// let text = Stats::default().prometheus().to_string();
    /// assert!(text.contains("# TYPE kvarena_hit_tokens_total counter\nkvarena_hit_tokens_total 0\n"));
    /// assert!(text.contains("# TYPE kvarena_free_pages gauge\nkvarena_free_pages 0\n"));
    /// ```
    pub fn prometheus(&self) -> impl fmt::Display {
        Prometheus(*self)
    }
}

struct Prometheus(Stats);

impl fmt::Display for Prometheus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Number { name, help, is_counter, value } in self.0.numbers() {
            let (end, kind) = if is_counter { ("_total", "counter") } else { ("", "gauge") };
            writeln!(f, "# HELP kvarena_{name}{end} {help}")?;
            writeln!(f, "# TYPE kvarena_{name}{end} {kind}")?;
            writeln!(f, "kvarena_{name}{end} {value}")?;
        }
        Ok(())
    }
}

/// Prints four lines. The last one has no newline.
impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "tokens: {} of {} prompts, {} hit ({:.1} %), {} hit by resumes, {} computed, \
             {} of {} draft tokens accepted in {} drafts",
            self.prompt_tokens,
            self.prompts,
            self.hit_tokens,
            100.0 * self.hit_rate(),
            self.resume_hit_tokens,
            self.computed_tokens,
            self.accepted_tokens,
            self.draft_tokens,
            self.drafts,
        )?;
        writeln!(
            f,
            "calls: {} admissions, {} refusals, {} preemptions, {} resumes, {} forks, {} rollbacks, {} aborts",
            self.admissions, self.refusals, self.preemptions, self.resumes, self.forks, self.rollbacks, self.aborts,
        )?;
        writeln!(
            f,
            "pages so far: {} published, {} duplicates, {} evicted",
            self.published_pages, self.duplicate_pages, self.evicted_pages,
        )?;
        write!(
            f,
            "pages now: {} free, {} private, {} cached ({} evictable, {} protected), {} fenced, {} promised; \
             {} sequences, {} steps",
            self.free_pages,
            self.private_pages,
            self.cached_pages,
            self.evictable_pages,
            self.protected_pages,
            self.fenced_pages,
            self.outstanding_pages,
            self.sequences,
            self.steps,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Stats {
        Stats {
            prompts: 3,
            prompt_tokens: 40,
            hit_tokens: 10,
            admissions: 4,
            drafts: 2,
            draft_tokens: 12,
            accepted_tokens: 5,
            free_pages: 7,
            sequences: 1,
            ..Stats::default()
        }
    }

    #[test]
    fn a_difference_subtracts_counters_and_keeps_levels() {
        let later = Stats { prompts: 5, hit_tokens: 30, accepted_tokens: 9, free_pages: 2, ..some() };
        let since = later - some();
        let levels = Stats { free_pages: 2, sequences: 1, ..Stats::default() };
        let want = Stats { prompts: 2, hit_tokens: 20, accepted_tokens: 4, ..levels };
        assert_eq!(since, want);
    }

    #[test]
    fn stats_print_four_lines() {
        let text = some().to_string();
        assert_eq!(text.lines().count(), 4);
        assert!(text.starts_with(
            "tokens: 40 of 3 prompts, 10 hit (25.0 %), 0 hit by resumes, 0 computed, \
             5 of 12 draft tokens accepted in 2 drafts\n"
        ));
        assert!(text.ends_with("0 fenced, 0 promised; 1 sequences, 0 steps"));
    }

    #[test]
    fn a_monitor_reads_every_number_once() {
        let text = some().prometheus().to_string();
        assert!(text.ends_with('\n'));
        let metrics: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(metrics.len() * 3, text.lines().count());
        let mut names: Vec<_> = metrics.iter().map(|line| line.split(' ').next()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), metrics.len());
        assert!(
            metrics.contains(&"kvarena_prompts_total 3")
                && metrics.contains(&"kvarena_accepted_tokens_total 5")
                && metrics.contains(&"kvarena_free_pages 7")
        );
        let legal = |c: char| c.is_ascii_alphanumeric() || c == '_';
        assert!(metrics.iter().all(|line| line.split(' ').next().is_some_and(|name| name.chars().all(legal))));
    }
}
