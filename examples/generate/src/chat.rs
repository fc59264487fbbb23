//! A chat on standard input: each line is a turn. The whole conversation is the prompt of each turn, so that all but
//! its last page or so is found in the cache.

use std::io::{BufRead, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};
use crate::output::{Form, Printer};
use crate::request::Defaults;
use crate::runner::Runner;
use crate::server::Server;
use crate::text::{Message, Text};

/// Chats until the input ends. A turn that cannot be served is reported and left out of the conversation.
///
/// # Errors
/// The run failed, or the last turn that could not be served.
pub fn chat<R: Runner>(
    server: &mut Server<R>,
    text: &Text,
    defaults: &Defaults,
    system: Option<&str>,
    input: impl BufRead,
    mut out: impl Write,
    interrupt: &AtomicBool,
) -> Result<()> {
    let system = system.map(|content| Message { role: "system", content: content.into() });
    let mut messages: Vec<Message> = system.into_iter().collect();
    let mut refusal = Ok(());
    for line in input.lines() {
        let line = line.map_err(|e| Error::run(format!("cannot read the input: {e}")))?;
        if line.trim().is_empty() {
            continue;
        }
        messages.push(Message { role: "user", content: line });
        let prompt = text.chat(&messages);
        match prompt.and_then(|prompt| server.submit(defaults.request(prompt))) {
            Ok(_) => {}
            Err(error) => {
                eprintln!("generate: {error}");
                refusal = Err(error);
                messages.pop();
                continue;
            }
        }
        interrupt.store(false, Ordering::Relaxed);
        let mut printer = Printer::new(&mut out, text, Form::Live, interrupt);
        server.run(&mut printer)?;
        printer.finish()?;
        let stream = server.streams().last().expect("a turn was just served");
        eprintln!("({} prompt tokens reused)", stream.cached_tokens);
        messages.push(Message { role: "assistant", content: text.decode(&stream.tokens) });
    }
    refusal
}
