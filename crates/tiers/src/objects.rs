//! [`Objects`]: records as objects of S3, Google Cloud Storage or Azure.
//!
//! Requests run on two threads of a runtime of the store's own, at most 64 at a time. The bucket's rules remove old
//! objects.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::stream::BoxStream;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, GetResult, ObjectStore, ObjectStoreExt, PutPayload};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

use crate::name::{Fingerprint, Name, Space};
use crate::store::{Buffers, Got, Store, StoreError};
use crate::testing::memory::concat;
use crate::vectored::{Piece, pieces, unused};

/// Maximum number of requests at a time.
const REQUESTS: usize = 64;
/// Time of a call with all its requests.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A store of records as objects.
pub struct Objects {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    runtime: Runtime,
    permits: Semaphore,
    requests: AtomicU64,
}

impl Objects {
    /// Creates a store from a URL, such as `s3://bucket/prefix`, and options such as `aws_access_key_id`,
    /// `aws_endpoint` and `allow_http`. Options with unknown names have no effect, so the environment may be passed.
    ///
    /// # Errors
    /// [`StoreError::Failed`] if the URL or an option is invalid.
    pub fn new(url: &str, options: impl IntoIterator<Item = (String, String)>) -> Result<Self, StoreError> {
        let failed = |error: &dyn std::fmt::Display| StoreError::Failed { text: error.to_string() };
        let url = url.parse().map_err(|error| failed(&error))?;
        // Later options win.
        let times =
            [("connect_timeout", "2s"), ("timeout", "20s")].map(|(name, time)| (name.to_owned(), time.to_owned()));
        let options = times.into_iter().chain(options.into_iter().map(|(name, value)| (name.to_lowercase(), value)));
        let (store, prefix) = object_store::parse_url_opts(&url, options).map_err(|error| failed(&error))?;
        Self::with_store(store.into(), prefix)
    }

