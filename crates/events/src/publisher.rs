//! Publishes payloads over ZeroMQ: a PUB socket for subscribers, and a ROUTER socket that replays lost messages.
//!
//! A message is `[topic, number as 8 bytes, payload]`. Numbers count from 0, and the publisher keeps the last messages.
//! To the request `["", number]` the publisher replies with all kept messages from that number on, as
//! `["", topic, number, payload]`, and then `["", "", 2^64 - 1, ""]`. vLLM and SGLang use this protocol. The request
//! `["", "dump"]` is an addition of this example: the host then publishes its whole cache in the next messages.
//!
//! Each peer has a task that reads the kept messages at the peer's own speed. The kept messages are therefore the queue
//! of every peer. A peer that falls behind them misses messages and sees a gap in their numbers. It costs a task and
//! one message, and delays neither the engine nor other peers.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::zmtp::{Kind, handshake, read_frame, write_command, write_message};

/// Number of the message that ends a reply.
pub const END: u64 = u64::MAX;
/// Request for the whole cache.
pub const DUMP: &[u8] = b"dump";
/// Maximum number of peers of each socket. A silent peer stays until its connection closes.
const PEERS_MAX: usize = 256;
/// Maximum number of frames of a request.
const FRAMES_MAX: usize = 8;
/// Time for the handshake of a peer.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Pause after a failed `accept`, for example for lack of a descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Endpoints, topic and history of a publisher.
#[derive(Clone, Debug)]
pub struct PublisherConfig {
    /// Endpoint of the PUB socket, `tcp://HOST:PORT`. The host `*` stands for all addresses of the machine.
    pub endpoint: String,
    /// Endpoint of the ROUTER socket, for replays.
    pub replay_endpoint: String,
    /// The first frame of every message.
    pub topic: String,
    /// Maximum number of kept messages.
    pub keep: usize,
    /// Maximum number of bytes of kept payloads. A long payload, such as a dump of a large cache, is kept beyond it
    /// until as many bytes follow, so that peers can read it.
    pub keep_bytes: usize,
    /// Minimum time between two dumps, so that peers that request them in a loop do not slow the engine.
    pub dump_pause: Duration,
}

impl Default for PublisherConfig {
    fn default() -> Self {
        let any = || "tcp://127.0.0.1:0".to_owned();
        Self {
            endpoint: any(),
            replay_endpoint: any(),
            topic: String::new(),
            keep: 10_000,
            keep_bytes: 64 << 20,
            dump_pause: Duration::from_secs(1),
        }
    }
}

/// A publisher whose sockets are served by tasks. Dropping it ends the tasks.
pub struct Publisher {
    /// Endpoint of the PUB socket, with its assigned port.
    pub endpoint: String,
    /// Endpoint of the ROUTER socket, for replays.
    pub replay_endpoint: String,
    /// The time of the last dump.
    dumped: Mutex<Option<Instant>>,
    shared: Arc<Shared>,
    tasks: JoinSet<()>,
}

impl Publisher {
    /// Binds both sockets and starts their tasks.
    ///
    /// # Errors
    /// An endpoint is invalid or in use. The error names it.
    pub async fn bind(config: PublisherConfig) -> io::Result<Self> {
        let (listener, endpoint) = bind(&config.endpoint).await?;
        let (replays, replay_endpoint) = bind(&config.replay_endpoint).await?;
        let shared = Arc::new(Shared::new(config));
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, Kind::Pub, Arc::clone(&shared)));
        tasks.spawn(accept(replays, Kind::Router, Arc::clone(&shared)));
        Ok(Self { endpoint, replay_endpoint, dumped: Mutex::default(), shared, tasks })
    }

    /// Numbers and keeps a payload, and wakes the tasks that send it to subscribers. Waits for no peer. O(1) plus the
    /// number of connected subscribers.
    pub fn send(&self, payload: Vec<u8>) {
        self.shared.push(payload.into(), false);
    }

    /// Numbers and keeps a payload without sending it, like a full queue on the path.
    pub fn lose(&self, payload: Vec<u8>) {
        self.shared.push(payload.into(), true);
    }

    /// Returns whether the host must publish its whole cache now: a peer has requested it since the last dump, and the
    /// last dump is [`PublisherConfig::dump_pause`] ago. Later calls return a request that comes earlier.
    pub fn take_dump_request(&self) -> bool {
        let mut dumped = self.dumped.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = dumped.is_none_or(|at| at.elapsed() >= self.shared.config.dump_pause);
        let is_taken = is_due && self.shared.dump.swap(false, Ordering::AcqRel);
        if is_taken {
            *dumped = Some(Instant::now());
        }
        is_taken
    }

    /// Ends the tasks and closes the sockets.
    pub async fn close(mut self) {
        self.tasks.shutdown().await;
    }
}

