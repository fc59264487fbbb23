//! Connections: accepted up to a limit, and closed when they exceed a time limit.
//!
//! A connection waits for a request's headers, is busy with a request until its answer is written, or is idle. Beyond
//! the limit, the server closes the connection that has waited longest. If all are busy, a few spare connections serve
//! only `/health` and `/ping`.
//!
//! A client that closes its connection, or only its sending half, has hung up, and its request is dropped. hyper reads
//! no further while it has bytes behind the request, so [`WatchedStream`] reads ahead to detect the end.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::io::{self, Read};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::http::{Request, Response};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

use super::options::{Bounds, SPARES};

/// Pause after a failed `accept`, for example for lack of a descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Maximum number of bytes read ahead behind a request that is not answered yet. The server drops further bytes, and
/// closes the connection after the requests before them.
const AHEAD_MAX: usize = 64 << 10;

/// State of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// The client has connected, or has begun a request whose headers are incomplete.
    Header,
    /// The server reads a request's body.
    Body,
    /// The server answers a request whose body has been read or dropped.
    Answer,
    /// The last answer is written.
    Idle,
}

impl Phase {
    fn is_busy(self) -> bool {
        matches!(self, Self::Body | Self::Answer)
    }
}

#[derive(Clone, Copy, Debug)]
struct State {
    phase: Phase,
    since: Instant,
    /// The time at which the client stopped taking bytes; `None` while it takes bytes.
    stalled: Option<Instant>,
}

/// A connection, shared by the table and its own task.
#[derive(Debug)]
struct Peer {
    state: watch::Sender<State>,
    evicted: Notify,
}

impl Peer {
    fn new() -> Self {
        let now = Instant::now();
        let state = State { phase: Phase::Header, since: now, stalled: None };
        Self { state: watch::Sender::new(state), evicted: Notify::new() }
    }

    fn phase(&self) -> Phase {
        self.state.borrow().phase
    }

    fn enter(&self, phase: Phase) {
        let since = Instant::now();
        self.state.send_modify(|state| (state.phase, state.since) = (phase, since));
    }

    /// Records whether the client takes bytes.
    fn takes(&self, takes: bool) {
        self.state.send_if_modified(|state| {
            let changed = state.stalled.is_none() != takes;
            if changed {
                state.stalled = (!takes).then(Instant::now);
            }
            changed
        });
    }

    /// Waits until the connection exceeds a time limit, or must close for another connection.
    async fn overdue(&self, bounds: &Bounds) {
        let mut states = self.state.subscribe();
        loop {
            let state = *states.borrow_and_update();
            let deadline = match (state.stalled, state.phase) {
                (Some(since), _) => Some(since + bounds.idle),
                (None, Phase::Header) => Some(state.since + bounds.header),
                (None, Phase::Idle) => Some(state.since + bounds.idle),
                (None, Phase::Body | Phase::Answer) => None,
            };
            let late = async {
                match deadline {
                    Some(deadline) => sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = late => return,
                () = self.evicted.notified() => return,
                // The sender lives as long as `self`.
                _ = states.changed() => {}
            }
        }
    }
}

/// Open connections.
#[derive(Debug, Default)]
struct Table {
    peers: HashMap<u64, (Arc<Peer>, bool)>,
    entered: u64,
}

impl Table {
    /// Adds a connection and returns its number, its peer, and whether it is a spare one. Returns `None` if all
    /// connections, including the spare ones, are busy.
    fn enter(&mut self, most: usize) -> Option<(u64, Arc<Peer>, bool)> {
        let spares = self.peers.values().filter(|(_, is_spare)| *is_spare).count();
        let is_spare = if self.peers.len() - spares < most || self.evict(false) {
            false
        } else if spares < SPARES || self.evict(true) {
            true
        } else {
            return None;
        };
        let (number, peer) = (self.entered, Arc::new(Peer::new()));
        self.entered += 1;
        self.peers.insert(number, (Arc::clone(&peer), is_spare));
        Some((number, peer, is_spare))
    }

