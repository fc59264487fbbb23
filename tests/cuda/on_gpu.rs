//! Implements the traits of the contract's tests for [`Cuda`]. The tests pass and read rows of numbers on the host.

use std::convert::identity;
use std::mem::size_of;
use std::ops::Range;

use cust::sys;
use half::{bf16, f16};
use kvarena::backend::cuda::{Cuda, CudaError, CudaOptions, CudaStream, DeviceBuffer, DeviceRows, DeviceRowsMut, Gpu};
use kvarena::backend::{OpenBackend, Queries, Select, Selection, SparseBackend, StateBackend, SwapMemory};
use kvarena::config::StepBounds;
use kvarena::layout::{Dtype, KvScales, LabelChannels, PoolLayout, Reach, Scaling, TableShape};
use kvarena::testkit::contract::{Case, HostRows, SparseTestBackend, StateTestBackend, TestBackend, bytes, rounding};
use kvarena::{Attend, Backend, BatchPlan, KvShape, LayerId, PageId, forward_backend};

use crate::given_memory::{Form, GivenMemory};

/// Options of an [`OnGpu`].
#[derive(Clone, Debug)]
pub struct OnGpuOptions {
    cuda: CudaOptions,
    /// The form of the pool, if the test allocates it and the pool can have this form.
    form: Option<Form>,
}

/// Maximum number of pieces that are read or written one by one. For more, the whole pool is read or written.
const PIECES_MAX: usize = 64;

/// A [`Cuda`] on a stream of its own.
#[derive(Debug)]
pub struct OnGpu {
    pub cuda: Cuda,
    pub stream: CudaStream,
    /// The pool's memory, if the test allocated it.
    pub given: Option<GivenMemory>,
    /// Whether `prepare` has compiled all kernels, so that no later call may compile any.
    pub is_prepared: bool,
}

impl Drop for OnGpu {
    fn drop(&mut self) {
        let late = if self.is_prepared { self.cuda.modules_after_prepare() } else { 0 };
        if !std::thread::panicking() {
            if let Some(given) = &self.given {
                given.check_gaps(self.cuda.layout());
            }
            assert_eq!(late, 0, "compiled after `prepare`: {:?}", self.cuda.gpu().kernels());
        }
    }
}

impl OnGpuOptions {
    pub fn new(gpu: &Gpu) -> Self {
        Self::of(gpu, CudaOptions::new(gpu))
    }

    /// Returns these options with a new stream.
    pub fn of(gpu: &Gpu, options: CudaOptions) -> Self {
        let stream = CudaStream::new(gpu).expect("a stream");
        Self { cuda: CudaOptions { stream: Some(stream), ..options }, form: None }
    }

    /// Returns options that read spans once wherever rows share them.
    pub fn with_all_spans(gpu: &Gpu) -> Self {
        Self::of(gpu, CudaOptions { all_spans: true, ..CudaOptions::new(gpu) })
    }

    /// Returns options with the kernels of another compute capability.
    pub fn with_capability(self, capability: u32) -> Self {
        self.with(|cuda| CudaOptions { selected_capability: Some(capability), ..cuda })
    }

    /// Returns options with rows of a type.
    pub fn of_rows(gpu: &Gpu, rows: Dtype) -> Self {
        Self::new(gpu).with_rows(rows, None)
    }

    /// Returns options for a case of the contract: its rows, and its scales and labels, if any.
    pub fn for_case(self, case: &Case) -> Self {
        self.with_rows(case.kv_rows, case.labels()).with_scales(case.scales())
    }

    /// Returns options with rows of a type, and labels if given.
    pub fn with_rows(self, rows: Dtype, labels: Option<LabelChannels>) -> Self {
        self.with(|cuda| CudaOptions { rows: Some(rows), labels, ..cuda })
    }

    pub fn with_scales(self, scales: Option<KvScales>) -> Self {
        self.with(|cuda| CudaOptions { scales, ..cuda })
    }

