//! The server's side of ZMTP 3.0, ZeroMQ's protocol, without authentication (mechanism NULL,
//! <https://rfc.zeromq.org/spec/23>): the handshake and the frames of one peer.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Maximum bytes of a peer's frame. Subscriptions, requests and commands are short.
const FRAME_MAX: u64 = 4 << 10;

const HAS_MORE: u8 = 1;
const IS_LONG: u8 = 2;
const IS_COMMAND: u8 = 4;

/// A frame of a peer.
#[derive(Debug)]
pub struct Frame {
    /// Whether the frame is a command of the protocol instead of a part of a message.
    pub is_command: bool,
    /// Whether more frames of the same message follow.
    pub has_more: bool,
    pub body: Vec<u8>,
}

impl Frame {
    /// Returns the answer to a heartbeat (`PING`, 2 bytes of time, context); `None` for other frames.
    pub fn pong(&self) -> Option<Vec<u8>> {
        let context = self.body.strip_prefix(b"\x04PING").filter(|_| self.is_command)?.get(2..)?;
        Some([b"\x04PONG", context].concat())
    }
}

/// Type of a socket that peers connect to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Publishes to SUB sockets.
    Pub,
    /// Answers requests of DEALER and REQ sockets.
    Router,
}

impl Kind {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Pub => b"PUB",
            Self::Router => b"ROUTER",
        }
    }

    fn serves(self, peer: &[u8]) -> bool {
        match self {
            Self::Pub => [&b"SUB"[..], b"XSUB"].contains(&peer),
            Self::Router => [&b"DEALER"[..], b"REQ", b"ROUTER"].contains(&peer),
        }
    }
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Exchanges the greeting and the types of the sockets with a peer.
///
/// # Errors
/// Errors of the connection, and `InvalidData` if the peer has another protocol, mechanism or type of socket.
pub async fn handshake(
    kind: Kind,
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    const MECHANISM: [u8; 20] = *b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..32].copy_from_slice(&MECHANISM);
    writer.write_all(&greeting).await?;
    writer.flush().await?;
    let mut peer = [0; 64];
    reader.read_exact(&mut peer).await?;
    if peer[0] != 0xff || peer[9] & 1 != 1 || peer[10] < 3 || peer[12..32] != MECHANISM {
        return Err(wrong("the peer does not use ZMTP 3 with the mechanism NULL"));
    }
    let name = kind.name();
    let len = (name.len() as u32).to_be_bytes();
    let ready = [b"\x05READY\x0bSocket-Type", &len[..], name].concat();
    write_frame(writer, IS_COMMAND, &ready).await?;
    writer.flush().await?;
    let frame = read_frame(reader).await?;
    let properties = frame.body.strip_prefix(b"\x05READY").filter(|_| frame.is_command);
    match properties.and_then(|properties| socket_type(properties)) {
        Some(peer) if kind.serves(peer) => Ok(()),
        _ => Err(wrong("the peer's socket has another type")),
    }
}

/// Returns the value of the property `Socket-Type`.
fn socket_type(mut properties: &[u8]) -> Option<&[u8]> {
    loop {
        let (&len, rest) = properties.split_first()?;
        let (name, rest) = rest.split_at_checked(len.into())?;
        let (len, rest) = rest.split_first_chunk()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        properties = rest;
    }
}

/// Reads a frame.
///
/// # Errors
/// Errors of the connection, and `InvalidData` if the frame has more than 4,096 bytes.
pub async fn read_frame(reader: &mut (impl AsyncRead + Unpin)) -> io::Result<Frame> {
    let flags = reader.read_u8().await?;
    let len = match flags & IS_LONG {
        0 => reader.read_u8().await?.into(),
        _ => reader.read_u64().await?,
    };
    if len > FRAME_MAX {
        return Err(wrong("a frame is too long"));
    }
    let mut body = vec![0; len as usize];
    reader.read_exact(&mut body).await?;
    Ok(Frame { is_command: flags & IS_COMMAND != 0, has_more: flags & HAS_MORE != 0, body })
}

