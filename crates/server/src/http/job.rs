//! The messages between a client's task and the engine's thread: jobs, events, and cancellation.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::intake::Held;
use kvarena_host::request::Request;
use kvarena_host::stream::Finish;

/// A prompt that a client's request submits.
#[derive(Debug)]
pub struct Job {
    pub request: Request,
    /// Time of the job's creation, when the server has read and checked the request.
    pub since: Instant,
    /// Number of the first choice within the client's request.
    pub first_choice: u32,
    /// Number of most likely tokens reported with each token; `None` without log-probabilities.
    pub logprobs: Option<u32>,
    /// Sender of the job's events. There is at most one event for each token of the prompt and the answers, one for
    /// each end, and one for a failure, so the channel needs no bound.
    pub events: UnboundedSender<Event>,
    /// Whether the client still reads each choice.
    pub readers: Arc<Readers>,
    /// Tokens of all prompts and predictions of the client's request, counted until its last job ends.
    pub _held: Arc<Held>,
}

/// An event of the engine's thread.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// A choice has a new token.
    Token {
        choice: u32,
        token: u32,
        /// Cached tokens of the prompt.
        cached: u32,
        /// Number of checked and of accepted drafts of the choice.
        drafts: [u32; 2],
        /// Log-probability of the token, if requested and known.
        logprob: Option<Logprob>,
    },
    Done {
        choice: u32,
        finish: Finish,
    },
    /// The log-probability of a token of a choice's prompt.
    Prompt {
        /// Number of the first choice of the prompt.
        choice: u32,
        /// Index of the token in the prompt.
        position: u32,
        /// Log-probability of the token.
        logprob: Logprob,
    },
    Failed(String),
}

/// Log-probability of a token in the model's distribution, before edits of logits, temperature, top-k and top-p.
#[derive(Clone, PartialEq, Debug)]
pub struct Logprob {
    /// Natural logarithm of the probability.
    pub own: f32,
    /// Most likely tokens with their log-probabilities.
    pub top: Vec<(u32, f32)>,
}

/// State of each choice: the client reads it, needs no more of it, or has disconnected.
#[derive(Debug)]
pub struct Readers(Box<[AtomicU8]>);

const READS: u8 = 0;
const HAS_ENOUGH: u8 = 1;
const IS_GONE: u8 = 2;

impl Readers {
    fn new(choices: usize) -> Self {
        Self((0..choices).map(|_| AtomicU8::new(READS)).collect())
    }

    /// Returns the reason to end a choice now, if any.
    pub fn ends(&self, choice: u32) -> Option<Finish> {
        // No other memory access depends on this value.
        match self.0[choice as usize].load(Ordering::Relaxed) {
            READS => None,
            HAS_ENOUGH => Some(Finish::Stop),
            _ => Some(Finish::Cancelled),
        }
    }
}

/// The client's side of its jobs. Dropping it cancels the choices that the client still reads.
#[derive(Debug)]
pub struct JobHandle {
    events: UnboundedReceiver<Event>,
    readers: Arc<Readers>,
}

impl JobHandle {
    /// Creates the jobs of a client's prompts, which form one group, and the client's side.
    pub fn issue(requests: Vec<Request>, logprobs: Option<u32>, held: Held, group: u64) -> (Vec<Job>, Self) {
        let held = Arc::new(held);
        let choices = requests.iter().map(|request| request.samples as usize).sum();
        let readers = Arc::new(Readers::new(choices));
        let (sender, events) = unbounded_channel();
        let (mut next, since) = (0, Instant::now());
        let job = |request: Request| {
            let first_choice = next;
            next += request.samples;
            let (events, readers) = (sender.clone(), Arc::clone(&readers));
            let request = Request { group: Some(group), ..request };
            let held = Arc::clone(&held);
            Job { request, since, first_choice, logprobs, events, readers, _held: held }
        };
        let jobs = requests.into_iter().map(job).collect();
        (jobs, Self { events, readers })
    }

    /// Returns the next event; `None` if the engine's thread has dropped the jobs.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// Returns an event that has already arrived.
    pub fn next_now(&mut self) -> Option<Event> {
        self.events.try_recv().ok()
    }

    /// Declares that the client needs no more of a choice.
    pub fn has_enough(&self, choice: u32) {
        self.readers.0[choice as usize].store(HAS_ENOUGH, Ordering::Relaxed);
    }
}

impl Drop for JobHandle {
    fn drop(&mut self) {
        for reader in &self.readers.0 {
            let (is, gone) = (READS, IS_GONE);
            // A choice that the client has finished stays finished.
            let _ = reader.compare_exchange(is, gone, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarena_host::request::Defaults;
    use kvarena_host::sample::Sampling;

    #[test]
    fn a_dropped_handle_cancels_its_jobs() {
        let sampling = Sampling::default();
        let defaults = Defaults { max_new_tokens: None, samples: 2, sampling, stop: Vec::new() };
        let requests = vec![defaults.request(vec![1]), defaults.request(vec![2])];
        let (jobs, mut handle) = JobHandle::issue(requests, None, Held::default(), 7);
        assert_eq!((jobs[0].first_choice, jobs[1].first_choice), (0, 2));
        let done = Event::Done { choice: 2, finish: Finish::Length };
        jobs[1].events.send(done.clone()).expect("the receiver lives");
        assert_eq!((handle.next_now(), handle.next_now()), (Some(done), None));
        handle.has_enough(3);
        let readers = Arc::clone(&jobs[0].readers);
        let ends = || (0..4).map(|choice| readers.ends(choice)).collect::<Vec<_>>();
        assert_eq!(ends(), [None, None, None, Some(Finish::Stop)]);
        drop(handle);
        let gone = Some(Finish::Cancelled);
        assert_eq!(ends(), [gone, gone, gone, Some(Finish::Stop)]);
    }
}