    /// Closes the connection that has waited longest, among the spare ones or among the others. Returns false if all
    /// of them are busy. O(connections).
    fn evict(&mut self, spare: bool) -> bool {
        let waiting = self.peers.iter().filter(|(_, (peer, is_spare))| *is_spare == spare && !peer.phase().is_busy());
        let oldest = waiting.min_by_key(|(_, (peer, _))| peer.state.borrow().since);
        let Some(number) = oldest.map(|(&number, _)| number) else { return false };
        if let Some((peer, _)) = self.peers.remove(&number) {
            peer.evicted.notify_one();
        }
        true
    }
}

/// Serves connections by `router` until `end`, and spare ones by `crowded`; returns when all are closed.
pub async fn serve(
    listener: TcpListener,
    (router, crowded): (Router, Router),
    bounds: Bounds,
    end: impl Future<Output = ()>,
) {
    let table = Arc::new(Mutex::new(Table::default()));
    let (ending, ends) = watch::channel(false);
    // Each connection has a sender; the channel closes with the last connection.
    let (open, mut closed) = mpsc::channel::<Infallible>(1);
    tokio::pin!(end);
    loop {
        let accepted = tokio::select! {
            () = &mut end => break,
            accepted = listener.accept() => accepted,
        };
        let Ok((stream, _)) = accepted else {
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // Each token is a small write that a client waits for.
        let _ = stream.set_nodelay(true);
        let entered = table.lock().unwrap_or_else(PoisonError::into_inner).enter(bounds.connections);
        let Some((number, peer, is_spare)) = entered else { continue };
        let router = if is_spare { crowded.clone() } else { router.clone() };
        let (table, ends, open) = (Arc::clone(&table), ends.clone(), open.clone());
        tokio::spawn(async move {
            connection(stream, router, (&peer, is_spare), &bounds, ends).await;
            table.lock().unwrap_or_else(PoisonError::into_inner).peers.remove(&number);
            drop(open);
        });
    }
    drop(listener);
    let _ = ending.send(true);
    drop(open);
    closed.recv().await;
}

async fn connection(
    stream: TcpStream,
    router: Router,
    (peer, is_spare): (&Arc<Peer>, bool),
    bounds: &Bounds,
    mut ends: watch::Receiver<bool>,
) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(|request: Request<Incoming>| {
        peer.enter(Phase::Body);
        let watched = |then| WatchedPeer { peer: Arc::clone(peer), then };
        let (read, written) = (watched(Phase::Answer), watched(Phase::Idle));
        let answer = router.call(request.map(|body| WatchedBody { body, _peer: read }));
        async move { answer.await.map(|answer: Response<Body>| answer.map(|body| WatchedBody { body, _peer: written })) }
    });
    let io = TokioIo::new(WatchedStream::new(stream, Arc::clone(peer)));
    let mut http = http1::Builder::new();
    let connection = http.keep_alive(!is_spare).serve_connection(io, service);
    tokio::pin!(connection);
    let overdue = peer.overdue(bounds);
    tokio::pin!(overdue);
    let mut is_ending = false;
    loop {
        tokio::select! {
            _ = connection.as_mut() => return,
            () = &mut overdue => return,
            _ = ends.wait_for(|&end| end), if !is_ending => {
                is_ending = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// Changes the phase of a busy connection when it is dropped.
struct WatchedPeer {
    peer: Arc<Peer>,
    then: Phase,
}

impl Drop for WatchedPeer {
    fn drop(&mut self) {
        self.peer.enter(self.then);
    }
}

/// Body of a request or of an answer. When it is dropped, its connection enters the next phase.
struct WatchedBody<B> {
    body: B,
    _peer: WatchedPeer,
}

impl<B: HttpBody + Unpin> HttpBody for WatchedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream that records the start of a request, and whether its client takes bytes. While the server answers, the
/// stream reads ahead, and its writes fail when the client has hung up.
struct WatchedStream {
    stream: TcpStream,
    peer: Arc<Peer>,
    /// Bytes read ahead, which precede those of `stream`.
    ahead: VecDeque<u8>,
    /// Whether bytes behind `ahead` were dropped.
    is_cut: bool,
}

impl WatchedStream {
    fn new(stream: TcpStream, peer: Arc<Peer>) -> Self {
        Self { stream, peer, ahead: VecDeque::new(), is_cut: false }
    }

    /// Reads ahead while the server answers a request.
    ///
    /// # Errors
    /// The client has hung up.
    fn watch(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let mut bytes = [0; 4 << 10];
        while self.peer.phase() == Phase::Answer {
            let mut chunk = ReadBuf::new(&mut bytes);
            if Pin::new(&mut self.stream).poll_read(context, &mut chunk)?.is_pending() {
                break;
            }
            let chunk = chunk.filled();
            if chunk.is_empty() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            self.is_cut |= self.ahead.len() + chunk.len() > AHEAD_MAX;
            if !self.is_cut {
                self.ahead.extend(chunk);
            }
            // hyper may wait for these bytes.
            context.waker().wake_by_ref();
        }
        Ok(())
    }
}

impl AsyncRead for WatchedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = if !self.ahead.is_empty() {
            let count = self.ahead.read(buffer.initialize_unfilled())?;
            buffer.advance(count);
            Poll::Ready(Ok(()))
        } else if !self.is_cut {
            Pin::new(&mut self.stream).poll_read(context, buffer)
        } else if self.peer.phase() == Phase::Answer {
            // hyper reads again after the answer.
            Poll::Pending
        } else {
            Poll::Ready(Ok(()))
        };
        if buffer.filled().len() > before && self.peer.phase() == Phase::Idle {
            self.peer.enter(Phase::Header);
        }
        read
    }
}

impl AsyncWrite for WatchedStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.watch(context)?;
        let wrote = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.peer.takes(wrote.is_ready());
        wrote
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.watch(context)?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.watch(context)?;
        let wrote = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.peer.takes(wrote.is_ready());
        wrote
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_one_that_waited_longest_makes_room() {
        let mut table = Table::default();
        let peers: Vec<_> = (0..3).map(|_| table.enter(3).expect("room")).collect();
        assert!(peers.iter().all(|(_, _, is_spare)| !is_spare));
        peers[0].1.enter(Phase::Answer);
        peers[1].1.enter(Phase::Idle);
        let (_, _, is_spare) = table.enter(3).expect("one makes room");
        assert!(!is_spare && !table.peers.contains_key(&2), "it has waited since it connected");
        table.peers.values().for_each(|(peer, _)| peer.enter(Phase::Answer));
        for _ in 0..SPARES {
            let (_, peer, is_spare) = table.enter(3).expect("a spare one");
            assert!(is_spare);
            peer.enter(Phase::Answer);
        }
        assert!(table.enter(3).is_none(), "all are busy");
        peers[0].1.enter(Phase::Idle);
        assert!(table.enter(3).is_some_and(|(_, _, is_spare)| !is_spare));
    }
}
