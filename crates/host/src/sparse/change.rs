//! Counts the tokens that change if streams do not read all positions.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::server::Sink;
use crate::stream::{Finish, Stream};

/// Records the tokens of streams, by request and sample.
pub struct RecordedTokens<'a> {
    tokens: BTreeMap<(usize, u32), Vec<u32>>,
    interrupt: &'a AtomicBool,
}

impl<'a> RecordedTokens<'a> {
    /// Starts an empty record; once `interrupt` is set, all streams are cancelled.
    pub fn new(interrupt: &'a AtomicBool) -> Self {
        Self { tokens: BTreeMap::new(), interrupt }
    }
}

impl Sink for RecordedTokens<'_> {
    fn done(&mut self, stream: &Stream, _: bool) {
        self.tokens.insert((stream.request, stream.sample), stream.tokens.clone());
    }

    fn ends(&mut self, _: &Stream) -> Option<Finish> {
        self.interrupt.load(Ordering::Relaxed).then_some(Finish::Cancelled)
    }
}

/// Counts of the recorded tokens and texts, and of those that changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Count {
    /// Number of recorded tokens of the compared texts.
    pub tokens: usize,
    /// Number of recorded tokens that changed or are missing.
    pub changed_tokens: usize,
    /// Number of recorded texts that have been compared.
    pub texts: usize,
    /// Number of recorded texts that changed.
    pub changed_texts: usize,
}

impl Count {
    /// Returns the counts as JSON; `null` if no text was compared.
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
            return f.write_str("no text was recorded with full reads");
        }
        write!(f, "{changed_tokens} of {tokens} tokens, {changed_texts} of {texts} texts ")?;
        write!(f, "differ from those of full reads")
    }
}

/// Forwards the tokens and ends of streams, and counts the changed tokens.
pub struct Change<'a, S> {
    sink: &'a mut S,
    before: &'a RecordedTokens<'a>,
    count: Count,
}

impl<'a, S: Sink> Change<'a, S> {
    /// Starts with zero counts.
    pub fn new(sink: &'a mut S, before: &'a RecordedTokens<'a>) -> Self {
        Self { sink, before, count: Count::default() }
    }

    /// Returns the counts.
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
