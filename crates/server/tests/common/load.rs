//! Clients that load servers with prompts whose answers are known.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use serde_json::{Value, json};

use super::listening::{Listening, post};

/// Tokens of a prompt that a server can hit: whole pages before the last token.
pub const CACHED: u64 = 80;

/// Prompts, and the answers of a server without stores.
pub struct Load {
    prompts: Vec<Vec<usize>>,
    answers: Vec<Value>,
}

/// Sums over the answers of a load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Served {
    pub answers: usize,
    pub cached: u64,
}

fn body(prompt: &[usize], salt: Option<&str>) -> Value {
    let mut body = json!({ "model": "qwen3-tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 1 });
    if let Some(salt) = salt {
        body["cache_salt"] = salt.into();
    }
    body
}

impl Load {
    /// Creates prompts of 90 tokens, of which four share the first 40, and computes their answers.
    pub fn new(count: usize) -> Self {
        let token = |prompt: usize, at: usize| if at < 40 { prompt / 4 + at * at } else { 7 * prompt + at * at };
        let prompt = |prompt| (0..90).map(|at| token(prompt, at) % 500).collect::<Vec<_>>();
        let prompts: Vec<Vec<usize>> = (0..count).map(prompt).collect();
        let server = Listening::start(&["--model", &super::folder("qwen3-tiny")]);
        let answer = |prompt: &Vec<usize>| {
            let (status, mut answer) = server.post("/v1/completions", &body(prompt, None));
            assert_eq!(status, 200, "{answer}");
            answer["choices"].take()
        };
        let answers = prompts.iter().map(answer).collect();
        Self { prompts, answers }
    }

    pub fn len(&self) -> usize {
        self.prompts.len()
    }

    /// Posts a prompt, and compares the answer. Returns the number of cached tokens, or `None` if the server ends.
    pub fn ask(&self, address: &str, at: usize, salt: Option<&str>) -> Option<u64> {
        let (status, answer) = post(address, "/v1/completions", &body(&self.prompts[at], salt))?;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(words(&answer["choices"]), words(&self.answers[at]), "prompt {at} of salt {salt:?}");
        Some(answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number"))
    }

    /// Posts each prompt once, in order. Returns the cached tokens of each.
    pub fn each(&self, address: &str, salt: Option<&str>) -> Vec<u64> {
        (0..self.len()).map(|at| self.ask(address, at, salt).expect("the server runs")).collect()
    }

    /// Posts prompts from several clients, `count` in all, each with the salt that `salt` returns for its number. Ends
    /// early if the server does.
    pub fn run(
        &self,
        address: &str,
        clients: usize,
        count: usize,
        salt: impl Fn(usize) -> Option<String> + Sync,
    ) -> Served {
        let (next, answers, cached) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicU64::new(0));
        let client = || {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= count {
                    return;
                }
                let Some(tokens) = self.ask(address, number % self.len(), salt(number).as_deref()) else { return };
                answers.fetch_add(1, Ordering::Relaxed);
                cached.fetch_add(tokens, Ordering::Relaxed);
            }
        };
        thread::scope(|scope| (0..clients).for_each(|_| drop(scope.spawn(client))));
        Served { answers: answers.into_inner(), cached: cached.into_inner() }
    }
}

/// Returns the words of an answer. Sums in batches of another size may differ in the last bits of log-probabilities.
fn words(choices: &Value) -> (&Value, &Value) {
    (&choices[0]["text"], &choices[0]["logprobs"]["tokens"])
}
