//! Receives an engine's messages in order and detects lost messages.
//!
//! A number that is too large is a gap. The subscriber requests the lost messages, or the whole cache if the publisher
//! no longer keeps them. A smaller number is a restart: the known contents belong to an engine that has ended, so the
//! subscriber requests the whole cache.

use std::collections::VecDeque;
use std::fmt;

use bytes::Bytes;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqError, ZmqMessage};

use crate::publisher::{DUMP, END};

/// Received item.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Received {
    Payload(Bytes),
    /// Messages are lost for good, so the known contents are unreliable. The engine will publish its whole cache.
    Lost {
        /// Number of the first lost message.
        from: u64,
        /// Number of the first message after the gap.
        to: u64,
    },
    /// The engine has restarted. It will publish its whole cache.
    Restarted,
}

/// Error of a subscriber.
#[derive(Debug)]
pub enum ReceiveError {
    Socket(ZmqError),
    /// The message's frames are not a topic, a number and a payload.
    Frames {
        /// Length of each frame in bytes.
        lengths: Vec<usize>,
    },
    /// The message has the number [`END`], which ends replies.
    Number,
}

impl fmt::Display for ReceiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(error) => write!(f, "the socket: {error}"),
            Self::Frames { lengths } => {
                write!(f, "frames of {lengths:?} bytes are no topic, number and payload")
            }
            Self::Number => write!(f, "a message has the number {END}, which ends replies"),
        }
    }
}

impl std::error::Error for ReceiveError {}

impl From<ZmqError> for ReceiveError {
    fn from(error: ZmqError) -> Self {
        Self::Socket(error)
    }
}

/// Subscriber of one engine.
pub struct Subscriber {
    socket: SubSocket,
    /// Socket for requests. During a reply the call that requested it owns the socket. If the call is cancelled or
    /// fails, the rest of the reply is dropped with the socket, and the next request connects a new one.
    replay: Option<DealerSocket>,
    replay_endpoint: String,
    /// Number of the next message.
    next: u64,
    /// Received items that the caller has not taken.
    ready: VecDeque<Received>,
}

impl Subscriber {
    /// Connects to an engine's publisher. The first items are the messages sent so far, if the publisher still keeps
    /// them all. Otherwise the first item is [`Received::Lost`], once the next message arrives.
    ///
    /// # Errors
    /// Errors of ZeroMQ, and of a malformed reply.
    pub async fn connect(endpoint: &str, replay_endpoint: &str) -> Result<Self, ReceiveError> {
        let mut socket = SubSocket::new();
        socket.connect(endpoint).await?;
        socket.subscribe("").await?;
        let replay_endpoint = replay_endpoint.to_owned();
        let mut subscriber = Self { socket, replay: None, replay_endpoint, next: 0, ready: VecDeque::new() };
        subscriber.catch_up(END).await?;
        Ok(subscriber)
    }

    /// Waits for the next item. If a call is cancelled while it handles a gap or a restart, the next message is a gap
    /// again.
    pub async fn receive(&mut self) -> Result<Received, ReceiveError> {
        while self.ready.is_empty() {
            let message = self.socket.recv().await?.into_vec();
            let (number, payload) = parts(&message)?;
            if number == END {
                return Err(ReceiveError::Number);
            }
            self.take(number, payload).await?;
        }
        Ok(self.ready.pop_front().expect("the loop ends with an item"))
    }

    /// Queues a message. Before it, queues the messages of a gap, or the report of a loss or of a restart.
    async fn take(&mut self, number: u64, payload: Bytes) -> Result<(), ReceiveError> {
        if number > self.next {
            self.catch_up(number).await?;
        } else if number < self.next {
            self.ready.push_back(Received::Restarted);
            // If this call is cancelled, the new engine's next message is a gap.
            self.next = 0;
            // The old socket belonged to the connection of the ended engine.
            self.replay = None;
            self.request_dump().await?;
        }
        self.next = number + 1;
        self.ready.push_back(Received::Payload(payload));
        Ok(())
    }

    /// Requests the messages before `end`. If some are lost for good, reports the loss and requests the whole cache.
    async fn catch_up(&mut self, end: u64) -> Result<(), ReceiveError> {
        let mut replay = self.request(&self.next.to_be_bytes()).await?;
        while let Some((number, payload)) = reply(&mut replay).await? {
            // The PUB socket delivers later messages.
            if number == self.next && number < end {
                self.next += 1;
                self.ready.push_back(Received::Payload(payload));
            }
        }
        self.replay = Some(replay);
        if self.next < end && end != END {
            self.ready.push_back(Received::Lost { from: self.next, to: end });
            self.request_dump().await?;
        }
        Ok(())
    }

    /// Requests the whole cache. After the reply, the host of the engine publishes it.
    pub async fn request_dump(&mut self) -> Result<(), ReceiveError> {
        let mut replay = self.request(DUMP).await?;
        while reply(&mut replay).await?.is_some() {}
        self.replay = Some(replay);
        Ok(())
    }

    /// Sends a request, and returns the socket that receives the reply.
    async fn request(&mut self, body: &[u8]) -> Result<DealerSocket, ReceiveError> {
        let mut replay = match self.replay.take() {
            Some(replay) => replay,
            None => {
                let mut replay = DealerSocket::new();
                replay.connect(&self.replay_endpoint).await?;
                replay
            }
        };
        let mut request = ZmqMessage::from(Vec::new());
        request.push_back(Bytes::copy_from_slice(body));
        replay.send(request).await?;
        Ok(replay)
    }
}

/// Receives a message of a reply, or none at its end.
async fn reply(replay: &mut DealerSocket) -> Result<Option<(u64, Bytes)>, ReceiveError> {
    let mut reply = replay.recv().await?.into_vec();
    if reply.first().is_some_and(Bytes::is_empty) {
        reply.remove(0);
    }
    if reply.len() == 2 {
        // Engines before June 2026 omit the topic.
        reply.insert(0, Bytes::new());
    }
    let (number, payload) = parts(&reply)?;
    Ok((number != END).then_some((number, payload)))
}

/// Returns the number and the payload of a message.
fn parts(frames: &[Bytes]) -> Result<(u64, Bytes), ReceiveError> {
    let wrong = || ReceiveError::Frames { lengths: frames.iter().map(Bytes::len).collect() };
    let [_, number, payload] = frames else { return Err(wrong()) };
    let number = <[u8; 8]>::try_from(&number[..]).map_err(|_| wrong())?;
    Ok((u64::from_be_bytes(number), payload.clone()))
}