/// Returns a listener and its endpoint with the assigned port.
async fn bind(endpoint: &str) -> io::Result<(TcpListener, String)> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{endpoint}: {e}"));
    let invalid = || io::Error::new(io::ErrorKind::InvalidInput, "not of the form tcp://HOST:PORT");
    let address = endpoint.strip_prefix("tcp://").ok_or_else(|| named(invalid()))?;
    let address = match address.strip_prefix("*:") {
        Some(port) => format!("0.0.0.0:{port}"),
        None => address.to_owned(),
    };
    let listener = TcpListener::bind(address).await.map_err(named)?;
    let endpoint = format!("tcp://{}", listener.local_addr()?);
    Ok((listener, endpoint))
}

/// The kept messages.
struct History {
    /// Number of the first kept message.
    first: u64,
    /// Payloads, and whether they are withheld from subscribers.
    kept: VecDeque<(Bytes, bool)>,
    /// Sum of the kept payloads' lengths.
    bytes: usize,
}

impl History {
    /// Returns whether the first payload is beyond the limit of bytes.
    fn exceeds(&self, limit: usize) -> bool {
        self.bytes > limit && self.kept.front().is_some_and(|(first, _)| self.bytes - first.len() >= first.len())
    }
}

/// State that the tasks share with the host.
struct Shared {
    config: PublisherConfig,
    history: Mutex<History>,
    /// Number of the next message.
    next: watch::Sender<u64>,
    dump: AtomicBool,
}

impl Shared {
    fn new(config: PublisherConfig) -> Self {
        Self {
            config,
            history: Mutex::new(History { first: 0, kept: VecDeque::new(), bytes: 0 }),
            next: watch::Sender::new(0),
            dump: AtomicBool::new(false),
        }
    }

    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, payload: Bytes, is_withheld: bool) {
        let mut history = self.history();
        history.bytes += payload.len();
        history.kept.push_back((payload, is_withheld));
        while history.kept.len() > self.config.keep.max(1) || history.exceeds(self.config.keep_bytes) {
            let (dropped, _) = history.kept.pop_front().expect("the history is not empty");
            history.bytes -= dropped.len();
            history.first += 1;
        }
        // Under the lock, so that the number never falls.
        self.next.send_replace(history.first + history.kept.len() as u64);
    }

    /// Returns the first kept message whose number is at least `number`. `subscriber` skips withheld ones. O(withheld
    /// messages skipped).
    fn message(&self, number: u64, subscriber: bool) -> Option<(u64, Bytes)> {
        let history = self.history();
        let skipped = usize::try_from(number.saturating_sub(history.first)).ok()?;
        let mut kept = history.kept.iter().enumerate().skip(skipped);
        let (at, (payload, _)) = kept.find(|(_, (_, is_withheld))| !(subscriber && *is_withheld))?;
        Some((history.first + at as u64, payload.clone()))
    }
}

