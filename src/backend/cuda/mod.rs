//! The GPU backend: K and V in device memory, page tables beside them, kernels as PTX that the driver compiles.
//!
//! [`Cuda`] launches on the host's raw stream, takes the host's device addresses, and shares the device's primary
//! context with other users in the process. Any thread may call; each call binds the context first. Nothing waits for
//! the device except where a doc says so. Launches can be captured in a graph: see [`Cuda::stage`].
//!
//! What only the host can know is `unsafe` to say: that its raw stream lives ([`CudaStream::from_raw`]), that its
//! addresses are rows ([`DeviceRows::from_raw`], [`DeviceRowsMut::from_raw`]), that a graph's memory is still there
//! ([`CudaGraph::launch`]), that two streams are in order ([`Cuda::set_stream`]).
//!
//! A program with it starts on any machine: the driver is opened when it is first called (`driver.rs`). The README says
//! what the build wants where there is no CUDA toolkit.
//!
//! * C1. A pinned upload slot is written again only after the device has read it (`ring.rs`).
//! * C2. The staged plan is the plan of the launch: of the same step, as many tokens and rows, slots as wide
//!   (`stage.rs`).
//! * C3. Nothing that a kernel is given points outside what was checked: slots and pages are below the pool's, rows,
//!   lengths and table words within the tables, the host's rows long enough (`check.rs`, `stage.rs`, `tables.rs`). Of a
//!   plan it is given the staged image alone. Memory is freed after the work that may use it (`work.rs`).
//! * C4. Counters of split attention are zero between launches (`attend.rs`).
//!
//! The only place in the crate that names `cust`, which has the types of the driver's calls (`sys.rs`); all other
//! `unsafe` code is in `src/memory.rs`. Not here: the kernels (`ptx/`).
#![allow(unsafe_code)]

mod attend;
mod check;
mod copy;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod driver;
mod error;
mod gpu;
mod host_pages;
mod image;
mod kernels;
mod launch;
mod memory;
mod params;
mod pdl;
mod pool;
mod raw;
mod ring;
mod split;
mod stage;
mod store;
mod stream;
mod sys;
mod tables;
mod work;

pub use error::CudaError;
pub use gpu::Gpu;
pub use host_pages::HostPages;
pub use memory::{DeviceBuffer, DeviceRows, DeviceRowsMut, PinnedBuffer};
pub use raw::RawStream;
pub use stream::{CudaEvent, CudaGraph, CudaStream};

use super::{Attend, Backend, OpenSteps};
use crate::id::LayerId;
use crate::layout::{KvDtype, PoolLayout, TableShape};
use crate::plan::{BatchPlan, PageCopy, StepEnd};
use attend::{Variants, launch_f32};
use check::{attend_strides, check_attend, check_copies};
use copy::{CopyStreams, HostCopy, copy_on_device};
use host_pages::Way;
use image::{Image, StepLimits};
use kernels::{COPY_PAGES, LOAD_PLAN, STORE_CACHE, STORE_CACHE_ANY, STORE_CACHE_STREAMING};
use params::{AttendParams, magic};
use pool::Pool;
use stage::Stage;
use tables::Tables;

/// How a [`Cuda`] is to work.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// The stream on which everything is launched, as a rule the host's own ([`CudaStream::from_raw`]). `None`, as it
    /// is by default, is the default stream.
    pub stream: Option<CudaStream>,
    /// Most new tokens of a step, padding included. Host and device memory for plans is sized by it.
    /// Default: 16,384.
    pub max_step_tokens: u32,
    /// Most rows of a step, padding included; 0, the default, stands for as many as the page tables
    /// have, and at least 256.
    pub max_step_rows: u32,
}

impl Default for CudaOptions {
    /// The default stream, 16,384 tokens, rows by the tables.
    fn default() -> Self {
        Self { stream: None, max_step_tokens: 16 << 10, max_step_rows: 0 }
    }
}

