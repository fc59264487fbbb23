//! One variant of attention: its kernels, and the memory that they keep.
//!
//! Not here: the list of variants, and their launches (`variants.rs`).

use super::shared::SharedDecode;
use super::split::{DECODE_ROWS, Split, SplitCount, SplitShape, decode_extra};
use crate::backend::Attend;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::driver::raw::{RawStream, raw};
use crate::backend::cuda::driver::sys;
use crate::backend::cuda::error::{CudaError, check};
use crate::backend::cuda::kernels::params::{Lists, wide_magic};
use crate::backend::cuda::kernels::{Decodes, Kernel, Selection};
use crate::backend::cuda::plan::image::StepLimits;
use crate::backend::cuda::store::pool::Pool;
use crate::layout::KvDtype;

/// No kernel has more CTAs than this on one multiprocessor.
pub(super) const RESIDENT_MAX: u32 = 8;
/// Those of a decode kernel for more rows than one token's: registers and shared memory leave room for no more.
pub(super) const WIDE_RESIDENT: u32 = 2;

/// Query heads, window (0: none), positions of a list (0: none, all is read), and whether logits have the sign of their
/// scores.
pub(super) type VariantKey = (u32, u32, u32, bool);

/// Slots that the positions of a step's lists stand for, as kernels make them.
#[derive(Debug)]
pub(in crate::backend::cuda) struct ListBuffers {
    /// u32 `[rows, kv_heads, top]`.
    pub listed: DeviceBuffer,
    /// u32 `[rows, kv_heads]`.
    pub counts: DeviceBuffer,
}

/// One variant of attention: its split, and the memory of its kernels.
#[derive(Debug)]
pub(super) struct Variant {
    pub(super) key: VariantKey,
    /// What its kernels are selected by.
    pub(super) of: Selection,
    pub(super) decode: Decodes,
    /// Once a step goes to the extend kernel.
    pub(super) extend: Option<Extend>,
    pub(super) split: Split,
    /// Where attention is over lists.
    pub(super) lists: Option<ListBuffers>,
    /// Whether a kernel may read spans once, of which there were none so far.
    pub(super) may_share: bool,
    /// Reads shared spans once, where a kernel does.
    pub(super) shared: Option<SharedDecode>,
    /// What the staged step came to.
    pub(super) count: SplitCount,
    /// Bytes from the image's splits to this variant's.
    pub(super) image_at: usize,
    /// Partial sums.
    pub(super) partial: DeviceBuffer,
    /// Zero between launches.
    pub(super) counters: DeviceBuffer,
}

/// The extend kernel of a variant, and its memory.
#[derive(Debug)]
pub(super) struct Extend {
    pub(super) kernel: &'static Kernel,
    /// In its place where rows are trees, and in graphs, which serve those too: where it knows none.
    pub(super) trees: Option<&'static Kernel>,
    /// Its plan on the device.
    pub(super) plan: DeviceBuffer,
    /// Partial sums.
    pub(super) partial: DeviceBuffer,
    /// Zero between launches.
    pub(super) counters: DeviceBuffer,
}

pub(super) fn key(attend: &Attend, top: u32) -> VariantKey {
    (attend.q_heads, attend.window.unwrap_or(0), top, attend.scale > 0.0)
}

/// A variant's shape, its kernels on no CTA yet.
pub(super) fn shape_of(pool: &Pool, key: VariantKey, limits: StepLimits) -> SplitShape {
    let layout = pool.layout();
    let kv_heads = layout.kv_heads();
    SplitShape {
        kv_heads,
        group: key.0 / kv_heads,
        head_dim: layout.head_dim(),
        window: key.1,
        top: key.2,
        extra: decode_extra(layout.dtype().is_quantised()),
        decode_ctas: [0; DECODE_ROWS.len()],
        extend_ctas: 0,
        batch_max: limits.rows,
        tokens_max: limits.tokens,
    }
}

/// The decode kernels of a shape that is served.
pub(super) fn decodes_of(of: &Selection, shape: &SplitShape) -> Result<Decodes, CudaError> {
    of.extend().ok_or(CudaError::HeadDim { head_dim: of.head_dim })?;
    if shape.top == 0 {
        return Ok(of.decodes(shape.group));
    }
    let narrowest = shape.narrowest();
    // Rows of one token have lists, so no step takes a wider one. Quantised pools have none.
    let dtype = if of.scaling.is_some() { KvDtype::Fp8E4M3 } else { of.rows.into() };
    let over_lists = of.selected()[narrowest].ok_or(CudaError::Lists { dtype })?;
    let mut decodes = Decodes::default();
    decodes[narrowest] = Some(over_lists);
    Ok(decodes)
}

