//! Which words change where streams do not read all.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::server::Sink;
use crate::stream::{Finish, Stream};

/// Keeps what streams say, by request and sample.
pub struct Said<'a> {
    tokens: BTreeMap<(usize, u32), Vec<u32>>,
    interrupt: &'a AtomicBool,
}

impl<'a> Said<'a> {
    /// Nothing is said yet; once `interrupt` is set, all streams are cancelled.
    pub fn new(interrupt: &'a AtomicBool) -> Self {
        Self { tokens: BTreeMap::new(), interrupt }
    }
}

impl Sink for Said<'_> {
    fn done(&mut self, stream: &Stream, _: bool) {
        self.tokens.insert((stream.request, stream.sample), stream.tokens.clone());
    }

    fn ends(&mut self, _: &Stream) -> Option<Finish> {
        self.interrupt.load(Ordering::Relaxed).then_some(Finish::Cancelled)
    }
}

/// What differs from what was said before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Count {
    /// Tokens that were said before.
    pub tokens: usize,
    /// Those of them in whose place is another one, or none.
    pub changed_tokens: usize,
    /// Texts that were said before.
    pub texts: usize,
    /// Those of them that are other ones.
    pub changed_texts: usize,
}

impl Count {
    /// As JSON; nothing where nothing was said before.
    pub fn json(&self) -> Value {
        let Self { tokens, changed_tokens, texts, changed_texts } = *self;
        if texts == 0 {
            return Value::Null;
        }
        json!({
            "tokens": tokens,
            "changed_tokens": changed_tokens,
            "texts": texts,
            "changed_texts": changed_texts,
        })
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, changed_tokens, texts, changed_texts } = self;
        if *texts == 0 {
            return f.write_str("nobody knows what reading all would have said");
        }
        write!(f, "{changed_tokens} of {tokens} tokens, {changed_texts} of {texts} texts ")?;
        write!(f, "are not those of reading all")
    }
}

/// Passes on what streams say, and counts what differs from what was said before.
pub struct Change<'a, S> {
    sink: &'a mut S,
    before: &'a Said<'a>,
    count: Count,
}

impl<'a, S: Sink> Change<'a, S> {
    /// Nothing is said yet.
    pub fn new(sink: &'a mut S, before: &'a Said<'a>) -> Self {
        Self { sink, before, count: Count::default() }
    }

    /// What was counted.
    pub fn count(&self) -> Count {
        self.count
    }
}

impl<S: Sink> Sink for Change<'_, S> {
    fn token(&mut self, stream: &Stream, logits: &[f32]) {
        self.sink.token(stream, logits);
    }

    fn done(&mut self, stream: &Stream, last: bool) {
        if let Some(before) = self.before.tokens.get(&(stream.request, stream.sample)) {
            let pairs = before.iter().zip(&stream.tokens);
            let same = pairs.filter(|(before, now)| before == now).count();
            self.count.tokens += before.len();
            self.count.changed_tokens += before.len() - same;
            self.count.texts += 1;
            self.count.changed_texts += usize::from(*before != stream.tokens);
        }
        self.sink.done(stream, last);
    }

    fn ends(&mut self, stream: &Stream) -> Option<Finish> {
        self.sink.ends(stream)
    }
}
