//! Copies of whole pages between a backend's pool and other memory: another pool, or pinned host memory.
//!
//! Not here: the copies themselves (`copy.rs`), copies inside a pool (`calls.rs`).

use super::copy::{CopyStreams, HostCopy, copy_on_device};
use super::host_pages::{HostPages, Way};
use crate::backend::check;
use crate::backend::cuda::driver::raw;
use crate::backend::cuda::driver::stream::{CudaEvent, CudaStream};
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::opened::Cuda;
use crate::plan::PageCopy;

impl Cuda {
    /// Copies pages into another pool of equal [fingerprint](Cuda::page_fingerprint) on the same device, of either
    /// layout, on `stream`. The host orders that stream after the steps that write the pages.
    ///
    /// # Errors
    /// Returns an error if pages do not exist, if pages differ in shape or fingerprint, if the pool is on another
    /// device, or if the driver fails.
    pub fn copy_to_pool(
        &self,
        target: &mut Cuda,
        copies: &[PageCopy],
        stream: &CudaStream,
    ) -> Result<CudaEvent, CudaError> {
        self.gpu.bind()?;
        self.gpu.check_same(Some(target.gpu.ordinal()))?;
        let fingerprints = (self.page_fingerprint(), target.page_fingerprint());
        let (source, target) = (self.pools.of(0).pages(), target.pools.of(0).pages());
        if !source.is_like(target) {
            return Err(CudaError::PageShape);
        }
        if let (source, target) = fingerprints
            && source != target
        {
            return Err(CudaError::PageFingerprint { source, target });
        }
        check::copies(copies, (source.count, target.count))?;
        copy_on_device(&self.gpu, source, target, copies, stream.raw())?;
        stream.mark()
    }

    /// Copies pages of the pool (sources) to pinned host memory (targets), on `stream`. The host orders that stream
    /// after the steps that write the pages. Until the event is done, [`HostPages`] rejects access to the targets.
    ///
    /// The first copy creates streams and memory that all copies share. A capture therefore needs an earlier copy. The
    /// host orders replays with other copies, and does not access the pages of a replay until it is done.
    ///
    /// # Errors
    /// Returns an error if pages do not exist or differ in shape, for a first copy in a capture, or if the driver
    /// fails.
    pub fn copy_to_host(
        &mut self,
        host: &mut HostPages,
        copies: &[PageCopy],
        stream: &CudaStream,
    ) -> Result<CudaEvent, CudaError> {
        self.copy_host(host, Way::ToHost, copies, stream)
    }

    /// Copies pages in pinned host memory (sources) to the pool (targets), on `stream`. The host orders that stream
    /// before the steps that read the pages. Until the event is done, [`HostPages`] permits only reads of the sources.
    ///
    /// # Errors
    /// As [`Cuda::copy_to_host`].
    pub fn copy_from_host(
        &mut self,
        host: &HostPages,
        copies: &[PageCopy],
        stream: &CudaStream,
    ) -> Result<CudaEvent, CudaError> {
        self.copy_host(host, Way::FromHost, copies, stream)
    }

    fn copy_host(
        &mut self,
        host: &HostPages,
        way: Way,
        copies: &[PageCopy],
        stream: &CudaStream,
    ) -> Result<CudaEvent, CudaError> {
        self.gpu.bind()?;
        let streams = match &mut self.copy_streams {
            Some(streams) => streams,
            None if raw::is_capturing(stream.raw())? => return Err(CudaError::NotPrepared),
            empty => empty.insert(CopyStreams::new(&self.gpu)?),
        };
        let pool = self.pools.of(0).pages();
        streams.copy(&self.gpu, &HostCopy { pool, host, way, copies, stream })
    }
}
