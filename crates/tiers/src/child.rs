//! [`Child`]: a store in another process, for clients that exist in other languages.
//!
//! The parent starts a command with two arguments: the path of shared memory, and its size. The memory has slots of
//! equal size. The child reads requests from its standard input, and writes one byte for each record to its standard
//! output: 1 if the record is there, was read, stored or removed, else 0.
//!
//! | bytes | field |
//! |---|---|
//! | 1 | `h` have, `p` put, `g` get, `r` remove, `f` forget: remove all names with this prefix |
//! | 4 | number of records |
//! | 128 each | name, followed by zeros |
//! | 8 each | offset of the record in the memory |
//! | 8 each | bytes of the record: a `get` of a record with another number of bytes is 0 |
//!
//! The three fields of a record follow one another; numbers are little-endian. `mooncake_child.py` serves Mooncake.
//! Calls of several threads share requests. The parent reads while it writes, so a child may answer before it has read
//! all records. The parent ends a child that neither reads nor answers for 30 s; the next call starts another one.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::io::retry_on_intr;

use crate::lock::{lock, wait_while};
use crate::name::{Fingerprint, Name, Space};
use crate::store::{Buffers, Got, Store, StoreError, record_bytes};
use crate::vectored::{read_record, write_record};

const SLOTS: usize = 32;
const NAME: usize = 128;
const TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes that a pipe takes as a whole.
const PIPE_BUF: usize = 4096;

/// A store in another process.
#[derive(Debug)]
pub struct Child {
    command: Vec<String>,
    slot_bytes: u64,
    timeout: Duration,
    memory: OwnedFd,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<usize>,
    process: Option<Process>,
    /// Whether a thread talks with the process.
    is_busy: bool,
    next: u64,
    waiting: Vec<Request>,
    answers: HashMap<u64, Result<Vec<bool>, StoreError>>,
}

#[derive(Debug)]
struct Request {
    number: u64,
    op: u8,
    /// Number of records, and the records as the child reads them.
    count: usize,
    records: Vec<u8>,
}

#[derive(Debug)]
struct Process {
    child: std::process::Child,
    input: ChildStdin,
    output: ChildStdout,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    /// Writes a message, and reads a byte for each record. It reads while it writes: a child that answers before it has
    /// read all records would otherwise wait for a reader, while the parent waits for the child.
    fn exchange(&mut self, message: &[u8], records: usize, timeout: Duration) -> Result<Vec<bool>, StoreError> {
        let (mut rest, mut answers, mut read) = (message, vec![0; records], 0);
        while !rest.is_empty() || read < records {
            let wanted = if read < records { PollFlags::IN } else { PollFlags::empty() };
            let mut ready = [PollFd::new(&self.output, wanted), PollFd::new(&self.input, PollFlags::OUT)];
            let ends = &mut ready[..1 + usize::from(!rest.is_empty())];
            if wait_for(ends, timeout)? == 0 {
                return Err(io::Error::from(ErrorKind::TimedOut).into());
            }
            let [can_read, can_write] = ready.map(|end| !end.revents().is_empty());
            if can_write {
                // A pipe that is ready takes this number of bytes without a wait.
                let written = self.input.write(&rest[..rest.len().min(PIPE_BUF)])?;
                rest = &rest[written..];
            } else if can_read && read < records {
                match self.output.read(&mut answers[read..])? {
                    0 => return Err(io::Error::from(ErrorKind::UnexpectedEof).into()),
                    count => read += count,
                }
            } else {
                // It has closed its output.
                return Err(io::Error::from(ErrorKind::BrokenPipe).into());
            }
        }
        Ok(answers.into_iter().map(|answer| answer == 1).collect())
    }
}

/// Waits until an end of a pipe is ready. Returns the number of these, 0 after the timeout.
fn wait_for(ends: &mut [PollFd], timeout: Duration) -> io::Result<usize> {
    let begin = Instant::now();
    let ready = retry_on_intr(|| {
        let rest = timeout.saturating_sub(begin.elapsed());
        let tv_sec = rest.as_secs().try_into().unwrap_or(i64::MAX);
        poll(ends, Some(&Timespec { tv_sec, tv_nsec: rest.subsec_nanos().into() }))
    });
    Ok(ready?)
}

impl Child {
    /// Creates a store from a command and the maximum number of bytes of a record. The first call starts the command.
    ///
    /// # Errors
    /// If the memory cannot be created, or the command is empty.
    pub fn new(command: &[String], record_bytes: u64) -> io::Result<Self> {
        if command.is_empty() {
            return Err(ErrorKind::InvalidInput.into());
        }
        let memory = rustix::fs::memfd_create("kvarena-records", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&memory, SLOTS as u64 * record_bytes)?;
        let state = State { free: (0..SLOTS).collect(), ..State::default() };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Ok(Self { command: command.to_vec(), slot_bytes: record_bytes, timeout: TIMEOUT, memory, state, changed })
    }