    /// Returns options with a pool in memory of the host, if the pool can have this form.
    pub fn in_form(self, form: Form) -> Self {
        Self { form: Some(form), ..self }
    }

    fn with(self, change: impl FnOnce(CudaOptions) -> CudaOptions) -> Self {
        Self { cuda: change(self.cuda), ..self }
    }
}

impl OpenBackend for OnGpuOptions {
    type Backend = OnGpu;

    fn open(self, layout: &PoolLayout, table: &TableShape, bounds: impl Into<StepBounds>) -> Result<OnGpu, CudaError> {
        let given = self.form.and_then(|form| form.allocate(&self.cuda.gpu, layout));
        let pool = given.as_ref().map(|given| given.pool.clone());
        let cuda = CudaOptions { pool, ..self.cuda }.open(layout, table, bounds)?;
        Ok(OnGpu { stream: cuda.stream().clone(), cuda, given, is_prepared: false })
    }
}

impl OnGpu {
    /// Returns the byte ranges of the pages' pieces: in the pool, and in the concatenated pages.
    fn pieces(&self, pages: &[PageId]) -> Vec<(Range<usize>, Range<usize>)> {
        let (layout, mut end) = (*self.cuda.layout(), 0);
        let mut places = Vec::new();
        for &page in pages {
            for piece in 0..layout.pieces_per_page() {
                let range = layout.piece(page, piece);
                let piece = range.start as usize..range.end as usize;
                places.push((piece.clone(), end..end + piece.len()));
                end += piece.len();
            }
        }
        places
    }

    /// Returns the whole pool's bytes, if the pages have many pieces.
    fn whole_pool(&self, pages: &[PageId]) -> Option<Vec<u8>> {
        let (layout, pool) = (self.cuda.layout(), self.cuda.pool());
        let many = pages.len() * layout.pieces_per_page() as usize > PIECES_MAX;
        many.then(|| pool.read(0, layout.total_bytes() as usize).expect("bytes"))
    }

    /// Writes to the pool after all submitted work.
    fn write_pool(&mut self, start: usize, bytes: &[u8]) {
        write_device(self.cuda.gpu(), self.cuda.pool().address() + start as u64, bytes);
    }
}

/// Reads memory of the device after all submitted work.
pub fn read_device<T: bytemuck::Pod>(gpu: &Gpu, address: u64, len: usize) -> Vec<T> {
    let mut items = vec![T::zeroed(); len];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut items);
    gpu.bind().expect("a device");
    // SAFETY: the caller passes memory of a backend, whose users are waited for.
    unsafe {
        assert_eq!(sys::cuCtxSynchronize(), sys::CUresult::CUDA_SUCCESS);
        let copied = sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), address, bytes.len());
        assert_eq!(copied, sys::CUresult::CUDA_SUCCESS);
    }
    items
}

/// Writes to memory of the device after all submitted work.
pub fn write_device(gpu: &Gpu, address: u64, bytes: &[u8]) {
    gpu.bind().expect("a device");
    // SAFETY: the range belongs to the test, and its users are waited for.
    unsafe {
        assert_eq!(sys::cuCtxSynchronize(), sys::CUresult::CUDA_SUCCESS);
        let copied = sys::cuMemcpyHtoD_v2(address, bytes.as_ptr().cast(), bytes.len());
        assert_eq!(copied, sys::CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuCtxSynchronize(), sys::CUresult::CUDA_SUCCESS);
    }
}

impl SparseBackend for OnGpu {
    type Positions<'a> = DeviceRows<'a>;
    type PositionsMut<'a> = DeviceRowsMut<'a>;

    fn select(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        select: &Select,
        q: DeviceRows<'_>,
        positions: DeviceRowsMut<'_>,
    ) -> Result<(), CudaError> {
        self.cuda.select(plan, layer, select, q, positions)
    }