/// K and V on a GPU.
#[derive(Debug)]
pub struct Cuda {
    gpu: Gpu,
    stream: CudaStream,
    options: CudaOptions,
    open: Option<Open>,
}

/// What `open` took.
#[derive(Debug)]
struct Open {
    pool: Pool,
    tables: Tables,
    stage: Stage,
    variants: Variants,
    limits: StepLimits,
    copy_streams: Option<CopyStreams>,
    steps: OpenSteps,
}

/// Device addresses of the staged plan's arrays, for the host's own kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StagedPlan {
    /// i32 or i64 `[tokens]`, as the plan has it.
    pub slot_mapping: u64,
    /// u32 `[tokens]`.
    pub positions: u64,
    /// [`BatchRow`](crate::BatchRow) `[rows]`.
    pub rows: u64,
}

impl Cuda {
    /// A backend on `gpu` without a pool yet.
    pub fn new(gpu: &Gpu, mut options: CudaOptions) -> Self {
        let stream = options.stream.take().unwrap_or_else(|| CudaStream::default_of(gpu));
        Self { gpu: gpu.clone(), stream, options, open: None }
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The stream that everything is launched on.
    pub fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// Launches on another stream of the same device from now on.
    ///
    /// # Safety
    /// The host orders the two: what was asked of the one before comes first, `open` and [`Cuda::prepare`] too, since
    /// there is one staged plan and one set of tables, and kernels go where these say.
    pub unsafe fn set_stream(&mut self, stream: CudaStream) {
        self.stream = stream;
        if let Some(open) = &mut self.open {
            open.stage.leave();
        }
    }

    /// The pool that `open` was given.
    pub fn layout(&self) -> Option<&PoolLayout> {
        self.open.as_ref().map(|open| open.pool.layout())
    }

    /// The pool's memory, in the order that [`PoolLayout`] describes.
    pub fn pool(&self) -> Option<&DeviceBuffer> {
        self.open.as_ref().map(|open| open.pool.memory())
    }

    /// Bytes of plans sent to the device so far.
    pub fn uploaded_bytes(&self) -> u64 {
        self.open.as_ref().map_or(0, |open| open.stage.sent_bytes())
    }

    /// The page tables as they are on the device, after waiting for everything asked for. For tests.
    ///
    /// # Errors
    /// Before `open`; whatever failed.
    pub fn table_words(&self) -> Result<Vec<u32>, CudaError> {
        self.open.as_ref().ok_or(CudaError::NotOpen)?.tables.read()
    }

    /// Loads the kernels and makes the memory for one variant of attention now, rather than at its first launch. A capture
    /// needs that to have happened.
    ///
    /// # Errors
    /// Before `open`, an [`Attend`] that no kernel serves, or the driver's.
    pub fn prepare(&mut self, attend: &Attend) -> Result<(), CudaError> {
        self.gpu.bind()?;
        self.gpu.load(&STORE_CACHE)?;
        self.gpu.load(&STORE_CACHE_ANY)?;
        self.gpu.load(&STORE_CACHE_STREAMING)?;
        self.gpu.load(&COPY_PAGES)?;
        self.gpu.load(&LOAD_PLAN)?;
        let open = self.open.as_mut().ok_or(CudaError::NotOpen)?;
        let layout = open.pool.layout();
        let attend = check_attend(attend, layout, open.tables.longest_row())?;
        if layout.dtype() != KvDtype::F32 {
            let stream = self.stream.raw();
            open.variants.prepare(&self.gpu, layout, &attend, open.limits, stream)?;
        }
        Ok(())
    }

    /// Makes `plan`, whose step is open, the one that launches and graphs read; the same plan
    /// [padded](BatchPlan::padded) counts as another one.
    ///
    /// A launch does this by itself where needed. A graph cannot: capture the launches of a plan that is staged, and
    /// replay the graph after staging any plan of as many tokens and rows, with slots of the same width. Each row has
    /// at least one token: a graph of as many tokens as rows holds no kernel for rows of more than one, which another
    /// row of none would make room for.
    ///
    /// # Errors
    /// Before `open`, a plan whose step is not open, that does not fit or has a row of no tokens, or while the stream
    /// is captured.
    pub fn stage(&mut self, plan: &BatchPlan<'_>) -> Result<StagedPlan, CudaError> {
        self.gpu.bind()?;
        let stream = self.stream.raw();
        let open = self.open.as_mut().ok_or(CudaError::NotOpen)?;
        open.check_open(plan)?;
        if let Some(row) = plan.rows.iter().position(|row| row.extend_len == 0) {
            return Err(CudaError::EmptyRow { row });
        }
        let image = open.stage.ensure(&self.gpu, plan, &mut open.variants, &open.tables, stream)?;
        Ok(StagedPlan { slot_mapping: image.slots, positions: image.positions, rows: image.rows })
    }

    /// Marks the stream's end: when the event is done, so is every step launched so far, and the engine may be told
    /// with `complete`.
    ///
    /// # Errors
    /// The driver's.
    pub fn record(&self) -> Result<CudaEvent, CudaError> {
        self.stream.mark()
    }

    /// Copies pages into another pool of the same page shape on the same device, of either layout, on `stream`. The
    /// host orders that stream after the steps that write the pages.
    ///
    /// # Errors
    /// Before `open`, pages that do not exist, pages of another shape, a pool on another device, or the driver's.
    pub fn copy_to_pool(
        &self,
        target: &mut Cuda,
        copies: &[PageCopy],
        stream: &CudaStream,
    ) -> Result<CudaEvent, CudaError> {
        self.gpu.bind()?;
        self.check_device(Some(target.gpu.ordinal()))?;
        let source = self.open.as_ref().ok_or(CudaError::NotOpen)?.pool.pages();
        let target = target.open.as_ref().ok_or(CudaError::NotOpen)?.pool.pages();
        check_copies(copies, (source.count, target.count))?;
        copy_on_device(&self.gpu, source, target, copies, stream.raw())?;
        stream.mark()
    }

    /// Copies pages of the pool (sources) to pinned host memory (targets), on `stream`. The host orders that stream
    /// after the steps that write the pages; until the event is done, [`HostPages`] refuses them.
    ///
    /// The first copy makes streams and memory that all of them share. So a capture needs one before it, and the host
    /// orders replays with other copies, and leaves the pages of replays alone until they are done.
    ///
    /// # Errors
    /// Before `open`, pages that do not exist, pages of another shape, in a capture the first copy, or the driver's.
    pub fn copy_to_host(
        &mut self,
        host: &mut HostPages,
        copies: &[PageCopy],
        stream: &CudaStream,
    ) -> Result<CudaEvent, CudaError> {
        self.copy_host(host, Way::ToHost, copies, stream)
    }

    /// Copies pages in pinned host memory (sources) to the pool (targets), on `stream`. The host orders that stream
    /// before the steps that read the pages; until the event is done, [`HostPages`] lends them to be read only.
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

    /// Refuses what lies on another device.
    fn check_device(&self, ordinal: Option<u32>) -> Result<(), CudaError> {
        match ordinal {
            Some(ordinal) if ordinal != self.gpu.ordinal() => {
                Err(CudaError::OtherDevice { ordinal })
            }
            _ => Ok(()),
        }
    }

    fn copy_host(
        &mut self,
        host: &HostPages,
        way: Way,
        copies: &[PageCopy],
        stream: &CudaStream,
    ) -> Result<CudaEvent, CudaError> {
        self.gpu.bind()?;
        let open = self.open.as_mut().ok_or(CudaError::NotOpen)?;
        let streams = match &mut open.copy_streams {
            Some(streams) => streams,
            None if raw::is_capturing(stream.raw())? => return Err(CudaError::NotPrepared),
            empty => empty.insert(CopyStreams::new(&self.gpu)?),
        };
        let pool = open.pool.pages();
        streams.copy(&self.gpu, &HostCopy { pool, host, way, copies, stream })
    }
}

impl Open {
    fn check_open(&self, plan: &BatchPlan<'_>) -> Result<(), CudaError> {
        let step = plan.step;
        match self.steps.contains(step) {
            true => Ok(()),
            false if step <= self.steps.last() => Err(CudaError::Ended { step }),
            false => Err(CudaError::NotBegun { step }),
        }
    }

