//! Connections: accepted up to a limit, and closed when they exceed a time limit.
//!
//! Beyond the limit, the server closes the connection that has waited longest. If all are busy, a few spare connections
//! serve only `/health` and `/ping`.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use super::options::{Bounds, SPARES};
use super::peer::{Peer, Phase};
use super::watched::{WatchedBody, WatchedPeer, WatchedStream};

/// Pause after a failed `accept`, for example for lack of a descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

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
        let (number, peer) = (self.entered, Arc::<Peer>::default());
        self.entered += 1;
        self.peers.insert(number, (Arc::clone(&peer), is_spare));
        Some((number, peer, is_spare))
    }

    /// Closes the connection that has waited longest, among the spare ones or among the others. Returns false if all
    /// of them are busy. O(connections).
    fn evict(&mut self, spare: bool) -> bool {
        let waiting = self.peers.iter().filter(|(_, (peer, is_spare))| *is_spare == spare && !peer.phase().is_busy());
        let oldest = waiting.min_by_key(|(_, (peer, _))| peer.since());
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
    router: Router,
    crowded: Router,
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
            connection(stream, router, &peer, is_spare, &bounds, ends).await;
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
    peer: &Arc<Peer>,
    is_spare: bool,
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