    fn attend_selected(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        selection: Selection<DeviceRows<'_>>,
        queries: Queries<DeviceRows<'_>, DeviceRows<'_>>,
        out: DeviceRowsMut<'_>,
        lse: Option<DeviceRowsMut<'_>>,
    ) -> Result<(), CudaError> {
        self.cuda.attend_selected(plan, layer, attend, selection, queries, out, lse)
    }
}

impl SparseTestBackend for OnGpu {
    type Lists = DeviceBuffer;

    fn lists(&mut self, positions: &[u32]) -> DeviceBuffer {
        DeviceBuffer::of(self.cuda.gpu(), positions).expect("memory")
    }

    fn positions(lists: &DeviceBuffer) -> DeviceRows<'_> {
        lists.rows(0, None)
    }

    fn positions_mut(lists: &mut DeviceBuffer) -> DeviceRowsMut<'_> {
        lists.rows_mut(0, None)
    }

    fn read_lists(&mut self, lists: &DeviceBuffer) -> Vec<u32> {
        lists.read(0, lists.bytes() as usize / size_of::<u32>()).expect("numbers")
    }
}

/// Rows on the device.
#[derive(Debug)]
pub struct GpuRows {
    buffer: DeviceBuffer,
    dtype: Dtype,
    stride: usize,
    len: usize,
}

impl GpuRows {
    fn new(gpu: &Gpu, rows: &HostRows) -> Self {
        let buffer = DeviceBuffer::of(gpu, &bytes(rows.dtype, &rows.values)).expect("memory");
        Self { buffer, dtype: rows.dtype, stride: rows.stride, len: rows.values.len() }
    }

    /// Returns all bytes, including those between the rows.
    pub fn bytes(&self) -> Vec<u8> {
        self.buffer.read(0, self.buffer.bytes() as usize).expect("bytes")
    }

    /// Returns all numbers, including those between the rows.
    pub fn read(&self) -> Vec<f32> {
        match self.dtype {
            Dtype::F32 => self.buffer.read(0, self.len).expect("numbers"),
            Dtype::F16 => widen(&self.buffer, self.len, f16::to_f32),
            Dtype::Bf16 => widen(&self.buffer, self.len, bf16::to_f32),
            other => panic!("{other:?}"),
        }
    }
}

fn widen<T: bytemuck::Pod>(buffer: &DeviceBuffer, len: usize, to: fn(T) -> f32) -> Vec<f32> {
    buffer.read::<T>(0, len).expect("numbers").into_iter().map(to).collect()
}

impl Backend for OnGpu {
    type Error = CudaError;
    forward_backend!(
        cuda: Cuda, identity;
        types, begin, end, store_cache, rope_store, attend, copy_pages, compact, swap_pages, save_pages, load_pages,
        moved, synchronize
    );
}

impl StateBackend for OnGpu {
    forward_backend!(cuda: Cuda, identity; states);
}

impl StateTestBackend for OnGpu {
    fn slots(&mut self, plan: &BatchPlan<'_>, layer: LayerId) -> [Vec<i32>; 2] {
        let slots = self.cuda.slots(plan, layer).expect("a layer that keeps a state");
        let (gpu, rows) = (self.cuda.gpu(), plan.rows.len());
        let starts: Vec<u32> = read_device(gpu, slots.starts, rows + 1);
        let wanted = plan.rows.iter().map(|row| row.qo_start).chain([plan.token_count() as u32]);
        assert_eq!(starts, wanted.collect::<Vec<_>>(), "the first tokens of the rows");
        [slots.reads, slots.writes].map(|address| read_device(gpu, address, rows))
    }
}

impl SwapMemory for OnGpu {
    forward_backend!(cuda: Cuda, identity; leases);
}

impl TestBackend for OnGpu {
    type Input = GpuRows;
    type Output = GpuRows;
    type Sums = DeviceBuffer;