    fn attend_params(
        &self,
        image: &Image,
        layer: LayerId,
        attend: &Attend,
    ) -> Result<AttendParams, CudaError> {
        let (layout, table) = (self.pool.layout(), self.tables.shape());
        let (strides, [k, v]) = (self.pool.strides(), self.pool.origins(layer)?);
        Ok(AttendParams {
            k,
            v,
            page_stride: strides.page,
            slot_stride: strides.slot,
            head_stride: strides.head,
            table: self.tables.address(),
            batch_rows: image.rows,
            page_magic: magic(layout.page_size()),
            chunk_magic: magic(table.chunk_pages),
            page_size: layout.page_size(),
            chunk_pages: table.chunk_pages,
            chunks_per_row: table.chunks_per_row,
            chunk_base: self.tables.chunk_base(),
            q_heads: attend.q_heads,
            kv_heads: layout.kv_heads(),
            group: attend.q_heads / layout.kv_heads(),
            batch: image.row_count as u32,
            window: attend.window.unwrap_or(0),
            scale: attend.scale,
            soft_cap: attend.soft_cap.unwrap_or(0.0),
            ..AttendParams::default()
        })
    }
}

impl Backend for Cuda {
    type Error = CudaError;
    type Rows<'a> = DeviceRows<'a>;
    type RowsMut<'a> = DeviceRowsMut<'a>;
    type Lse<'a> = DeviceRowsMut<'a>;

