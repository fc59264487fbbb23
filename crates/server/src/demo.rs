//! The demo: a small model explains words of kvarena, and the output shows the savings of the cache. It runs if the
//! command line has no requests, model, `--chat`, `--serve`, `--json` or `--bench`. Sparse reads without
//! `--labels`, or on the CPU, print its questions as requests instead.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::output::tokens_of;
use kvarena_host::error::{Error, Result};
use kvarena_host::request::{Defaults, Request};
use kvarena_host::runner::Runner;
use kvarena_host::server::{Server, Sink};
use kvarena_host::stream::{Finish, Stream};
use kvarena_host::text::{Message, Text};

/// Questions of the demo. The system message of the model's chat template precedes each of them.
pub const QUESTIONS: [&str; 8] = [
    "What is kvarena?",
    "What is a page?",
    "What is the prefix tree?",
    "What does commit mean?",
    "What is the fence?",
    "Explain eviction.",
    "What is a fork?",
    "And what is reuse?",
];

/// Returns a question as a turn of a chat.
///
/// # Errors
/// The chat template rejects it.
pub fn request(question: &str, defaults: &Defaults, text: &Text) -> Result<Request> {
    let turn = Message { role: "user".into(), content: question.to_owned() };
    text.chat(&[turn]).map(|prompt| defaults.request(prompt))
}

/// Runs the first question, then all other questions at once. Prints each answer with the number of cached
/// tokens of its prompt.
///
/// # Errors
/// The run failed, or a question cannot be served.
pub fn show<R: Runner>(
    server: &mut Server<R>,
    text: &Text,
    defaults: &Defaults,
    mut out: impl Write,
    interrupt: &AtomicBool,
) -> Result<()> {
    let (mut prompts, mut collector) = (Vec::new(), AnswerCollector { interrupt, answers: BTreeMap::new() });
    for questions in [&QUESTIONS[..1], &QUESTIONS[1..]] {
        for question in questions {
            let request = request(question, defaults, text)?;
            prompts.push(request.prompt.len());
            server.submit(request)?;
        }
        server.run(&mut collector)?;
    }
    let failed = |e| Error::run(format!("cannot write the output: {e}"));
    for ((question, prompt), (tokens, found)) in QUESTIONS.iter().zip(prompts).zip(collector.answers.into_values()) {
        let answer = text.decode(&tokens);
        let saved = format!("{found} of {} were in the cache", tokens_of(prompt, "prompt"));
        writeln!(out, "> {question}\n  {answer}\n  ({saved})\n").map_err(failed)?;
    }
    out.flush().map_err(failed)
}

/// Collects the answers without printing.
struct AnswerCollector<'a> {
    interrupt: &'a AtomicBool,
    /// New tokens and number of cached tokens of each request.
    answers: BTreeMap<usize, (Vec<u32>, u32)>,
}

impl Sink for AnswerCollector<'_> {
    fn done(&mut self, stream: &Stream, _: bool) {
        if stream.sample == 0 {
            let answer = (stream.tokens.clone(), stream.cached_tokens);
            self.answers.insert(stream.request, answer);
        }
    }

    fn ends(&mut self, _: &Stream) -> Option<Finish> {
        self.interrupt.load(Ordering::Relaxed).then_some(Finish::Cancelled)
    }
}