    fn supports(case: &Case) -> bool {
        let layout = &case.layout;
        let (dtype, latent) = (layout.dtype(), layout.is_latent());
        if layout.label_channels() > 0 && dtype.size() != 2 {
            return false;
        }
        let leaf_tokens = case.table.leaf_pages * layout.page_size();
        let is_served = |(_, reach)| match reach {
            Reach::Chunk(size) => !latent && size % leaf_tokens == 0,
            _ => true,
        };
        if !layout.groups().limited().all(is_served) {
            return false;
        }
        let rows = if dtype.is_quantised() { case.kv_rows } else { dtype.rows() };
        let head_dim = match rows {
            _ if latent => layout.shape() == KvShape::Latent { rank: 512, rope: 64 },
            Dtype::F32 => case.layout.head_dim().is_multiple_of(32),
            _ => matches!(case.layout.head_dim(), 64 | 128 | 256),
        };
        head_dim && case.kv_rows == rows && case.q_rows == rows
    }

    /// Returns the rounding unit: kernels sum in f32 over weights that are rounded to the rows' type.
    fn unit(&self, case: &Case) -> f64 {
        match case.q_rows {
            Dtype::F32 => 2_f64.powi(-21),
            Dtype::F16 => 2_f64.powi(-13),
            Dtype::Bf16 => 2_f64.powi(-10),
            other => panic!("{other:?}"),
        }
    }

    /// Kernels of several new tokens multiply bytes by the scales of their tokens, and round to the rows' type.
    fn value_rounding(&self, case: &Case) -> f64 {
        let layout = &case.layout;
        let by_token = layout.scaling() == Some(Scaling::ByToken) && !layout.is_latent();
        if by_token && case.q_rows != Dtype::F32 { rounding(case.q_rows) } else { 0.0 }
    }

    fn input(&mut self, rows: &HostRows) -> GpuRows {
        GpuRows::new(self.cuda.gpu(), rows)
    }

    fn rows(input: &GpuRows) -> DeviceRows<'_> {
        input.buffer.rows(0, Some(input.stride))
    }

    fn sinks(input: &GpuRows) -> DeviceRows<'_> {
        input.buffer.rows(0, None)
    }

    fn output(&mut self, poison: &HostRows) -> GpuRows {
        GpuRows::new(self.cuda.gpu(), poison)
    }

    fn rows_mut(output: &mut GpuRows) -> DeviceRowsMut<'_> {
        output.buffer.rows_mut(0, Some(output.stride))
    }

    fn read_output(&mut self, output: &GpuRows) -> Vec<f32> {
        output.read()
    }

    fn sums(&mut self, len: usize) -> DeviceBuffer {
        DeviceBuffer::of(self.cuda.gpu(), &vec![f32::NAN; len]).expect("memory")
    }

    fn lse(sums: &mut DeviceBuffer) -> DeviceRowsMut<'_> {
        sums.rows_mut(0, None)
    }

    fn read_sums(&mut self, sums: &DeviceBuffer) -> Vec<f32> {
        sums.read(0, sums.bytes() as usize / size_of::<f32>()).expect("numbers")
    }

    fn read_pages(&mut self, pages: &[PageId], target: &mut [u8]) {
        if let Some(given) = &self.given {
            return given.read_pages(self.cuda.layout(), pages, target);
        }
        let whole = self.whole_pool(pages);
        for (piece, part) in self.pieces(pages) {
            let bytes = match &whole {
                Some(whole) => whole[piece].to_vec(),
                None => self.cuda.pool().read(piece.start as u64, piece.len()).expect("bytes"),
            };
            target[part].copy_from_slice(&bytes);
        }
    }

    fn write_pages(&mut self, pages: &[PageId], source: &[u8]) {
        if let Some(given) = &self.given {
            return given.write_pages(self.cuda.gpu(), self.cuda.layout(), pages, source);
        }
        let mut whole = self.whole_pool(pages);
        for (piece, part) in self.pieces(pages) {
            match &mut whole {
                Some(whole) => whole[piece].copy_from_slice(&source[part]),
                None => self.write_pool(piece.start, &source[part]),
            }
        }
        if let Some(whole) = whole {
            self.write_pool(0, &whole);
        }
    }
}