    /// Sets the time after which a child that neither reads nor answers is ended. Default 30 s.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Calls `with` with the offset of a slot for a record of `bytes` bytes.
    fn with_slot<T>(&self, bytes: u64, with: impl FnOnce(u64) -> Result<T, StoreError>) -> Result<T, StoreError> {
        if bytes > self.slot_bytes {
            return Err(StoreError::TooLarge { bytes, max: self.slot_bytes });
        }
        let mut state = wait_while(&self.changed, lock(&self.state), |state| state.free.is_empty());
        let slot = state.free.pop().expect("one is free");
        drop(state);
        let result = with(slot as u64 * self.slot_bytes);
        lock(&self.state).free.push(slot);
        self.changed.notify_all();
        result
    }

    /// Sends a request, and returns its answers. One of the waiting threads sends those of all.
    fn send(&self, op: u8, names: &[String], offset: u64, bytes: u64) -> Result<Vec<bool>, StoreError> {
        let mut records = Vec::new();
        for name in names {
            let at = records.len();
            records.extend(name.as_bytes());
            records.resize(at + NAME, 0);
            records.extend(offset.to_le_bytes());
            records.extend(bytes.to_le_bytes());
        }
        let mut state = lock(&self.state);
        let number = state.next;
        state.next += 1;
        state.waiting.push(Request { number, op, count: names.len(), records });
        loop {
            let waits = |state: &mut State| state.is_busy && !state.answers.contains_key(&number);
            state = wait_while(&self.changed, state, waits);
            if let Some(answers) = state.answers.remove(&number) {
                return answers;
            }
            let op = state.waiting[0].op;
            let (batch, rest): (Vec<_>, _) = state.waiting.drain(..).partition(|request| request.op == op);
            (state.waiting, state.is_busy) = (rest, true);
            let mut process = state.process.take();
            drop(state);
            let answers = self.talk(&mut process, op, &batch);
            state = lock(&self.state);
            (state.process, state.is_busy) = (process.filter(|_| answers.is_ok()), false);
            let mut rest = answers.as_deref();
            for Request { number, count, .. } in batch {
                let own = rest.as_mut().map(|rest| rest.split_off(..count).expect("an answer for each record"));
                let own = own.map(<[bool]>::to_vec).map_err(|error| error.clone());
                state.answers.insert(number, own);
            }
            self.changed.notify_all();
        }
    }

    fn talk(&self, process: &mut Option<Process>, op: u8, batch: &[Request]) -> Result<Vec<bool>, StoreError> {
        let process = match process {
            Some(process) => process,
            None => process.insert(self.start()?),
        };
        let count = batch.iter().map(|request| request.count).sum();
        let mut message = vec![op];
        message.extend((count as u32).to_le_bytes());
        batch.iter().for_each(|request| message.extend(&request.records));
        process.exchange(&message, count, self.timeout)
    }

    fn start(&self) -> Result<Process, StoreError> {
        let path = format!("/proc/{}/fd/{}", std::process::id(), self.memory.as_raw_fd());
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).arg(path).arg((SLOTS as u64 * self.slot_bytes).to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (input, output) = (child.stdin.take().expect("it is piped"), child.stdout.take().expect("it is piped"));
        Ok(Process { child, input, output })
    }
}

fn texts(names: &[Name]) -> Vec<String> {
    names.iter().map(Name::to_string).collect()
}

impl Store for Child {
    fn have(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        self.send(b'h', &texts(names), 0, 0)
    }

    fn get(&self, name: &Name, into: &mut Buffers) -> Result<Got, StoreError> {
        let bytes = into.record_bytes();
        self.with_slot(bytes, |slot| {
            if self.send(b'g', &texts(&[*name]), slot, bytes)? != [true] {
                let has = self.have(&[*name])? == [true];
                return Ok(if has { Got::Length } else { Got::Absent });
            }
            let is_read = read_record(&self.memory, slot, into)?;
            Ok(if is_read { Got::Read } else { Got::Length })
        })
    }

    fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> Result<(), StoreError> {
        let bytes = record_bytes(head.len(), pages.len(), pages.first().map_or(0, |page| page.len()));
        self.with_slot(bytes, |slot| {
            write_record(&self.memory, slot, head, pages)?;
            let is_stored = self.send(b'p', &texts(&[*name]), slot, bytes)? == [true];
            if is_stored { Ok(()) } else { Err(StoreError::Full) }
        })
    }

    fn remove(&self, names: &[Name]) -> Result<(), StoreError> {
        self.send(b'r', &texts(names), 0, 0).map(drop)
    }

    fn remove_space(&self, fingerprint: &Fingerprint, space: Space) -> Result<(), StoreError> {
        self.send(b'f', &[format!("v1/{fingerprint}/{space}/")], 0, 0).map(drop)
    }
}
