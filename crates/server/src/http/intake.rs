//! Limits of requests. Bytes of a body count until the server has parsed and encoded it, and tokens of a request count
//! until it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::http::{HeaderMap, header};
use futures_util::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::api_error::ApiError;

/// Maximum bytes of a short body. Short bodies need no share of the budgets.
const SHORT: usize = 64 << 10;
/// Budget for the bytes by which bodies exceed [`SHORT`], as a number of bodies of the maximum length.
const BODIES: usize = 16;
/// Bytes beyond the limit that the server reads and drops before it rejects a body, because most clients read no answer
/// before they have sent the whole body.
const DROPPED_MAX: usize = 64 << 20;

#[derive(Debug)]
pub struct Intake {
    body_max: usize,
    body_time: Duration,
    /// The unused part of the budget [`BODIES`]. A body holds its share while it is read, waits for the parser and is
    /// parsed.
    reading: Arc<Semaphore>,
    /// The unused part of the budget for the bytes of long bodies that are parsed. JSON values take several times the
    /// bytes of their text.
    parsing: Arc<Semaphore>,
    held: Arc<AtomicUsize>,
    held_max: usize,
}

/// A body, and its share of the budget.
#[derive(Debug)]
pub struct Read {
    pub bytes: Vec<u8>,
    /// Share of the budget, until the body is dropped.
    _reading: Option<OwnedSemaphorePermit>,
}

impl Intake {
    /// Creates the budgets. A body has at most `body_max` bytes and arrives within `body_time`; all requests together
    /// have at most `held_max` tokens.
    pub fn new(body_max: usize, body_time: Duration, held_max: usize) -> Self {
        let budget = |bytes: usize| Arc::new(Semaphore::new(bytes.min(Semaphore::MAX_PERMITS)));
        Self {
            body_max,
            body_time,
            reading: budget(BODIES * body_max),
            parsing: budget(body_max),
            held: Arc::default(),
            held_max,
        }
    }

    /// Reads a body.
    ///
    /// # Errors
    /// The body is too long (413) or too slow (408), its client disconnects, or too many bodies are being read (429).
    pub async fn read(&self, headers: &HeaderMap, body: Body) -> Result<Read, ApiError> {
        let mut chunks = body.into_data_stream();
        let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let read = async {
            if length.is_some_and(|length: usize| length > self.body_max) {
                // A client that expects `100 Continue` has sent nothing yet.
                if !headers.contains_key(header::EXPECT) {
                    drop_rest(&mut chunks).await;
                }
                return Err(ApiError::body_too_long(self.body_max));
            }
            self.collect(&mut chunks, length.unwrap_or(0)).await
        };
        timeout(self.body_time, read).await.unwrap_or_else(|_| Err(ApiError::body_too_slow(self.body_time)))
    }

    async fn collect(&self, chunks: &mut BodyDataStream, length: usize) -> Result<Read, ApiError> {
        let (mut bytes, mut reading) = (Vec::with_capacity(length.min(SHORT)), None);
        while let Some(chunk) = chunks.next().await {
            let chunk: Bytes = chunk.map_err(|e| ApiError::bad(format!("the body breaks off: {e}")))?;
            if bytes.len() + chunk.len() > self.body_max {
                drop_rest(chunks).await;
                return Err(ApiError::body_too_long(self.body_max));
            }
            let counted = bytes.len().saturating_sub(SHORT);
            bytes.extend_from_slice(&chunk);
            let more = bytes.len().saturating_sub(SHORT) - counted;
            if more > 0 {
                let share = Arc::clone(&self.reading).try_acquire_many_owned(more as u32);
                let share = share.map_err(|_| ApiError::crowded("long bodies are being read"))?;
                match &mut reading {
                    None => reading = Some(share),
                    Some(reading) => reading.merge(share),
                }
            }
        }
        Ok(Read { bytes, _reading: reading })
    }

