//! What passes between a client's task and the engine's thread: a job there, events back, and who still reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::intake::Held;
use kvarena_host::request::Request;
use kvarena_host::stream::Finish;

/// A prompt to be served.
#[derive(Debug)]
pub struct Job {
    /// What is asked for.
    pub request: Request,
    /// When it came.
    pub since: Instant,
    /// Number of its first choice among its client's.
    pub first_choice: u32,
    /// How many most likely tokens go with each one said, if log-probabilities are wanted.
    pub logprobs: Option<u32>,
    /// Who hears of it. It holds at most an event for each token asked for.
    pub events: UnboundedSender<Event>,
    /// Who still reads.
    pub readers: Arc<Readers>,
    /// The tokens of all prompts of the client's request, counted until its last job ends.
    pub _held: Arc<Held>,
}

/// What the engine's thread says.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// A choice said a token.
    Token {
        /// Number of the choice.
        choice: u32,
        /// The token.
        token: u32,
        /// Tokens of the prompt that needed no computing.
        cached: u32,
        /// Drafts of the choice that were checked so far, and those of them that came true.
        drafts: [u32; 2],
        /// How likely it was, if that is wanted and known.
        logprob: Option<Logprob>,
    },
    /// A choice ended.
    Done {
        /// Number of the choice.
        choice: u32,
        /// Why.
        finish: Finish,
    },
    /// How likely a token of a choice's prompt was.
    Prompt {
        /// Number of the first choice of the prompt.
        choice: u32,
        /// The token's place in the prompt.
        position: u32,
        /// How likely it was.
        logprob: Logprob,
    },
    /// The engine failed.
    Failed(String),
}

/// How likely a token was, by the model's own probabilities: those before temperature, top-k and top-p.
#[derive(Clone, PartialEq, Debug)]
pub struct Logprob {
    /// Natural logarithm of its probability.
    pub own: f32,
    /// The most likely tokens, and theirs.
    pub top: Vec<(u32, f32)>,
}

/// For each choice of a client, whether somebody reads it.
#[derive(Debug)]
pub struct Readers(Box<[AtomicU8]>);

const READS: u8 = 0;
const HAS_ENOUGH: u8 = 1;
const IS_GONE: u8 = 2;

impl Readers {
    fn new(choices: usize) -> Self {
        Self((0..choices).map(|_| AtomicU8::new(READS)).collect())
    }

    /// Why a choice is to end, if it is.
    pub fn ends(&self, choice: u32) -> Option<Finish> {
        // Nothing else is read on the strength of it.
        match self.0[choice as usize].load(Ordering::Relaxed) {
            READS => None,
            HAS_ENOUGH => Some(Finish::Stop),
            _ => Some(Finish::Cancelled),
        }
    }
}

/// The client's end: while it lives, somebody reads.
#[derive(Debug)]
pub struct Ticket {
    events: UnboundedReceiver<Event>,
    readers: Arc<Readers>,
}

impl Ticket {
    /// The jobs of a client's prompts, which are one group, and its end.
    pub fn issue(
        requests: Vec<Request>,
        logprobs: Option<u32>,
        held: Held,
        group: u64,
    ) -> (Vec<Job>, Self) {
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

    /// The next event; none where the engine's thread has forgotten the jobs.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// An event that is there already.
    pub fn next_now(&mut self) -> Option<Event> {
        self.events.try_recv().ok()
    }

    /// Nobody needs more of a choice.
    pub fn has_enough(&self, choice: u32) {
        self.readers.0[choice as usize].store(HAS_ENOUGH, Ordering::Relaxed);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        for reader in &self.readers.0 {
            let (is, gone) = (READS, IS_GONE);
            // One that has enough stays so.
            let _ = reader.compare_exchange(is, gone, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use kvarena_host::request::Defaults;
    use kvarena_host::sample::Sampling;

    #[test]
    fn whoever_drops_the_ticket_is_gone() {
        let sampling = Sampling::default();
        let defaults = Defaults { max_new_tokens: None, samples: 2, sampling, stop: Vec::new() };
        let requests = vec![defaults.request(vec![1]), defaults.request(vec![2])];
        let (jobs, mut ticket) = Ticket::issue(requests, None, Held::default(), 7);
        assert_eq!((jobs[0].first_choice, jobs[1].first_choice), (0, 2));
        let done = Event::Done { choice: 2, finish: Finish::Length };
        jobs[1].events.send(done.clone()).expect("it is heard");
        assert_eq!((ticket.next_now(), ticket.next_now()), (Some(done), None));
        ticket.has_enough(3);
        let readers = Arc::clone(&jobs[0].readers);
        let ends = || (0..4).map(|choice| readers.ends(choice)).collect::<Vec<_>>();
        assert_eq!(ends(), [None, None, None, Some(Finish::Stop)]);
        drop(ticket);
        let gone = Some(Finish::Cancelled);
        assert_eq!(ends(), [gone, gone, gone, Some(Finish::Stop)]);
    }
}
