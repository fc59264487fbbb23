//! The output of running streams: tokens as they arrive, or a line or a block for each stream, in the order of
//! requests.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use kvarena_host::decoder::Decoder;
use kvarena_host::error::{Error, Result};
use kvarena_host::server::Sink;
use kvarena_host::stream::{Finish, Stream};
use kvarena_host::text::Text;

/// Returns a count with its unit: `1 prompt token`, `2 prompt tokens`.
pub fn tokens_of(count: usize, kind: &str) -> String {
    format!("{count} {kind} token{}", if count == 1 { "" } else { "s" })
}

/// Format of the output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Tokens of the only stream, as they arrive.
    Live,
    /// A block of text for each stream, in the order of requests.
    Blocks,
    /// A JSON line for each stream, in the order of requests.
    Json,
}

/// Prints streams.
pub struct Printer<'a, W: Write> {
    out: W,
    text: &'a Text,
    form: Form,
    /// Number of logits to print for each first token.
    first_logits: usize,
    logits: BTreeMap<(usize, u32), Vec<f32>>,
    decoder: Decoder,
    /// Output of requests that ended before their turn.
    held: BTreeMap<usize, Held>,
    /// Number of the request whose output is next.
    turn: usize,
    /// Tokens and cached tokens of the stream that ended last; only for [`Form::Live`].
    last: (Vec<u32>, u32),
    interrupt: &'a AtomicBool,
    failure: Option<io::Error>,
}

#[derive(Default)]
struct Held {
    lines: BTreeMap<u32, String>,
    whole: bool,
}

impl<'a, W: Write> Printer<'a, W> {
    /// Creates a printer to `out`; once `interrupt` is set, all streams are cancelled.
    pub fn new(out: W, text: &'a Text, form: Form, interrupt: &'a AtomicBool) -> Self {
        Self {
            out,
            text,
            form,
            first_logits: 0,
            logits: BTreeMap::new(),
            decoder: Decoder::default(),
            held: BTreeMap::new(),
            turn: 0,
            last: (Vec::new(), 0),
            interrupt,
            failure: None,
        }
    }

    /// With [`Form::Json`], also prints at most `count` logits of each first token, those of the lowest token ids.
    pub fn with_first_logits(self, count: usize) -> Self {
        Self { first_logits: count, ..self }
    }

    /// Returns the tokens and the number of cached prompt tokens of the stream that ended last with [`Form::Live`].
    pub fn take_last(&mut self) -> (Vec<u32>, u32) {
        std::mem::take(&mut self.last)
    }

    /// Flushes the output.
    ///
    /// # Errors
    /// The flush or an earlier write failed.
    pub fn finish(mut self) -> Result<()> {
        let flushed = self.out.flush();
        let failure = self.failure.or(flushed.err());
        failure.map_or(Ok(()), |e| Err(Error::run(format!("cannot write the output: {e}"))))
    }

    fn write(&mut self, text: &str) {
        let written = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush());
        if let Err(error) = written {
            self.failure.get_or_insert(error);
        }
    }

    fn line(&mut self, stream: &Stream) -> String {
        if self.form == Form::Blocks {
            let mark = if stream.sample > 0 { format!(".{}", stream.sample) } else { String::new() };
            return format!("[{}{mark}] {}\n", stream.request, self.text.decode(&stream.tokens));
        }
        let mut line = json!({
            "index": stream.request,
            "tokens": stream.tokens,
            "cached_tokens": stream.cached_tokens,
        });
        let mut add = |name: &str, value: Value| line[name] = value;
        if stream.sample > 0 {
            add("sample", stream.sample.into());
        }
        if self.text.has_tokenizer() {
            add("text", self.text.decode(&stream.tokens).into());
        }
        if stream.finish == Some(Finish::Cancelled) {
            add("cancelled", true.into());
        }
        if let Some(logits) = self.logits.remove(&(stream.request, stream.sample)) {
            add("first_logits", logits.into());
        }
        format!("{line}\n")
    }

    /// Prints the held output of ended requests in order, up to the first request that has not ended.
    fn release(&mut self) {
        while self.held.get(&self.turn).is_some_and(|held| held.whole) {
            let held = self.held.remove(&self.turn).unwrap_or_default();
            for line in held.lines.values() {
                self.write(line);
            }
            self.turn += 1;
        }
    }
}

impl<W: Write> Sink for Printer<'_, W> {
    fn token(&mut self, stream: &Stream, logits: &[f32]) {
        if self.first_logits > 0 && stream.tokens.len() == 1 {
            let head = logits[..self.first_logits.min(logits.len())].to_vec();
            self.logits.insert((stream.request, stream.sample), head);
        }
        if let (Form::Live, Some(&token)) = (self.form, stream.tokens.last()) {
            let piece = self.decoder.push(self.text, token);
            self.write(&piece);
        }
    }

    fn done(&mut self, stream: &Stream, last: bool) {
        if self.form == Form::Live {
            self.last = (stream.tokens.clone(), stream.cached_tokens);
            let rest = self.decoder.rest(self.text) + "\n";
            self.write(&rest);
            return;
        }
        let line = self.line(stream);
        let held = self.held.entry(stream.request).or_default();
        held.lines.insert(stream.sample, line);
        held.whole |= last;
        self.release();
    }

    fn ends(&mut self, _: &Stream) -> Option<Finish> {
        let gone = self.failure.is_some() || self.interrupt.load(Ordering::Relaxed);
        gone.then_some(Finish::Cancelled)
    }
}
