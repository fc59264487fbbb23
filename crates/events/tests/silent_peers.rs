//! Peers that read nothing cost the others nothing: a subscriber that reads receives all messages, memory stays flat,
//! and the silent ones see what they missed as a gap.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use kvarena_events::clock::resident_bytes;
use kvarena_events::publisher::{END, Publisher, PublisherConfig};
use kvarena_events::subscriber::{Received, Subscriber};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

/// Number of messages. Their 400 MB exceed the buffers of every connection.
const EVENTS: u64 = 100_000;
const PAYLOAD: usize = 4 << 10;
/// Kept messages, more than the buffers of a connection take.
const KEEP: u64 = 4_000;

async fn publisher() -> Publisher {
    let config = PublisherConfig { keep: KEEP as usize, ..PublisherConfig::default() };
    Publisher::bind(config).await.expect("ports are free")
}

async fn silent_subscriber(publisher: &Publisher) -> SubSocket {
    let mut socket = SubSocket::new();
    socket.connect(&publisher.endpoint).await.expect("the publisher is bound");
    socket.subscribe("").await.expect("connected");
    socket
}

/// Requests three replays of all messages.
async fn silent_client(publisher: &Publisher) -> DealerSocket {
    let mut socket = DealerSocket::new();
    socket.connect(&publisher.replay_endpoint).await.expect("the publisher is bound");
    for _ in 0..3 {
        let mut request = ZmqMessage::from(Vec::new());
        request.push_back(Bytes::copy_from_slice(&0_u64.to_be_bytes()));
        socket.send(request).await.expect("connected");
    }
    socket
}

/// Returns the number of a message with its topic, or of a reply.
fn number(message: ZmqMessage) -> u64 {
    let frames = message.into_vec();
    let frame = &frames[frames.len() - 2];
    u64::from_be_bytes(frame[..].try_into().expect("8 bytes"))
}

/// Sends messages and receives each of them.
async fn publish(publisher: &Publisher, subscriber: &mut Subscriber, numbers: Range<u64>) {
    for number in numbers {
        let mut payload = vec![0; PAYLOAD];
        payload[..8].copy_from_slice(&number.to_be_bytes());
        publisher.send(payload.clone());
        let received = subscriber.receive().await.expect("the socket works");
        assert_eq!(received, Received::Payload(payload.into()), "message {number}");
    }
}

#[tokio::test]
async fn silent_peers_delay_no_one() {
    let publisher = publisher().await;
    // The first message arrives by its replay or by the subscription.
    publisher.send(vec![1]);
    let (endpoint, replay) = (&publisher.endpoint, &publisher.replay_endpoint);
    let mut subscriber = Subscriber::connect(endpoint, replay).await.expect("it is bound");
    assert_eq!(subscriber.receive().await.expect("a replay"), Received::Payload(vec![1].into()));
    let mut subscribers = Vec::new();
    for _ in 0..10 {
        subscribers.push(silent_subscriber(&publisher).await);
    }
    let start = EVENTS / 5;
    publish(&publisher, &mut subscriber, 1..start).await;
    let mut clients = Vec::new();
    for _ in 0..10 {
        clients.push(silent_client(&publisher).await);
    }
    publish(&publisher, &mut subscriber, start..2 * start).await;
    let before = resident_bytes();
    publish(&publisher, &mut subscriber, 2 * start..EVENTS).await;
    if let (Some(before), Some(after)) = (before, resident_bytes()) {
        let more = after.saturating_sub(before);
        assert!(more < 16 << 20, "{more} bytes more after {} messages", EVENTS - 2 * start);
    }
    // Once they read, they receive the messages in the connection's buffers, then a gap, then the kept messages.
    for socket in &mut subscribers {
        let (mut last, mut gaps) = (None, 0);
        while last != Some(EVENTS - 1) {
            let number = number(socket.recv().await.expect("a message"));
            gaps += u32::from(last.is_some_and(|last| last + 1 < number));
            assert!(last < Some(number), "{last:?}, then {number}");
            last = Some(number);
        }
        assert!(gaps >= 1, "a silent peer misses messages");
    }
    for socket in &mut clients {
        let (mut last, mut gaps) = (None, 0);
        loop {
            let number = number(socket.recv().await.expect("a reply"));
            if number == END {
                break;
            }
            gaps += u32::from(last.is_some_and(|last| last + 1 < number));
            last = Some(number);
        }
        assert!(gaps <= 1 && last.is_some_and(|last| last < 2 * start), "a reply contains what was kept: {last:?}");
    }
}