/// CTAs of a grid that fills the device.
pub(super) fn ctas(gpu: &Gpu, kernel: &'static Kernel) -> Result<u32, CudaError> {
    Ok(gpu.multiprocessors() * gpu.resident(kernel)?.clamp(1, RESIDENT_MAX))
}

/// Words of zeros in device memory.
pub(super) fn zeros(gpu: &Gpu, bytes: usize, stream: RawStream) -> Result<DeviceBuffer, CudaError> {
    let buffer = DeviceBuffer::lasting(gpu, bytes as u64)?;
    // SAFETY: the range is the buffer allocated above, whose size is a multiple of 4.
    let result = unsafe { sys::cuMemsetD32Async(buffer.address(), 0, bytes / 4, raw(stream)) };
    check("cuMemsetD32Async", result)?;
    Ok(buffer)
}

impl ListBuffers {
    /// For as many rows as a step has.
    pub(super) fn new(gpu: &Gpu, shape: &SplitShape) -> Result<Self, CudaError> {
        let lists = u64::from(shape.batch_max) * u64::from(shape.kv_heads);
        let listed = DeviceBuffer::lasting(gpu, 4 * lists * u64::from(shape.top))?;
        Ok(Self { listed, counts: DeviceBuffer::lasting(gpu, 4 * lists)? })
    }

    pub(super) fn params(&self, shape: &SplitShape, page_size: u32) -> Lists {
        Lists {
            listed: self.listed.address(),
            counts: self.counts.address(),
            page_magic: wide_magic(page_size.into()),
            top: shape.top,
            reserved: 0,
        }
    }
}

impl Variant {
    /// Which kernels the staged step takes, `trees` among its rows or not.
    pub(super) fn key_of(&self, trees: bool) -> u8 {
        let taken = self.shared.as_ref().and_then(SharedDecode::taken);
        let tails = taken.map_or(0, |taken| taken.tails as u8 + 1);
        let decode = u8::from(self.count.decode_units > 0);
        let extend = match self.count.extend_items {
            0 => 0,
            _ => 1 + u8::from(trees),
        };
        decode | extend << 1 | (self.count.width as u8) << 3 | tails << 5
    }

    /// The decode kernel of a width that steps have.
    pub(super) fn decode_of(&self, width: usize) -> &'static Kernel {
        self.decode[width].expect("a width with CTAs has a kernel")
    }

    pub(super) fn new(
        gpu: &Gpu,
        pool: &Pool,
        key: VariantKey,
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<Self, CudaError> {
        let of = *pool.selection();
        let mut shape = shape_of(pool, key, limits);
        let (decode, narrowest) = (decodes_of(&of, &shape)?, shape.narrowest());
        let of_group = ctas(gpu, decode[narrowest].expect("every group has a decode kernel"))?;
        for (width, ctas) in shape.decode_ctas.iter_mut().enumerate().skip(narrowest) {
            let most = if width == narrowest { u32::MAX } else { WIDE_RESIDENT };
            let resident = (of_group / gpu.multiprocessors()).min(most);
            *ctas = if decode[width].is_some() { resident * gpu.multiprocessors() } else { 0 };
        }
        Ok(Self {
            key,
            of,
            decode,
            extend: None,
            split: Split::new(shape),
            lists: if key.2 > 0 { Some(ListBuffers::new(gpu, &shape)?) } else { None },
            may_share: false,
            shared: None,
            count: SplitCount::default(),
            image_at: 0,
            partial: DeviceBuffer::lasting(gpu, shape.decode_partial_bytes() as u64)?,
            counters: zeros(gpu, shape.decode_counter_bytes(), stream)?,
        })
    }

    /// Loads the extend kernel and makes its memory, once.
    pub(super) fn add_extend(&mut self, gpu: &Gpu, stream: RawStream) -> Result<(), CudaError> {
        if self.extend.is_some() {
            return Ok(());
        }
        let kernel = self.of.extend().expect("the shape is served");
        let mut shape = *self.split.shape();
        shape.extend_ctas = ctas(gpu, kernel)?;
        self.extend = Some(Extend {
            kernel,
            trees: self.of.trees(),
            plan: DeviceBuffer::lasting(gpu, 4 * shape.extend_words() as u64)?,
            partial: DeviceBuffer::lasting(gpu, shape.extend_partial_bytes() as u64)?,
            counters: zeros(gpu, shape.extend_counter_bytes(), stream)?,
        });
        self.split.add_extend(shape.extend_ctas);
        Ok(())
    }

    /// Loads the kernel that reads spans once and makes its memory, where one serves the variant.
    pub(super) fn add_shared(
        &mut self,
        gpu: &Gpu,
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        if self.may_share {
            self.shared = SharedDecode::new(gpu, &self.of, *self.split.shape(), limits, stream)?;
            self.may_share = false;
        }
        Ok(())
    }
}