/// Accepts the peers of a socket. Each peer has its own task.
async fn accept(listener: TcpListener, kind: Kind, shared: Arc<Shared>) {
    let mut peers = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = peers.join_next() => continue,
        };
        match accepted {
            // An error ends the connection of its peer only.
            Ok((stream, _)) if peers.len() < PEERS_MAX => {
                _ = peers.spawn(serve(stream, kind, Arc::clone(&shared)));
            }
            Ok(_) => {}
            Err(_) => sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// Serves a peer until its connection closes.
async fn serve(mut stream: TcpStream, kind: Kind, shared: Arc<Shared>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    // A peer that vanishes without closing its connection gives its place back.
    SockRef::from(&stream).set_keepalive(true)?;
    let (reader, writer) = stream.split();
    let (mut reader, mut writer) = (BufReader::new(reader), BufWriter::new(writer));
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    timeout(HANDSHAKE, handshake(kind, &mut reader, &mut writer)).await.map_err(late)??;
    match kind {
        Kind::Pub => {
            let peer = watch::Sender::new(PeerState::default());
            tokio::select! {
                ended = follow(&peer, shared.config.topic.as_bytes(), reader) => ended,
                ended = publish(&peer, &shared, writer) => ended,
            }
        }
        Kind::Router => reply(&shared, reader, writer).await,
    }
}

/// What a subscriber has requested.
#[derive(Default)]
struct PeerState {
    /// Number of its subscriptions that match the topic.
    subscriptions: u32,
    /// Answer to its last heartbeat, until the answer is sent.
    pong: Option<Vec<u8>>,
}

/// Reads the subscriptions and heartbeats of a subscriber.
async fn follow(peer: &watch::Sender<PeerState>, topic: &[u8], mut reader: impl AsyncRead + Unpin) -> io::Result<()> {
    loop {
        let frame = read_frame(&mut reader).await?;
        if let Some(pong) = frame.pong() {
            peer.send_modify(|peer| peer.pong = Some(pong));
        } else if let Some((&action, prefix)) = frame.body.split_first()
            && !frame.is_command
            && topic.starts_with(prefix)
        {
            peer.send_modify(|peer| match action {
                1 => peer.subscriptions = peer.subscriptions.saturating_add(1),
                0 => peer.subscriptions = peer.subscriptions.saturating_sub(1),
                _ => {}
            });
        }
    }
}

/// Sends messages to a subscriber, from those on that follow its subscription.
async fn publish(
    peer: &watch::Sender<PeerState>,
    shared: &Shared,
    mut writer: impl AsyncWrite + Unpin,
) -> io::Result<()> {
    let (mut changes, mut next) = (peer.subscribe(), shared.next.subscribe());
    let mut at = None;
    loop {
        let is_subscribed = changes.borrow_and_update().subscriptions > 0;
        let mut pong = None;
        peer.send_if_modified(|peer| {
            pong = peer.pong.take();
            false
        });
        if let Some(pong) = pong {
            write_command(&mut writer, &pong).await?;
        }
        let newest = *next.borrow_and_update();
        let number = *at.get_or_insert(newest);
        at = is_subscribed.then_some(number);
        if let Some((number, payload)) = at.and_then(|number| shared.message(number, true)) {
            let frames: [&[u8]; 3] = [shared.config.topic.as_bytes(), &number.to_be_bytes(), &payload];
            write_message(&mut writer, &frames).await?;
            at = Some(number + 1);
            continue;
        }
        writer.flush().await?;
        // The senders live as long as the borrows.
        tokio::select! {
            _ = changes.changed() => {}
            _ = next.changed() => {}
        }
    }
}

/// Answers the requests of a peer, one after the other.
async fn reply(
    shared: &Shared,
    mut reader: impl AsyncRead + Unpin,
    mut writer: impl AsyncWrite + Unpin,
) -> io::Result<()> {
    let mut request = Vec::new();
    loop {
        let frame = read_frame(&mut reader).await?;
        if frame.is_command {
            if let Some(pong) = frame.pong() {
                write_command(&mut writer, &pong).await?;
                writer.flush().await?;
            }
            continue;
        }
        request.push(frame.body);
        if request.len() > FRAMES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if frame.has_more {
            continue;
        }
        // Messages of another form are no requests.
        if let [empty, body] = &request[..]
            && empty.is_empty()
        {
            answer(shared, body, &mut writer).await?;
            writer.flush().await?;
        }
        request.clear();
    }
}

/// Answers a request.
async fn answer(shared: &Shared, request: &[u8], writer: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    if request == DUMP {
        shared.dump.store(true, Ordering::Release);
    } else if let Ok(from) = <[u8; 8]>::try_from(request) {
        let (mut at, end) = (u64::from_be_bytes(from), *shared.next.borrow());
        // If the peer reads slower than messages leave the history, the reply has a gap.
        while let Some((number, payload)) = shared.message(at, false).filter(|found| found.0 < end) {
            let frames: [&[u8]; 4] = [&[], shared.config.topic.as_bytes(), &number.to_be_bytes(), &payload];
            write_message(writer, &frames).await?;
            at = number + 1;
        }
    } else {
        return Ok(());
    }
    write_message(writer, &[&[], &[], &END.to_be_bytes(), &[]]).await
}
