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
//! Calls of several threads share requests. The parent ends a child that does not answer in time; the next call starts
//! another one.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;

use crate::name::{Fingerprint, Name, Space};
use crate::store::{Buffers, Got, Store, StoreError, record_bytes};
use crate::vectored::{read_record, write_record};

const SLOTS: usize = 32;
const NAME: usize = 128;
const TIMEOUT: Duration = Duration::from_secs(30);

/// A store in another process.
#[derive(Debug)]
pub struct Child {
    command: Vec<String>,
    slot_bytes: u64,
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
    answers: HashMap<u64, Result<bool, StoreError>>,
}

#[derive(Debug)]
struct Request {
    number: u64,
    op: u8,
    name: String,
    offset: u64,
    bytes: u64,
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
        Ok(Self { command: command.to_vec(), slot_bytes: record_bytes, memory, state, changed })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `with` with the offset of a slot.
    fn with_slot<T>(&self, with: impl FnOnce(u64) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let mut state = self.state();
        let slot = loop {
            match state.free.pop() {
                Some(slot) => break slot,
                None => state = self.wait(state),
            }
        };
        drop(state);
        let result = with(slot as u64 * self.slot_bytes);
        self.state().free.push(slot);
        self.changed.notify_all();
        result
    }

    /// Sends requests of one kind, and returns their answers. One of the waiting threads sends the requests of all.
    fn send(&self, op: u8, records: &[(String, u64, u64)]) -> Result<Vec<bool>, StoreError> {
        let mut state = self.state();
        let mut numbers = Vec::with_capacity(records.len());
        for (name, offset, bytes) in records {
            let (number, name) = (state.next, name.clone());
            state.next += 1;
            numbers.push(number);
            state.waiting.push(Request { number, op, name, offset: *offset, bytes: *bytes });
        }
        while !numbers.iter().all(|number| state.answers.contains_key(number)) {
            if state.is_busy || state.waiting.is_empty() {
                state = self.wait(state);
                continue;
            }
            let op = state.waiting[0].op;
            let (batch, rest): (Vec<_>, Vec<_>) = state.waiting.drain(..).partition(|request| request.op == op);
            state.waiting = rest;
            state.is_busy = true;
            let mut process = state.process.take();
            drop(state);
            let answers = self.talk(&mut process, op, &batch);
            state = self.state();
            (state.process, state.is_busy) = (process.filter(|_| answers.is_ok()), false);
            for (index, request) in batch.iter().enumerate() {
                let answer = answers.as_ref().map(|answers| answers[index]).map_err(Clone::clone);
                state.answers.insert(request.number, answer);
            }
            self.changed.notify_all();
        }
        let answers: Vec<_> = numbers.iter().map(|number| state.answers.remove(number).expect("checked")).collect();
        answers.into_iter().collect()
    }

    fn talk(&self, process: &mut Option<Process>, op: u8, batch: &[Request]) -> Result<Vec<bool>, StoreError> {
        let process = match process {
            Some(process) => process,
            None => process.insert(self.start()?),
        };
        let mut message = vec![op];
        message.extend((batch.len() as u32).to_le_bytes());
        for request in batch {
            let at = message.len();
            message.extend(request.name.as_bytes());
            message.resize(at + NAME, 0);
            message.extend(request.offset.to_le_bytes());
            message.extend(request.bytes.to_le_bytes());
        }
        let mut answers = vec![0; batch.len()];
        process.input.write_all(&message).and_then(|()| process.input.flush())?;
        let mut at = 0;
        while at < answers.len() {
            let time = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
            let mut ready = [PollFd::new(&process.output, PollFlags::IN)];
            if poll(&mut ready, Some(&time)).map_err(io::Error::from)? == 0 {
                return Err(io::Error::from(ErrorKind::TimedOut).into());
            }
            match process.output.read(&mut answers[at..])? {
                0 => return Err(io::Error::from(ErrorKind::UnexpectedEof).into()),
                read => at += read,
            }
        }
        Ok(answers.into_iter().map(|answer| answer == 1).collect())
    }

    fn start(&self) -> Result<Process, StoreError> {
        let path = format!("/proc/{}/fd/{}", std::process::id(), self.memory.as_raw_fd());
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).arg(path).arg((SLOTS as u64 * self.slot_bytes).to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (input, output) = (child.stdin.take().expect("it is piped"), child.stdout.take().expect("it is piped"));
        Ok(Process { child, input, output })
    }

    fn check_size(&self, bytes: u64) -> Result<(), StoreError> {
        if bytes > self.slot_bytes { Err(StoreError::TooLarge { bytes, max: self.slot_bytes }) } else { Ok(()) }
    }
}

impl Store for Child {
    fn have(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        self.send(b'h', &names.iter().map(|name| (name.to_string(), 0, 0)).collect::<Vec<_>>())
    }

    fn get(&self, name: &Name, into: &mut Buffers) -> Result<Got, StoreError> {
        let bytes = into.record_bytes();
        self.check_size(bytes)?;
        self.with_slot(|slot| {
            if self.send(b'g', &[(name.to_string(), slot, bytes)])? == [true] {
                let is_read = read_record(&self.memory, slot, into)?;
                return Ok(if is_read { Got::Read } else { Got::Length });
            }
            let has = self.have(&[*name])? == [true];
            Ok(if has { Got::Length } else { Got::Absent })
        })
    }

    fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> Result<(), StoreError> {
        let bytes = record_bytes(head.len(), pages.len(), pages.first().map_or(0, |page| page.len()));
        self.check_size(bytes)?;
        self.with_slot(|slot| {
            write_record(&self.memory, slot, head, pages)?;
            let is_stored = self.send(b'p', &[(name.to_string(), slot, bytes)])? == [true];
            if is_stored { Ok(()) } else { Err(StoreError::Full) }
        })
    }

    fn remove(&self, names: &[Name]) -> Result<(), StoreError> {
        self.send(b'r', &names.iter().map(|name| (name.to_string(), 0, 0)).collect::<Vec<_>>()).map(drop)
    }

    fn remove_space(&self, fingerprint: &Fingerprint, space: Space) -> Result<(), StoreError> {
        self.send(b'f', &[(format!("v1/{fingerprint}/{space}/"), 0, 0)]).map(drop)
    }
}
