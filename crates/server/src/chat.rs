//! A chat on standard input: each line is a turn. The whole conversation is the prompt of each turn, so that all but
//! its last page or so is found in the cache.

use std::io::{BufRead, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::output::{Form, Printer, tokens_of};
use kvarena_host::error::{Error, Result};
use kvarena_host::request::Defaults;
use kvarena_host::runner::Runner;
use kvarena_host::server::Server;
use kvarena_host::text::{Message, Text};

/// What Ctrl-C does, which depends on what the program is doing.
#[derive(Debug, Default)]
pub struct Interrupt {
    /// Set by Ctrl-C: the streams now running are cancelled.
    pub asked: AtomicBool,
    /// While a person is asked for the next turn nothing runs that could be cancelled: Ctrl-C ends the program.
    waiting: AtomicBool,
}

impl Interrupt {
    /// Nobody has asked.
    pub const fn new() -> Self {
        Self { asked: AtomicBool::new(false), waiting: AtomicBool::new(false) }
    }

    /// Takes note of a Ctrl-C; true where the program is to end: while it waits for a turn, or where it is the second
    /// one and nobody took heed of the first.
    pub fn ask(&self) -> bool {
        self.asked.swap(true, Ordering::Relaxed) || self.waiting.load(Ordering::Relaxed)
    }
}

/// Where a chat's turns come from, and where the answers go.
#[derive(Debug)]
pub struct Console<I, O> {
    /// A turn a line.
    pub input: I,
    /// The answers.
    pub out: O,
    /// What is written where a turn is waited for.
    pub sign: &'static str,
}

/// Chats until the input ends. A turn that cannot be served is reported and left out of the conversation.
///
/// # Errors
/// The run failed, or the last turn that could not be served.
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
    while let Some(line) = ask(&mut console, interrupt)? {
        if line.trim().is_empty() {
            continue;
        }
        messages.push(Message { role: "user".into(), content: line });
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
        let mut printer = Printer::new(&mut console.out, text, Form::Live, &interrupt.asked);
        server.run(&mut printer)?;
        let (said, cached) = printer.take_last();
        printer.finish()?;
        eprintln!("({} reused)", tokens_of(cached as usize, "prompt"));
        messages.push(Message { role: "assistant".into(), content: text.decode(&said) });
    }
    refusal
}

/// The next line, or none at the end of the input.
fn ask(
    console: &mut Console<impl BufRead, impl Write>,
    interrupt: &Interrupt,
) -> Result<Option<String>> {
    let Console { input, out, sign } = console;
    let wrote = write!(out, "{sign}").and_then(|()| out.flush());
    wrote.map_err(|e| Error::run(format!("cannot write the output: {e}")))?;
    let mut line = String::new();
    // What was asked for while the last turn ran has cancelled it.
    interrupt.asked.store(false, Ordering::Relaxed);
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
