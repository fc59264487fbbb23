//! The engine's thread: takes jobs from the queue, serves them step by step, and sends events to the clients.

use std::collections::HashMap;

use kvarena::stats::Stats;

use super::announcer::{self, Announcer};
use super::job::{Event, Job, Logprob};
use super::metrics::{Ended, Metrics};
use super::queue::Queue;
use kvarena_host::error::{Error, Result};
use kvarena_host::runner::Runner;
use kvarena_host::server::{Server, Sink};
use kvarena_host::stream::{Finish, Stream};

/// Serves the jobs of the queue until the queue is closed and all jobs have ended.
///
/// # Errors
/// The run failed. In this case, each waiting client has received an [`Event::Failed`].
pub fn serve<R: Runner>(
    server: &mut Server<R>,
    queue: &Queue<Job>,
    metrics: &Metrics,
    announcer: Option<Announcer>,
) -> Result<()> {
    let mut engine_loop = EngineLoop { announcer, ..EngineLoop::default() };
    let outcome = engine_loop.serve(server, queue, metrics);
    if let Err(error) = &outcome {
        queue.close();
        engine_loop.receive(server, queue);
        for job in engine_loop.jobs.into_values() {
            // A client that has disconnected needs no event.
            let _ = job.events.send(Event::Failed(error.message.clone()));
        }
    }
    outcome
}

/// The state of the engine's thread.
#[derive(Default)]
struct EngineLoop {
    /// Submitted jobs that have not ended, by the number of their request.
    jobs: HashMap<usize, Job>,
    /// Jobs from the queue that are not submitted yet.
    incoming: Vec<Job>,
    ended: Ended,
    /// Publishes cached pages to routers, if requested.
    announcer: Option<Announcer>,
}

impl EngineLoop {
    fn serve<R: Runner>(&mut self, server: &mut Server<R>, queue: &Queue<Job>, metrics: &Metrics) -> Result<()> {
        loop {
            self.receive(server, queue);
            let went_on = server.step(self)?;
            metrics.post(server, self.ended);
            self.publish(server);
            if went_on {
                continue;
            }
            while (server.turn_stores()? || self.announcer.is_some()) && !queue.wait_at_most(announcer::PAUSE) {
                self.publish(server);
                metrics.post(server, self.ended);
            }
            // Stores may have worked since the last step.
            metrics.post(server, self.ended);
            if !queue.wait() {
                return Ok(());
            }
        }
    }

    fn publish<R: Runner>(&mut self, server: &mut Server<R>) {
        if let Some(announcer) = &mut self.announcer {
            announcer.publish(server.engine_mut());
        }
    }

    fn receive<R: Runner>(&mut self, server: &mut Server<R>, queue: &Queue<Job>) {
        queue.take(server.stream_counts().waiting, &mut self.incoming);
        for job in self.incoming.drain(..) {
            match server.submit_since(job.request.clone(), job.since) {
                Ok(number) => {
                    self.jobs.insert(number, job);
                }
                Err(error) => {
                    let _ = job.events.send(Event::Failed(error.message));
                }
            }
        }
    }
}

impl Sink for EngineLoop {
    fn token(&mut self, stream: &Stream, logits: &[f32]) {
        let Some(job) = self.jobs.get(&stream.request) else { return };
        let token = *stream.tokens.last().expect("the stream has a new token");
        // If the step kept no logits for this token, `logits` is empty and the event has no log-probability.
        let known = job.logprobs.filter(|_| !logits.is_empty());
        let event = Event::Token {
            choice: job.first_choice + stream.sample,
            token,
            cached: stream.cached_tokens,
            drafts: [stream.drafted, stream.accepted],
            logprob: known.map(|top| logprob(logits, token, top as usize)),
        };
        let _ = job.events.send(event);
    }

    fn prompt(&mut self, stream: &Stream, position: u32, logits: &[f32]) {
        let Some(job) = self.jobs.get(&stream.request).filter(|_| !logits.is_empty()) else {
            return;
        };
        let token = job.request.prompt[position as usize].raw();
        let top = job.logprobs.unwrap_or(0) as usize;
        let logprob = logprob(logits, token, top);
        let _ = job.events.send(Event::Prompt { choice: job.first_choice, position, logprob });
    }

    fn done(&mut self, stream: &Stream, last: bool) {
        let finish = stream.finish.expect("the stream has ended");
        match finish {
            Finish::Stop => self.ended.stopped += 1,
            Finish::Length => self.ended.at_length += 1,
            Finish::Cancelled => self.ended.cancelled += 1,
        }
        if let Some(job) = self.jobs.get(&stream.request) {
            let choice = job.first_choice + stream.sample;
            let _ = job.events.send(Event::Done { choice, finish });
        }
        if last {
            self.jobs.remove(&stream.request);
        }
    }

    fn ends(&mut self, stream: &Stream) -> Option<Finish> {
        let job = self.jobs.get(&stream.request)?;
        job.readers.ends(job.first_choice + stream.sample)
    }
}

/// Returns the log-probabilities of a token and of the `top` most likely tokens. O(vocabulary * top) in the worst case.
fn logprob(logits: &[f32], token: u32, top: usize) -> Logprob {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - greatest).exp()).sum();
    let log = |x: f32| (f64::from(x - greatest) - sum.ln()) as f32;
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(top + 1);
    for (&logit, id) in logits.iter().zip(0..) {
        let before = best.partition_point(|&(_, other)| other >= logit);
        if before < top {
            best.insert(before, (id, logit));
            best.truncate(top);
        }
    }
    best.iter_mut().for_each(|(_, logit)| *logit = log(*logit));
    Logprob { own: log(logits[token as usize]), top: best }
}

/// Checks that an idle server's state is consistent, and that every page is free or cached. Returns a line for the
/// output.
///
/// # Errors
/// The audit failed.
pub fn audit<R: Runner>(server: &Server<R>) -> Result<String> {
    let broken = |what: String| Error::run(format!("the audit at the end failed: {what}"));
    server.engine().verify().map_err(|what| broken(what.to_string()))?;
    let stats = server.engine().stats();
    // A model whose layers keep a state reserves a page.
    let pages = server.engine().shape().usable_pages();
    let Stats { free_pages, cached_pages, sequences, steps, protected_pages, .. } = stats;
    let held = [sequences, steps, protected_pages, stats.private_pages, stats.fenced_pages];
    if held != [0; 5] || free_pages + cached_pages != pages {
        return Err(broken(format!("some of the {pages} pages are in use:\n{stats}")));
    }
    Ok(format!("verified: {free_pages} of {pages} pages are free and {cached_pages} are cached"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_are_those_of_all_tokens() {
        let logits = [1.0, 3.0, 2.0, 3.0, f32::NEG_INFINITY];
        let sum = (1_f64.exp() + 2_f64.exp() + 2.0 * 3_f64.exp()).ln();
        let found = logprob(&logits, 2, 3);
        assert!((f64::from(found.own) - (2.0 - sum)).abs() < 1e-6);
        let tokens: Vec<u32> = found.top.iter().map(|&(token, _)| token).collect();
        assert_eq!(tokens, [1, 3, 2], "tokens of equal logits are in the order of their ids");
        assert!((f64::from(found.top[0].1) - (3.0 - sum)).abs() < 1e-6);
        assert_eq!(logprob(&logits, 4, 0), Logprob { own: f32::NEG_INFINITY, top: Vec::new() });
    }
}