/// Writes a message of these frames.
pub async fn write_message(writer: &mut (impl AsyncWrite + Unpin), frames: &[&[u8]]) -> io::Result<()> {
    for (at, frame) in frames.iter().enumerate() {
        let flags = if at + 1 < frames.len() { HAS_MORE } else { 0 };
        write_frame(writer, flags, frame).await?;
    }
    Ok(())
}

/// Writes a command.
pub async fn write_command(writer: &mut (impl AsyncWrite + Unpin), command: &[u8]) -> io::Result<()> {
    write_frame(writer, IS_COMMAND, command).await
}

async fn write_frame(writer: &mut (impl AsyncWrite + Unpin), flags: u8, body: &[u8]) -> io::Result<()> {
    match u8::try_from(body.len()) {
        Ok(len) => writer.write_all(&[flags, len]).await?,
        Err(_) => {
            writer.write_u8(flags | IS_LONG).await?;
            writer.write_u64(body.len() as u64).await?;
        }
    }
    writer.write_all(body).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
    }

    #[test]
    fn frames_are_read_as_they_were_written() {
        for len in [0, 1, 255, 256, FRAME_MAX as usize] {
            let (body, mut bytes) = (vec![7; len], Vec::new());
            block_on(write_message(&mut bytes, &[&body, b"x"])).expect("written");
            let frame = block_on(read_frame(&mut &bytes[..])).expect("a frame");
            assert_eq!((frame.body, frame.has_more, frame.is_command), (body, true, false));
        }
    }

    #[test]
    fn a_frame_that_is_too_long_is_refused_before_it_is_read() {
        for len in [FRAME_MAX + 1, u64::MAX] {
            let header = [&[IS_LONG][..], &len.to_be_bytes()].concat();
            let error = block_on(read_frame(&mut &header[..])).expect_err("too long");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn a_heartbeat_is_answered_with_its_context() {
        let frame = |is_command, body: &[u8]| Frame { is_command, has_more: false, body: body.to_vec() }.pong();
        assert_eq!(frame(true, b"\x04PING\0\x0aab").as_deref(), Some(&b"\x04PONGab"[..]));
        assert_eq!(frame(true, b"\x04PING\0"), None);
        assert_eq!(frame(false, b"\x04PING\0\x0aab"), None);
    }

    #[test]
    fn other_protocols_and_sockets_are_refused() {
        let greeting = |major, mechanism: &[u8]| {
            let mut greeting = [0; 64];
            (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, major);
            greeting[12..12 + mechanism.len()].copy_from_slice(mechanism);
            greeting
        };
        let ready = |kind: &[u8]| {
            let property = b"\x08Identity\0\0\0\x02id\x0bsocket-type\0\0\0";
            let body = [b"\x05READY", &property[..], &[kind.len() as u8], kind].concat();
            [&[IS_COMMAND, body.len() as u8][..], &body].concat()
        };
        let outcome = |kind, greeting: [u8; 64], ready: &[u8]| {
            let bytes = [&greeting[..], ready].concat();
            block_on(handshake(kind, &mut &bytes[..], &mut Vec::new())).map_err(|e| e.kind())
        };
        let null = greeting(3, b"NULL");
        assert_eq!(outcome(Kind::Pub, null, &ready(b"SUB")), Ok(()));
        assert_eq!(outcome(Kind::Router, null, &ready(b"DEALER")), Ok(()));
        let refused = Err(io::ErrorKind::InvalidData);
        assert_eq!(outcome(Kind::Pub, null, &ready(b"DEALER")), refused);
        assert_eq!(outcome(Kind::Router, null, &ready(b"SUB")), refused);
        assert_eq!(outcome(Kind::Pub, greeting(2, b"NULL"), &ready(b"SUB")), refused);
        assert_eq!(outcome(Kind::Pub, greeting(3, b"PLAIN"), &ready(b"SUB")), refused);
        assert_eq!(outcome(Kind::Pub, null, b"\x04\x06\x05READY"), refused);
        assert_eq!(outcome(Kind::Pub, null, b""), Err(io::ErrorKind::UnexpectedEof));
    }
}
