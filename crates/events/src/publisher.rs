//! Publishes payloads over ZeroMQ: a PUB socket for subscribers, and a ROUTER socket that replays lost messages.
//!
//! A message is `[topic, number as 8 bytes, payload]`. Numbers count from 0, and the publisher keeps the last messages.
//! To the request `["", number]` the publisher replies with all kept messages from that number on, as
//! `["", topic, number, payload]`, and then `["", "", 2^64 - 1, ""]`. vLLM and SGLang use this protocol. The request
//! `["", "dump"]` is an addition of this example: the host then publishes its whole cache in the next messages.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage, ZmqResult};

/// Number of the message that ends a reply.
pub const END: u64 = u64::MAX;
/// Request for the whole cache.
pub const DUMP: &[u8] = b"dump";

/// Endpoints, topic and history of a publisher.
#[derive(Clone, Debug)]
pub struct PublisherConfig {
    /// Endpoint of the PUB socket.
    pub endpoint: String,
    /// Endpoint of the ROUTER socket, for replays.
    pub replay_endpoint: String,
    /// The first frame of every message.
    pub topic: String,
    /// Maximum number of kept messages.
    pub keep: usize,
}

impl Default for PublisherConfig {
    fn default() -> Self {
        let any = || "tcp://127.0.0.1:0".to_owned();
        Self { endpoint: any(), replay_endpoint: any(), topic: String::new(), keep: 10_000 }
    }
}

/// Queued payload.
enum Outgoing {
    Send(Bytes),
    /// The payload is numbered and kept but not sent, as if a queue on the path had been full.
    Lose(Bytes),
}

/// A publisher that runs as a task.
pub struct Publisher {
    /// Endpoint of the PUB socket, with its assigned port.
    pub endpoint: String,
    /// Endpoint of the ROUTER socket, for replays.
    pub replay_endpoint: String,
    outgoing: mpsc::UnboundedSender<Outgoing>,
    dump: Arc<AtomicBool>,
    task: JoinHandle<ZmqResult<()>>,
}

impl Publisher {
    /// Binds both sockets and starts the task.
    ///
    /// # Errors
    /// Errors of ZeroMQ: an endpoint that is invalid or in use.
    pub async fn bind(config: PublisherConfig) -> ZmqResult<Self> {
        let (mut socket, mut router) = (PubSocket::new(), RouterSocket::new());
        let endpoint = socket.bind(&config.endpoint).await?.to_string();
        let replay_endpoint = router.bind(&config.replay_endpoint).await?.to_string();
        let (outgoing, incoming) = mpsc::unbounded_channel();
        let dump = Arc::new(AtomicBool::new(false));
        let served = PublisherTask {
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

    /// Queues a payload, which the task sends to all subscribers. Does nothing after the task has ended.
    pub fn send(&self, payload: Vec<u8>) {
        self.push(Outgoing::Send(payload.into()));
    }

    /// Numbers and keeps a payload without sending it, like a full queue on the path.
    pub fn lose(&self, payload: Vec<u8>) {
        self.push(Outgoing::Lose(payload.into()));
    }

    fn push(&self, outgoing: Outgoing) {
        // The channel is closed only after the task has ended.
        _ = self.outgoing.send(outgoing);
    }

    /// Returns whether a subscriber has requested the whole cache since the last call.
    pub fn take_dump_request(&self) -> bool {
        self.dump.swap(false, Ordering::AcqRel)
    }

    /// Ends the task and closes the sockets.
    pub async fn close(self) {
        self.task.abort();
        _ = self.task.await;
    }
}

/// State of the task.
struct PublisherTask {
    socket: PubSocket,
    router: RouterSocket,
    topic: Bytes,
    next: u64,
    kept: VecDeque<(u64, Bytes)>,
    keep: usize,
    dump: Arc<AtomicBool>,
}

impl PublisherTask {
    async fn run(mut self, mut incoming: mpsc::UnboundedReceiver<Outgoing>) -> ZmqResult<()> {
        loop {
            tokio::select! {
                // The reply includes payloads that were queued before the request.
                biased;
                outgoing = incoming.recv() => match outgoing {
                    Some(outgoing) => self.send(outgoing).await?,
                    None => return Ok(()),
                },
                request = self.router.recv() => self.reply(request?).await,
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

    /// Replies to a request; ignores messages that are not requests. The reply ends early if the subscriber has closed
    /// the connection.
    async fn reply(&mut self, request: ZmqMessage) {
        let request = request.into_vec();
        let [sender, empty, body] = &request[..] else { return };
        if !empty.is_empty() {
            return;
        }
        let message = |topic: &Bytes, number, payload: &Bytes| {
            let empty = Bytes::new();
            frames(&[sender.clone(), empty, topic.clone(), number_frame(number), payload.clone()])
        };
        if body == DUMP {
            self.dump.store(true, Ordering::Release);
        } else if let Ok(from) = <[u8; 8]>::try_from(&body[..]) {
            let from = u64::from_be_bytes(from);
            for (number, payload) in self.kept.iter().filter(|(number, _)| *number >= from) {
                let sent = self.router.send(message(&self.topic, *number, payload)).await;
                if sent.is_err() {
                    return;
                }
            }
        } else {
            return;
        }
        _ = self.router.send(message(&Bytes::new(), END, &Bytes::new())).await;
    }
}

fn number_frame(number: u64) -> Bytes {
    Bytes::copy_from_slice(&number.to_be_bytes())
}

/// Returns a message of these frames.
pub(crate) fn frames(frames: &[Bytes]) -> ZmqMessage {
    let (first, rest) = frames.split_first().expect("a message has frames");
    let mut message = ZmqMessage::from(first.to_vec());
    rest.iter().for_each(|frame| message.push_back(frame.clone()));
    message
}