    /// # Errors
    /// [`CudaError::OutOfMemory`], or a pool already.
    fn open(
        &mut self,
        layout: &PoolLayout,
        table: &TableShape,
        max_steps: u32,
    ) -> Result<(), CudaError> {
        if self.open.is_some() {
            return Err(CudaError::AlreadyOpen);
        }
        self.check_device(Some(self.stream.gpu().ordinal()))?;
        self.gpu.bind()?;
        let rows = match self.options.max_step_rows {
            0 => table.rows.max(256),
            rows => rows,
        };
        let limits = StepLimits { tokens: self.options.max_step_tokens, rows };
        // A step takes a slot or two for each variant of attention.
        let uploads = 2 * max_steps as usize + 2;
        self.open = Some(Open {
            pool: Pool::new(&self.gpu, *layout)?,
            tables: Tables::new(&self.gpu, *table, layout, self.stream.raw())?,
            stage: Stage::new(&self.gpu, layout, limits, uploads)?,
            variants: Variants::default(),
            limits,
            copy_streams: None,
            steps: OpenSteps::new(max_steps),
        });
        Ok(())
    }

    /// Waits only where the host is more than twice `max_steps` steps ahead of the device.
    ///
    /// # Errors
    /// A plan that names what does not exist or is too large, whose step does not follow the last one, while the stream
    /// is captured, or the driver's.
    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), CudaError> {
        self.gpu.bind()?;
        let open = self.open.as_mut().ok_or(CudaError::NotOpen)?;
        let (step, last) = (plan.step, open.steps.last());
        if step <= last {
            return Err(CudaError::AlreadyBegun { step, last });
        }
        if !open.steps.has_room() {
            return Err(CudaError::OpenSteps { max: open.steps.max() });
        }
        let stream = self.stream.raw();
        // A replay would take the plan out of a slot that holds another one by then.
        if raw::is_capturing(stream)? {
            return Err(CudaError::NotStaged { step });
        }
        open.stage.begin(&self.gpu, plan, &mut open.variants, &open.tables, stream)?;
        open.steps.begin(step);
        Ok(())
    }