    /// Creates a store over a client, below a prefix.
    ///
    /// # Errors
    /// [`StoreError::Failed`] if no thread can be started.
    pub fn with_store(store: Arc<dyn ObjectStore>, prefix: Path) -> Result<Self, StoreError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("kvarena-objects")
            .enable_all()
            .build()?;
        Ok(Self { store, prefix, runtime, permits: Semaphore::new(REQUESTS), requests: AtomicU64::new(0) })
    }

    /// Returns the number of requests for objects so far.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    fn path(&self, name: &str) -> Path {
        let name = Path::from(name);
        self.prefix.parts().chain(name.parts()).collect()
    }

    /// Runs a call, for at most the time of a call.
    fn run<T>(&self, call: impl Future<Output = Result<T, Error>>) -> Result<T, StoreError> {
        let limited = async { tokio::time::timeout(TIMEOUT, call).await };
        let late = |_| StoreError::Gone { text: "no answer in time".to_owned() };
        self.runtime.block_on(limited).map_err(late)?.map_err(error)
    }

    /// Makes a request, of which few run at a time.
    async fn request<T>(&self, request: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let _permit = self.permits.acquire().await.expect("the semaphore is never closed");
        self.requests.fetch_add(1, Ordering::Relaxed);
        request.await
    }

    async fn has(&self, name: &Name) -> Result<bool, Error> {
        match self.request(self.store.head(&self.path(&name.to_string()))).await {
            Ok(_) => Ok(true),
            Err(Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns whether the store has each of these names.
    async fn all(&self, names: Vec<(usize, Name)>) -> Result<Vec<(usize, bool)>, Error> {
        let has = |(index, name): (usize, Name)| async move { Ok((index, self.has(&name).await?)) };
        stream::iter(names).map(has).buffer_unordered(REQUESTS).try_collect().await
    }

    /// Returns the number of leading names that the store has. Two rounds are enough for 4,096 names: the first one
    /// asks for equally distant names. Names before one that is there count as there.
    async fn leading(&self, names: &[Name]) -> Result<usize, Error> {
        let (mut low, mut high) = (0, names.len()); // the first `low` are there, the one at `high` is not
        while low < high {
            let step = (high - low).div_ceil(REQUESTS);
            let asked = (low..high).skip(step - 1).step_by(step).map(|at| (at, names[at])).collect();
            let answers = self.all(asked).await?;
            let absent = answers.iter().filter(|(_, has)| !has).map(|(at, _)| *at).min().unwrap_or(high);
            let there = answers.iter().filter(|(at, has)| *has && *at < absent).map(|(at, _)| at + 1).max();
            (low, high) = (there.unwrap_or(low), if step == 1 || absent < high { absent } else { high });
            if step == 1 {
                return Ok(low);
            }
        }
        Ok(low)
    }

    /// Deletes objects. Absent ones are no error.
    async fn delete(&self, paths: BoxStream<'static, Result<Path, Error>>) -> Result<(), Error> {
        let mut deleted = self.store.delete_stream(paths);
        while let Some(path) = deleted.next().await {
            match path {
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn get_range(&self, path: &Path, range: Option<GetRange>) -> Result<GetResult, Error> {
        self.store.get_opts(path, GetOptions { range, ..GetOptions::default() }).await
    }
}

fn error(error: Error) -> StoreError {
    let text = error.to_string();
    match error {
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => StoreError::ReadOnly,
        Error::Generic { .. } => StoreError::Gone { text },
        _ => StoreError::Failed { text },
    }
}

/// Copies a stream of bytes into pieces. Returns whether it has filled them and has ended.
async fn fill(result: GetResult, pieces: &mut [Piece<'_>], seen: &mut dyn FnMut(&[u8])) -> Result<bool, Error> {
    let mut stream = result.into_stream();
    let (mut at, mut offset) = (0, 0);
    while let Some(bytes) = stream.try_next().await? {
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let Some(piece) = pieces.get_mut(at) else { return Ok(false) };
            let count = rest.len().min(piece.bytes.len() - offset);
            piece.bytes[offset..offset + count].copy_from_slice(&rest[..count]);
            (rest, offset) = (&rest[count..], offset + count);
            if offset == piece.bytes.len() {
                if piece.is_page {
                    seen(piece.bytes);
                }
                (at, offset) = (at + 1, 0);
            }
        }
    }
    Ok(at == pieces.len())
}

impl Store for Objects {
    /// Names of group 0 are asked until one is absent: later ones count as absent. Cells whose page of group 0 is
    /// absent are not asked for.
    fn have(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        let count = names.iter().take_while(|name| name.group == 0).count();
        self.run(async {
            let there = self.leading(&names[..count]).await?;
            let absent: std::collections::HashSet<_> = names[there..count].iter().map(|name| name.key).collect();
            let mut have = vec![false; names.len()];
            have[..there].fill(true);
            let cells = (count..names.len()).filter(|&at| !absent.contains(&names[at].key));
            for (at, has) in self.all(cells.map(|at| (at, names[at])).collect()).await? {
                have[at] = has;
            }
            Ok(have)
        })
    }

    fn have_now(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        self.run(async {
            let mut have = vec![false; names.len()];
            for (at, has) in self.all(names.iter().copied().enumerate().collect()).await? {
                have[at] = has;
            }
            Ok(have)
        })
    }

    fn asks_one_by_one(&self) -> bool {
        true
    }

    fn get(&self, name: &Name, into: &mut Buffers) -> Result<Got, StoreError> {
        let (expected, Range { start, end }) = (into.record_bytes(), into.range());
        let (is_whole, head) = (into.pages.len() == into.of as usize, 0..into.head.len() as u64);
        let mut unused = unused(into.pages);
        let mut pieces = pieces(into.head, into.pages, &mut unused);
        let path = self.path(&name.to_string());
        let read = async {
            let first = self.get_range(&path, (!is_whole).then_some(GetRange::Bounded(head))).await?;
            if first.meta.size != expected {
                return Ok(Got::Length);
            }
            let is_read = if is_whole {
                fill(first, &mut pieces, into.seen).await?
            } else {
                let rest = self.get_range(&path, Some(GetRange::Bounded(start..end))).await?;
                fill(first, &mut pieces[..1], into.seen).await? && fill(rest, &mut pieces[1..], into.seen).await?
            };
            Ok(if is_read { Got::Read } else { Got::Length })
        };
        self.run(async {
            match self.request(read).await {
                Err(Error::NotFound { .. }) => Ok(Got::Absent),
                read => read,
            }
        })
    }

    fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> Result<(), StoreError> {
        let payload = PutPayload::from(concat(head, pages));
        let path = self.path(&name.to_string());
        self.run(self.request(self.store.put(&path, payload))).map(drop)
    }

    fn remove(&self, names: &[Name]) -> Result<(), StoreError> {
        let paths: Vec<_> = names.iter().map(|name| Ok(self.path(&name.to_string()))).collect();
        self.run(self.delete(stream::iter(paths).boxed()))
    }

    fn remove_space(&self, fingerprint: &Fingerprint, space: Space) -> Result<(), StoreError> {
        let listed = self.store.list(Some(&self.path(&format!("v1/{fingerprint}/{space}"))));
        self.run(self.delete(listed.map_ok(|object| object.location).boxed()))
    }
}
