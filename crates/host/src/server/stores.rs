//! Streams that wait for stores of K and V. A stream searches the stores once, before its first admission. A server
//! that computes prompts for another one also reports the end of a request only when the stores have its prompt.

use std::time::Duration;

use kvarena::{Namespace, TokenId};
use slotmap::{Key, KeyData};

use super::{ActiveRequest, HandOver, Server, Sink};
use crate::error::Result;
use crate::runner::Runner;
use crate::stores::Stores;
use crate::stream::{Finish, Search, Stream, StreamKey};

/// Time for which the loop waits for stores before it looks for new requests.
const PAUSE: Duration = Duration::from_millis(5);

impl<R: Runner> Server<R> {
    /// Uses these stores of K and V.
    #[must_use]
    pub fn with_stores(self, stores: Box<dyn Stores<R::Backend>>) -> Self {
        Self { stores: Some(stores), ..self }
    }

    /// Reports the end of a request only when the stores have its prompt, so that another server can read it.
    #[must_use]
    pub fn hand_over(self) -> Self {
        Self { hands_over: true, ..self }
    }

    /// Returns the stores.
    pub fn stores(&self) -> Option<&dyn Stores<R::Backend>> {
        self.stores.as_deref()
    }

    /// Ends and begins work of the stores. Returns whether some remains. An idle host calls it while some does.
    ///
    /// # Errors
    /// The backend failed.
    pub fn turn_stores(&mut self) -> Result<bool> {
        let Self { stores: Some(stores), engine, streams, hand_overs, .. } = self else { return Ok(false) };
        stores.turn(engine, &mut |id| {
            let key = StreamKey::from(KeyData::from_ffi(id));
            if let Some(stream) = streams.get_mut(key) {
                stream.search = Search::Done;
            }
            hand_overs.iter_mut().filter(|waiting| waiting.key == key).for_each(|waiting| waiting.is_done = true);
        })
    }

    /// Puts all records into the stores, for at most `limit`. Returns whether nothing is left.
    ///
    /// # Errors
    /// The backend failed.
    pub fn flush_stores(&mut self, limit: Duration) -> Result<bool> {
        let Self { stores: Some(stores), engine, .. } = self else { return Ok(true) };
        stores.flush(engine, limit)
    }

    /// Searches the stores for a stream's prompt, unless it has been searched for. Returns whether the stream waits.
    pub(super) fn search(&mut self, index: StreamKey, namespace: Namespace, prompt: &[TokenId]) -> bool {
        let (Some(stores), stream) = (&mut self.stores, &mut self.streams[index]) else { return false };
        if stream.search == Search::New {
            let waits = stores.find(index.data().as_ffi(), &self.engine, namespace, prompt);
            stream.search = if waits { Search::Waiting } else { Search::Done };
        }
        stream.search == Search::Waiting
    }

    /// Returns whether a stream waits for stores.
    pub(super) fn is_searching(&self, index: StreamKey) -> bool {
        self.streams[index].search == Search::Waiting
    }

    /// Waits for the stores, if a stream does. Returns whether one does.
    pub(super) fn await_stores(&mut self) -> bool {
        let waits = !self.hand_overs.is_empty() || self.waiting.iter().any(|&index| self.is_searching(index));
        if let Some(stores) = self.stores.as_mut().filter(|_| waits) {
            stores.wait(PAUSE);
        }
        waits
    }

    /// Ends the search of a stream that ends.
    pub(super) fn end_search(&mut self, index: StreamKey) {
        let (is_searching, namespace) = (self.is_searching(index), self.namespace(index));
        if let Some(stores) = self.stores.as_mut().filter(|_| is_searching) {
            stores.cancel(index.data().as_ffi());
            // Another stream of the namespace names it again.
            let _ = self.engine.forget_namespace(namespace);
        }
    }
    /// Passes the last stream of a request to `sink`, or keeps it until the stores have the prompt.
    pub(super) fn end_request(
        &mut self,
        (key, stream): (StreamKey, Stream),
        ended: &ActiveRequest,
        sink: &mut impl Sink,
    ) {
        let request = &ended.request;
        // No other server can find a prompt with scores, nor needs a cancelled one.
        let is_needed = self.hands_over && !request.scores_prompt && stream.finish != Some(Finish::Cancelled);
        let Self { stores, engine, .. } = self;
        let mut confirm = |stores: &mut Box<dyn Stores<R::Backend>>| {
            stores.confirm(key.data().as_ffi(), engine, request.namespace, &request.prompt)
        };
        if stores.as_mut().filter(|_| is_needed).is_some_and(&mut confirm) {
            self.hand_overs.push(HandOver { key, stream, is_done: false });
        } else {
            sink.done(&stream, true);
        }
    }

    /// Passes the streams to `sink` whose prompts the stores have.
    pub(super) fn end_hand_overs(&mut self, sink: &mut impl Sink) {
        self.hand_overs.extract_if(.., |waiting| waiting.is_done).for_each(|waiting| sink.done(&waiting.stream, true));
    }
}
