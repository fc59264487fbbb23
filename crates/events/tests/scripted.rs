//! Tests a subscriber against an engine whose messages the test writes, some with numbers that no engine sends. Some
//! tests cancel a call of the subscriber before the reply ends.

use std::time::Duration;

use bytes::Bytes;
use kvarena_events::publisher::{DUMP, END};
use kvarena_events::subscriber::{ReceiveError, Received, Subscriber};
use zeromq::{RouterSocket, Socket, SocketRecv, SocketSend, XPubSocket, ZmqMessage};

fn message(frames: &[&[u8]]) -> ZmqMessage {
    let frames: Vec<Bytes> = frames.iter().map(|frame| Bytes::copy_from_slice(frame)).collect();
    ZmqMessage::try_from(frames).expect("a message has frames")
}

fn payload(number: u64) -> Received {
    Received::Payload(Bytes::copy_from_slice(&number.to_be_bytes()))
}

/// Both sockets of an engine. The payload of a message is its number.
struct Engine {
    publisher: XPubSocket,
    router: RouterSocket,
}

impl Engine {
    /// Returns an engine that has sent no message, and its subscriber.
    async fn connected() -> (Self, Subscriber) {
        let (mut publisher, mut router) = (XPubSocket::new(), RouterSocket::new());
        let any = "tcp://127.0.0.1:0";
        let endpoint = publisher.bind(any).await.expect("a port is free").to_string();
        let replay_endpoint = router.bind(any).await.expect("a port is free").to_string();
        let mut engine = Self { publisher, router };
        let answer = async {
            engine.publisher.recv().await.expect("a subscription");
            engine.answer(None).await;
        };
        let (subscriber, ()) = tokio::join!(Subscriber::connect(&endpoint, &replay_endpoint), answer);
        (engine, subscriber.expect("the engine answers"))
    }

    async fn publish(&mut self, number: u64) {
        let number = number.to_be_bytes();
        self.publisher.send(message(&[b"", &number, &number])).await.expect("a subscriber");
    }

    /// Waits for a request, and returns its sender and its contents.
    async fn request(&mut self) -> (Bytes, Bytes) {
        let request = self.router.recv().await.expect("a request").into_vec();
        (request[0].clone(), request[2].clone())
    }

    async fn reply(&mut self, sender: &[u8], numbers: &[u64]) {
        for number in numbers {
            let number = number.to_be_bytes();
            let reply = message(&[sender, b"", b"", &number, &number]);
            // The subscriber may have closed this connection.
            _ = self.router.send(reply).await;
        }
    }

    /// Answers a request. The engine keeps all messages up to `last`, or none.
    async fn answer(&mut self, last: Option<u64>) {
        let (sender, contents) = self.request().await;
        if let (Ok(from), Some(last)) = (<[u8; 8]>::try_from(&contents[..]), last) {
            let numbers: Vec<u64> = (u64::from_be_bytes(from)..=last).collect();
            self.reply(&sender, &numbers).await;
        }
        self.reply(&sender, &[END]).await;
    }
}

async fn receives(subscriber: &mut Subscriber, wanted: impl IntoIterator<Item = Received>) {
    for wanted in wanted {
        assert_eq!(subscriber.receive().await.expect("the sockets work"), wanted);
    }
}

#[tokio::test]
async fn the_number_that_ends_a_reply_is_no_message() {
    let (mut engine, mut subscriber) = Engine::connected().await;
    engine.publish(END).await;
    let received = tokio::select! {
        received = subscriber.receive() => received,
        () = engine.answer(None) => panic!("the subscriber requests messages before the number"),
    };
    assert!(matches!(received, Err(ReceiveError::Number)), "{received:?}");
    // The largest number of a message is `END - 1`.
    engine.publish(END - 1).await;
    let lost = [Received::Lost { from: 0, to: END - 1 }, payload(END - 1)];
    let answers = async {
        engine.answer(None).await;
        engine.answer(None).await;
    };
    tokio::join!(receives(&mut subscriber, lost), answers);
}

#[tokio::test]
async fn the_rest_of_a_cancelled_reply_is_ignored() {
    let (mut engine, mut subscriber) = Engine::connected().await;
    engine.publish(3).await;
    let begin = async {
        let (sender, _) = engine.request().await;
        engine.reply(&sender, &[0]).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        sender
    };
    let sender = tokio::select! {
        received = subscriber.receive() => panic!("the reply has no end: {received:?}"),
        sender = begin => sender,
    };
    engine.reply(&sender, &[1, 2, 3, END]).await;
    engine.publish(5).await;
    tokio::join!(receives(&mut subscriber, (0..=5).map(payload)), engine.answer(Some(5)));
    engine.publish(8).await;
    tokio::join!(receives(&mut subscriber, (6..=8).map(payload)), engine.answer(Some(8)));
}

#[tokio::test]
async fn a_cancelled_restart_is_not_forgotten() {
    let (mut engine, mut subscriber) = Engine::connected().await;
    for number in 0..3 {
        engine.publish(number).await;
    }
    receives(&mut subscriber, (0..=2).map(payload)).await;
    engine.publish(2).await;
    tokio::select! {
        received = subscriber.receive() => panic!("the request has no reply: {received:?}"),
        (_, contents) = engine.request() => assert_eq!(&contents[..], DUMP),
    }
    receives(&mut subscriber, [Received::Restarted]).await;
    // The ended engine would have used the same number next.
    engine.publish(3).await;
    tokio::join!(receives(&mut subscriber, (0..=3).map(payload)), engine.answer(Some(3)));
}
