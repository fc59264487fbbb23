//! Sends payloads over ZeroMQ: PUB for subscribers, ROUTER for subscribers that have missed messages.
//!
//! A message is `[topic, number as 8 bytes, payload]`; numbers count from 0 and the last ones are kept. A request is
//! `["", number]`, answered by all kept messages from that number on as `["", topic, number, payload]` and then
//! `["", "", 2^64 - 1, ""]`. That is the protocol of vLLM and SGLang. This example adds `["", "dump"]`: the host then
//! sends everything again, in its next messages.
//!
//! Not here: the contents of payloads (`encode.rs`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage, ZmqResult};

/// The number of the message that ends an answer.
pub const END: u64 = u64::MAX;
/// The request for everything.
pub const DUMP: &[u8] = b"dump";

/// How to send.
#[derive(Clone, Debug)]
pub struct PublisherConfig {
    /// The endpoint of the PUB socket.
    pub endpoint: String,
    /// The endpoint of the ROUTER socket, for replays.
    pub replay_endpoint: String,
    /// The first frame of every message.
    pub topic: String,
    /// Messages that are kept.
    pub keep: usize,
}

impl Default for PublisherConfig {
    fn default() -> Self {
        let any = || "tcp://127.0.0.1:0".to_owned();
        Self { endpoint: any(), replay_endpoint: any(), topic: String::new(), keep: 10_000 }
    }
}

/// A payload on its way out.
enum Outgoing {
    Send(Bytes),
    /// Numbers and keeps the payload without sending it, as if a queue on the way had been full.
    Lose(Bytes),
}

/// A publisher that runs as a task.
pub struct Publisher {
    /// Where those who listen connect, with the port that was given.
    pub endpoint: String,
    /// The endpoint of the ROUTER socket, for replays.
    pub replay_endpoint: String,
    outgoing: mpsc::UnboundedSender<Outgoing>,
    dump: Arc<AtomicBool>,
    task: JoinHandle<ZmqResult<()>>,
}

impl Publisher {
    /// Binds both sockets and begins to serve.
    ///
    /// # Errors
    /// Those of ZeroMQ: an endpoint that is no endpoint, or is taken.
    pub async fn bind(config: PublisherConfig) -> ZmqResult<Self> {
        let (mut socket, mut router) = (PubSocket::new(), RouterSocket::new());
        let endpoint = socket.bind(&config.endpoint).await?.to_string();
        let replay_endpoint = router.bind(&config.replay_endpoint).await?.to_string();
        let (outgoing, incoming) = mpsc::unbounded_channel();
        let dump = Arc::new(AtomicBool::new(false));
        let served = Served {
            socket,
            router,
            topic: config.topic.into(),
            next: 0,
            kept: VecDeque::new(),
            keep: config.keep,
            dump: dump.clone(),
        };
        let task = tokio::spawn(served.run(incoming));
        Ok(Self { endpoint, replay_endpoint, outgoing, dump, task })
    }

    /// Sends a payload to all subscribers.
    pub fn send(&self, payload: Vec<u8>) {
        self.push(Outgoing::Send(payload.into()));
    }

    /// Numbers and keeps a payload without sending it, as if a queue on the way had been full.
    pub fn lose(&self, payload: Vec<u8>) {
        self.push(Outgoing::Lose(payload.into()));
    }

    fn push(&self, outgoing: Outgoing) {
        // `close` returns the error of a task that has ended.
        _ = self.outgoing.send(outgoing);
    }

    /// Returns whether a subscriber has requested everything since the last call.
    pub fn dump_asked(&self) -> bool {
        self.dump.swap(false, Ordering::AcqRel)
    }

    /// Ends the task and closes the sockets.
    pub async fn close(self) {
        self.task.abort();
        _ = self.task.await;
    }
}

/// What the task owns.
struct Served {
    socket: PubSocket,
    router: RouterSocket,
    topic: Bytes,
    next: u64,
    kept: VecDeque<(u64, Bytes)>,
    keep: usize,
    dump: Arc<AtomicBool>,
}

impl Served {
    async fn run(mut self, mut incoming: mpsc::UnboundedReceiver<Outgoing>) -> ZmqResult<()> {
        loop {
            tokio::select! {
                // What was to be sent before a request came is in its answer.
                biased;
                outgoing = incoming.recv() => match outgoing {
                    Some(outgoing) => self.send(outgoing).await?,
                    None => return Ok(()),
                },
                request = self.router.recv() => self.answer(request?).await?,
            }
        }
    }

    async fn send(&mut self, outgoing: Outgoing) -> ZmqResult<()> {
        let (Outgoing::Send(payload) | Outgoing::Lose(payload)) = &outgoing;
        let number = self.next;
        self.next += 1;
        self.kept.push_back((number, payload.clone()));
        if self.kept.len() > self.keep {
            self.kept.pop_front();
        }
        match outgoing {
            Outgoing::Send(payload) => {
                self.socket.send(frames(&[self.topic.clone(), number_frame(number), payload])).await
            }
            Outgoing::Lose(_) => Ok(()),
        }
    }

    /// Answers a request, and ignores other messages.
    async fn answer(&mut self, request: ZmqMessage) -> ZmqResult<()> {
        let request = request.into_vec();
        let [sender, empty, asked] = &request[..] else { return Ok(()) };
        if !empty.is_empty() {
            return Ok(());
        }
        let reply = |topic: &Bytes, number, payload: &Bytes| {
            let empty = Bytes::new();
            frames(&[sender.clone(), empty, topic.clone(), number_frame(number), payload.clone()])
        };
        if asked == DUMP {
            self.dump.store(true, Ordering::Release);
        } else if let Ok(from) = <[u8; 8]>::try_from(&asked[..]) {
            let from = u64::from_be_bytes(from);
            for (number, payload) in self.kept.iter().filter(|(number, _)| *number >= from) {
                self.router.send(reply(&self.topic, *number, payload)).await?;
            }
        } else {
            return Ok(());
        }
        self.router.send(reply(&Bytes::new(), END, &Bytes::new())).await
    }
}

fn number_frame(number: u64) -> Bytes {
    Bytes::copy_from_slice(&number.to_be_bytes())
}

/// A message of these frames.
pub(crate) fn frames(frames: &[Bytes]) -> ZmqMessage {
    let (first, rest) = frames.split_first().expect("a message has frames");
    let mut message = ZmqMessage::from(first.to_vec());
    rest.iter().for_each(|frame| message.push_back(frame.clone()));
    message
}