    /// Runs `parse` over a body on a blocking thread. A long body first waits for its share of the parsing budget.
    ///
    /// # Errors
    /// The error of `parse`, or its panic.
    pub async fn parse<T: Send + 'static>(
        &self,
        read: Read,
        parse: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let mut turn = None;
        if read.bytes.len() > SHORT {
            let parsing = Arc::clone(&self.parsing).acquire_many_owned(read.bytes.len() as u32);
            turn = Some(parsing.await.map_err(|e| ApiError::failed(e.to_string()))?);
        }
        let parsing = tokio::task::spawn_blocking(move || {
            let parsed = parse(&read.bytes);
            drop((read, turn));
            parsed
        });
        parsing.await.map_err(|e| ApiError::failed(e.to_string()))?
    }

    /// Counts the tokens of a request's prompts and predictions until the result is dropped. `field` is the request's
    /// field for prompts.
    ///
    /// # Errors
    /// The request has more tokens than all requests together may have (400, names `field`), or than the budget has
    /// left (429).
    pub fn hold(&self, field: &str, tokens: usize) -> Result<Held, ApiError> {
        let most = self.held_max;
        if tokens > most {
            let what = format!("{tokens} prompt and prediction tokens; all requests together may have at most {most}");
            return Err(ApiError::field(field, what));
        }
        let fits = |held: usize| held.checked_add(tokens).filter(|&held| held <= most);
        match self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            Ok(_) => Ok(Held { held: Arc::clone(&self.held), tokens }),
            Err(held) => Err(ApiError::crowded(&format!(
                "{held} prompt and prediction tokens wait or run, of at most {most}; this request has {tokens}"
            ))),
        }
    }
}

/// Reads and drops bytes, up to a limit.
async fn drop_rest(chunks: &mut BodyDataStream) {
    let mut dropped = 0;
    while let Some(Ok(chunk)) = chunks.next().await {
        dropped += chunk.len();
        if dropped > DROPPED_MAX {
            return;
        }
    }
}

/// Tokens of a request in the budget.
#[derive(Debug, Default)]
pub struct Held {
    held: Arc<AtomicUsize>,
    tokens: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.held.fetch_sub(self.tokens, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn intake() -> Intake {
        Intake::new(100_000, Duration::from_millis(200), 1000)
    }

    async fn read(intake: &Intake, parts: Vec<usize>) -> Result<Read, ApiError> {
        let parts = parts.into_iter().map(|len| Ok::<_, std::io::Error>(Bytes::from(vec![0; len])));
        intake.read(&HeaderMap::new(), Body::from_stream(futures_util::stream::iter(parts))).await
    }

    #[tokio::test]
    async fn bodies_over_the_limit_are_rejected() {
        let intake = intake();
        assert_eq!(read(&intake, vec![60_000, 40_000]).await.expect("just fits").bytes.len(), 100_000);
        assert_eq!(read(&intake, vec![60_000, 40_001]).await.expect_err("too long").status, 413);
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_LENGTH, 100_001.into());
        let error = intake.read(&headers, Body::empty()).await.expect_err("the length is in the headers");
        assert_eq!(error.status, 413);
    }

    #[tokio::test]
    async fn a_body_that_does_not_end_is_refused() {
        let body = Body::from_stream(futures_util::stream::pending::<std::io::Result<Bytes>>());
        let error = intake().read(&HeaderMap::new(), body).await.expect_err("too slow");
        assert_eq!(error.status, 408);
    }

    #[tokio::test]
    async fn long_bodies_share_a_budget() {
        let intake = intake();
        let mut held = Vec::new();
        let error = loop {
            match read(&intake, vec![100_000]).await {
                Ok(read) => held.push(read),
                Err(error) => break error,
            }
        };
        assert_eq!((error.status, held.len()), (429, BODIES * 100_000 / (100_000 - SHORT)));
        assert!(read(&intake, vec![SHORT]).await.is_ok(), "a short one needs no share");
        held.pop();
        assert!(read(&intake, vec![100_000]).await.is_ok());
    }

    #[test]
    fn tokens_are_held_until_the_end() {
        let intake = intake();
        let first = intake.hold("prompt", 600).expect("room");
        let second = intake.hold("prompt", 400).expect("just room");
        assert_eq!(intake.hold("prompt", 1).expect_err("full").status, 429);
        let error = intake.hold("messages", 1001).expect_err("never");
        assert_eq!((error.status, error.param.as_deref()), (400, Some("messages")));
        assert!(error.message.starts_with("1001 prompt and prediction tokens"), "{error:?}");
        drop(first);
        assert!(intake.hold("prompt", 600).is_ok());
        drop(second);
        assert!(intake.hold("prompt", 1000).is_ok());
    }
}
