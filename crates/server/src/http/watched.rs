//! Streams and bodies that record what their connection does.
//!
//! A client that closes its connection, or only its sending half, has hung up, and its request is dropped. hyper reads
//! no further while it has bytes behind the request, so [`WatchedStream`] reads ahead to detect the end.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::HttpBody;
use hyper::body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::peer::{Peer, Phase};

/// Maximum number of bytes read ahead behind a request that is not answered yet. The server drops further bytes, and
/// closes the connection after the requests before them.
const AHEAD_MAX: usize = 64 << 10;

/// Changes the phase of a busy connection when it is dropped.
pub struct WatchedPeer {
    pub peer: Arc<Peer>,
    pub then: Phase,
}

impl Drop for WatchedPeer {
    fn drop(&mut self) {
        self.peer.enter(self.then);
    }
}

/// Body of a request or of an answer. When it is dropped, its connection enters the next phase.
pub struct WatchedBody<B> {
    pub body: B,
    pub _peer: WatchedPeer,
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
pub struct WatchedStream {
    stream: TcpStream,
    peer: Arc<Peer>,
    /// Bytes read ahead, which precede those of `stream`.
    ahead: VecDeque<u8>,
    /// Whether bytes behind `ahead` were dropped.
    is_cut: bool,
}

impl WatchedStream {
    pub fn new(stream: TcpStream, peer: Arc<Peer>) -> Self {
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