/// A peer without a handshake, with another protocol or with a frame of 2^60 bytes leaves the other peers alone.
#[tokio::test]
async fn strange_peers_delay_no_one() {
    let publisher = publisher().await;
    let mut strangers = Vec::new();
    for endpoint in [&publisher.endpoint, &publisher.replay_endpoint] {
        let address = endpoint.strip_prefix("tcp://").expect("TCP");
        let mut greeting = [0; 64];
        (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
        greeting[12..16].copy_from_slice(b"NULL");
        let long = [&greeting[..], &[2, 0x10, 0, 0, 0, 0, 0, 0, 0]].concat();
        for bytes in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &greeting, &long] {
            let mut stream = TcpStream::connect(address).await.expect("it is bound");
            stream.write_all(bytes).await.expect("it reads");
            if bytes.len() > 64 {
                let mut rest = Vec::new();
                // The publisher closes the connection, perhaps with unread bytes.
                _ = stream.read_to_end(&mut rest).await;
            }
            strangers.push(stream);
        }
    }
    publisher.send(vec![1]);
    let (endpoint, replay) = (&publisher.endpoint, &publisher.replay_endpoint);
    let mut subscriber = Subscriber::connect(endpoint, replay).await.expect("it is bound");
    assert_eq!(subscriber.receive().await.expect("a replay"), Received::Payload(vec![1].into()));
    publish(&publisher, &mut subscriber, 1..100).await;
}

#[tokio::test]
async fn the_history_has_a_limit_of_bytes() {
    let config = PublisherConfig { keep_bytes: 10 * PAYLOAD, ..PublisherConfig::default() };
    let publisher = Publisher::bind(config).await.expect("ports are free");
    (0..100).for_each(|_| publisher.send(vec![0; PAYLOAD]));
    let replayed = async |from: u64| {
        let mut socket = silent_client(&publisher).await;
        let mut numbers = Vec::new();
        loop {
            match number(socket.recv().await.expect("a reply")) {
                END => return numbers,
                number if number >= from => numbers.push(number),
                _ => {}
            }
        }
    };
    assert_eq!(replayed(0).await, (90..100).collect::<Vec<_>>());
    // A payload above the limit is kept alone.
    publisher.send(vec![0; 11 * PAYLOAD]);
    assert_eq!(replayed(0).await, [100]);
    // It stays until as many bytes follow.
    (0..10).for_each(|_| publisher.send(vec![0; PAYLOAD]));
    assert_eq!(replayed(0).await, (100..111).collect::<Vec<_>>());
    publisher.send(vec![0; PAYLOAD]);
    assert_eq!(replayed(0).await, (102..112).collect::<Vec<_>>());
}

/// A peer that requests the whole cache again and again receives it no more often than the pause allows.
#[tokio::test]
async fn dumps_have_a_pause() {
    for (dump_pause, again) in [(Duration::ZERO, true), (Duration::MAX, false)] {
        let config = PublisherConfig { dump_pause, ..PublisherConfig::default() };
        let publisher = Publisher::bind(config).await.expect("ports are free");
        let (endpoint, replay) = (&publisher.endpoint, &publisher.replay_endpoint);
        let mut subscriber = Subscriber::connect(endpoint, replay).await.expect("it is bound");
        assert!(!publisher.take_dump_request());
        let mut request = async || {
            subscriber.request_dump().await.expect("it is answered");
            publisher.take_dump_request()
        };
        assert_eq!([request().await, request().await], [true, again]);
    }
}

#[tokio::test]
async fn invalid_endpoints_are_errors() {
    for endpoint in ["ipc:///tmp/x", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "127.0.0.1:0"] {
        let config = PublisherConfig { endpoint: endpoint.to_owned(), ..PublisherConfig::default() };
        let error = Publisher::bind(config).await.err().expect("the endpoint is invalid");
        assert!(error.to_string().starts_with(endpoint), "{error}");
    }
    let config = PublisherConfig { endpoint: "tcp://*:0".to_owned(), ..PublisherConfig::default() };
    let publisher = Publisher::bind(config).await.expect("all addresses");
    assert!(publisher.endpoint.starts_with("tcp://0.0.0.0:"));
}
