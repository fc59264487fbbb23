//! A chat on standard input: each line is a turn. The whole conversation is the prompt of each turn, so the cache
//! contains almost all of it.

use std::io::{BufRead, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::output::{Form, Printer, tokens_of};
use kvarena_host::error::{Error, Result};
use kvarena_host::request::Defaults;
use kvarena_host::runner::Runner;
use kvarena_host::server::Server;
use kvarena_host::text::{Message, Text};

/// The handling of Ctrl-C, which depends on the program's state.
#[derive(Debug, Default)]
pub struct Interrupt {
    /// Set by Ctrl-C: cancels the running streams.
    pub cancel: AtomicBool,
    /// Set while the program waits for a turn. No stream can then be cancelled, so Ctrl-C ends the program.
    waiting: AtomicBool,
}

impl Interrupt {
    /// Creates the state before any Ctrl-C.
    pub const fn new() -> Self {
        Self { cancel: AtomicBool::new(false), waiting: AtomicBool::new(false) }
    }

    /// Records a Ctrl-C. Returns whether the program must end, because it waits for a turn or because this is the
    /// second Ctrl-C since the last wait.
    pub fn record(&self) -> bool {
        self.cancel.swap(true, Ordering::Relaxed) || self.waiting.load(Ordering::Relaxed)
    }
}

/// The input and output of a chat.
#[derive(Debug)]
pub struct Console<I, O> {
    /// One turn in each line.
    pub input: I,
    /// The answers.
    pub out: O,
    /// The text that is written before each turn.
    pub sign: &'static str,
}

/// Chats until the input ends. Reports a turn that it cannot serve, and omits it from the conversation.
///
/// # Errors
/// The run failed. Otherwise, after the end of the input, the error of the last turn that could not be served.
pub fn chat<R: Runner>(
    server: &mut Server<R>,
    text: &Text,
    defaults: &Defaults,
    system: Option<&str>,
    mut console: Console<impl BufRead, impl Write>,
    interrupt: &Interrupt,
) -> Result<()> {
    let system = system.map(|content| Message { role: "system".into(), content: content.into() });
    let mut messages: Vec<Message> = system.into_iter().collect();
    let mut refusal = Ok(());
    while let Some(line) = read_turn(&mut console, interrupt)? {
        if line.trim().is_empty() {
            continue;
        }
        messages.push(Message { role: "user".into(), content: line });
        let prompt = text.chat(&messages);
        match prompt.and_then(|prompt| server.submit(defaults.request(prompt))) {
            Ok(_) => {}
            Err(error) => {
                eprintln!("kvarena-server: {error}");
                refusal = Err(error);
                messages.pop();
                continue;
            }
        }
        let mut printer = Printer::new(&mut console.out, text, Form::Live, &interrupt.cancel);
        server.run(&mut printer)?;
        let (answer, cached) = printer.take_last();
        printer.finish()?;
        eprintln!("({} reused)", tokens_of(cached as usize, "prompt"));
        messages.push(Message { role: "assistant".into(), content: text.decode(&answer) });
    }
    refusal
}

/// Prints the sign and returns the next line, or `None` at the end of the input.
fn read_turn(console: &mut Console<impl BufRead, impl Write>, interrupt: &Interrupt) -> Result<Option<String>> {
    let Console { input, out, sign } = console;
    let wrote = write!(out, "{sign}").and_then(|()| out.flush());
    wrote.map_err(|e| Error::run(format!("cannot write the output: {e}")))?;
    let mut line = String::new();
    // An earlier Ctrl-C has cancelled the last turn.
    interrupt.cancel.store(false, Ordering::Relaxed);
    interrupt.waiting.store(true, Ordering::Relaxed);
    let read = input.read_line(&mut line);
    interrupt.waiting.store(false, Ordering::Relaxed);
    let read = read.map_err(|e| Error::run(format!("cannot read the input: {e}")))?;
    if read == 0 {
        return Ok(None);
    }
    let end = line.trim_end_matches(['\n', '\r']).len();
    line.truncate(end);
    Ok(Some(line))
}
