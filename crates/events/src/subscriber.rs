//! Receives an engine's messages in order, and detects missed messages.
//!
//! A number that is too large is a gap. The subscriber requests the lost messages; if the publisher does not keep them
//! any more, it requests everything. A smaller number is a restart: the earlier messages belong to an engine that has
//! ended, so the subscriber requests everything. Not here: the contents of payloads (`decode.rs`).

use std::collections::VecDeque;
use std::fmt;

use bytes::Bytes;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqError};

use crate::publisher::{DUMP, END, frames};

/// What a subscriber receives of an engine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Heard {
    /// The next payload.
    Payload(Bytes),
    /// Messages are lost for good, so the receiver's state may be wrong. The engine will send everything again.
    Lost {
        /// Number of the first lost message.
        from: u64,
        /// Number of the first message after the lost ones.
        to: u64,
    },
    /// The engine has restarted with an empty cache. It will send its contents.
    Restarted,
}

/// An error while receiving.
#[derive(Debug)]
pub enum HearError {
    /// The socket.
    Socket(ZmqError),
    /// A message of other frames than a topic, a number and a payload.
    Frames {
        /// How long each of them is.
        lengths: Vec<usize>,
    },
}

impl fmt::Display for HearError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(error) => write!(f, "the socket: {error}"),
            Self::Frames { lengths } => {
                write!(f, "frames of {lengths:?} bytes are no topic, number and payload")
            }
        }
    }
}

impl std::error::Error for HearError {}

impl From<ZmqError> for HearError {
    fn from(error: ZmqError) -> Self {
        Self::Socket(error)
    }
}

/// Listens to one engine.
pub struct Subscriber {
    socket: SubSocket,
    replay: DealerSocket,
    replay_endpoint: String,
    /// The number of the next message.
    next: u64,
    /// Heard and not handed over.
    ready: VecDeque<Heard>,
}

impl Subscriber {
    /// Connects to an engine's publisher. The messages that the publisher has kept come first.
    ///
    /// # Errors
    /// Those of ZeroMQ, and of an answer that is none.
    pub async fn connect(endpoint: &str, replay_endpoint: &str) -> Result<Self, HearError> {
        let mut socket = SubSocket::new();
        socket.connect(endpoint).await?;
        socket.subscribe("").await?;
        let replay = connected(replay_endpoint).await?;
        let replay_endpoint = replay_endpoint.to_owned();
        let mut subscriber =
            Self { socket, replay, replay_endpoint, next: 0, ready: VecDeque::new() };
        subscriber.catch_up(END).await?;
        Ok(subscriber)
    }

    /// The next thing. It can be asked for again if nobody has waited for the answer.
    ///
    /// # Errors
    /// [`HearError`].
    pub async fn hear(&mut self) -> Result<Heard, HearError> {
        while self.ready.is_empty() {
            let message = self.socket.recv().await?.into_vec();
            let (number, payload) = parts(&message)?;
            self.take(number, payload).await?;
        }
        Ok(self.ready.pop_front().expect("something is"))
    }

    /// Takes a message from the PUB socket.
    async fn take(&mut self, number: u64, payload: Bytes) -> Result<(), HearError> {
        if number > self.next {
            self.catch_up(number).await?;
        } else if number < self.next {
            self.ready.push_back(Heard::Restarted);
            // The previous connection ended with the previous process.
            self.replay = connected(&self.replay_endpoint).await?;
            self.ask_for_all().await?;
        }
        self.next = number + 1;
        self.ready.push_back(Heard::Payload(payload));
        Ok(())
    }

    /// Requests the messages before number `end`.
    async fn catch_up(&mut self, end: u64) -> Result<(), HearError> {
        let from = self.next;
        self.ask(&from.to_be_bytes()).await?;
        while let Some((number, payload)) = self.answer().await? {
            // Later messages arrive on the PUB socket, or have arrived.
            if number == self.next && number < end {
                self.next += 1;
                self.ready.push_back(Heard::Payload(payload));
            }
        }
        if self.next < end && end != END {
            self.ready.push_back(Heard::Lost { from: self.next, to: end });
            self.ask_for_all().await?;
        }
        Ok(())
    }

    /// Asks the engine to say everything again. When this is answered, it will.
    ///
    /// # Errors
    /// [`HearError`].
    pub async fn ask_for_all(&mut self) -> Result<(), HearError> {
        self.ask(DUMP).await?;
        while self.answer().await?.is_some() {}
        Ok(())
    }

    async fn ask(&mut self, what: &[u8]) -> Result<(), HearError> {
        let request = frames(&[Bytes::new(), Bytes::copy_from_slice(what)]);
        Ok(self.replay.send(request).await?)
    }

    /// A message of an answer; none at its end.
    async fn answer(&mut self) -> Result<Option<(u64, Bytes)>, HearError> {
        let mut reply = self.replay.recv().await?.into_vec();
        if reply.first().is_some_and(Bytes::is_empty) {
            reply.remove(0);
        }
        if reply.len() == 2 {
            // Engines before June 2026 leave the topic out.
            reply.insert(0, Bytes::new());
        }
        let (number, payload) = parts(&reply)?;
        Ok((number != END).then_some((number, payload)))
    }
}

/// A socket to ask by.
async fn connected(endpoint: &str) -> Result<DealerSocket, ZmqError> {
    let mut replay = DealerSocket::new();
    replay.connect(endpoint).await?;
    Ok(replay)
}

/// Number and payload of a message.
fn parts(frames: &[Bytes]) -> Result<(u64, Bytes), HearError> {
    let wrong = || HearError::Frames { lengths: frames.iter().map(Bytes::len).collect() };
    let [_, number, payload] = frames else { return Err(wrong()) };
    let number = <[u8; 8]>::try_from(&number[..]).map_err(|_| wrong())?;
    Ok((u64::from_be_bytes(number), payload.clone()))
}