    fn end(&mut self, end: StepEnd) {
        if let Some(open) = &mut self.open {
            open.steps.end(end);
        }
    }

    /// Rows are of the pool's dtype.
    ///
    /// # Errors
    /// A plan whose step is not open or that names what does not exist, rows that do not fit it, or the driver's.
    fn store_cache(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        k: DeviceRows<'_>,
        v: DeviceRows<'_>,
    ) -> Result<(), CudaError> {
        [k.device, v.device].into_iter().try_for_each(|device| self.check_device(device))?;
        self.gpu.bind()?;
        let stream = self.stream.raw();
        let open = self.open.as_mut().ok_or(CudaError::NotOpen)?;
        open.check_open(plan)?;
        let image = open.stage.ensure(&self.gpu, plan, &mut open.variants, &open.tables, stream)?;
        store::store(&self.gpu, &open.pool, &image, layer, [k, v], stream)
    }

    /// Rows are of the pool's dtype, 16-byte aligned unless it is f32. 16-bit pools: head_dim 64, 128 or 256; f32
    /// (slow, for checking): a multiple of 32 up to 256. At most 16 query heads for a kv head.
    ///
    /// # Errors
    /// A plan whose step is not open or that names what does not exist, rows that do not fit it, an [`Attend`] that no
    /// kernel serves, or the driver's.
    fn attend(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        q: DeviceRows<'_>,
        out: DeviceRowsMut<'_>,
        lse: Option<DeviceRowsMut<'_>>,
    ) -> Result<(), CudaError> {
        let sums = lse.as_ref().and_then(|lse| lse.device);
        [q.device, out.device, sums]
            .into_iter()
            .try_for_each(|device| self.check_device(device))?;
        self.gpu.bind()?;
        let stream = self.stream.raw();
        let open = self.open.as_mut().ok_or(CudaError::NotOpen)?;
        open.check_open(plan)?;
        let layout = open.pool.layout();
        let attend = &check_attend(attend, layout, open.tables.longest_row())?;
        let (tokens, dtype) = (plan.token_count(), layout.dtype());
        let (q_stride, out_stride) =
            attend_strides(attend, layout, tokens, &q, &out, lse.as_ref())?;
        let index = match dtype {
            KvDtype::F32 => None,
            _ => Some(open.variants.prepare(&self.gpu, layout, attend, open.limits, stream)?),
        };
        let image =
            &open.stage.ensure(&self.gpu, plan, &mut open.variants, &open.tables, stream)?;
        if tokens == 0 {
            return Ok(());
        }
        let params = AttendParams {
            q: q.address,
            out: out.address,
            lse: lse.map_or(0, |lse| lse.address),
            q_stride,
            out_stride,
            ..open.attend_params(image, layer, attend)?
        };
        let Some(index) = index else {
            // SAFETY: rows were checked above, the plan when it was staged.
            return unsafe { launch_f32(&self.gpu, &params, stream) };
        };
        let start = &mut open.stage.start;
        // SAFETY: rows were checked above, the plan when it was staged.
        unsafe { open.variants.launch(&self.gpu, index, image, params, start, stream) }
    }

    /// # Errors
    /// Pages that do not exist, or the driver's.
    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), CudaError> {
        self.gpu.bind()?;
        let pages = self.open.as_ref().ok_or(CudaError::NotOpen)?.pool.pages();
        check_copies(copies, (pages.count, pages.count))?;
        copy_on_device(&self.gpu, pages, pages, copies, self.stream.raw())
    }

    /// # Errors
    /// Whatever failed since the last call.
    fn synchronize(&mut self) -> Result<(), CudaError> {
        self.stream.synchronize()
    }
}
