//! One variant of attention: its kernels and their memory.
//!
//! `variant_table.rs` lists the variants and launches them.

use super::shared::SharedDecode;
use super::split::{Split, SplitCount, SplitShape, decode_extra};
use crate::backend::Attend;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::driver::raw::RawStream;
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::kernels::params::{Lists, wide_magic};
use crate::backend::cuda::kernels::{DECODE_ROWS, Decodes, Kernel, Selection};
use crate::backend::cuda::plan::chunk_rows;
use crate::backend::cuda::plan::image::StepLimits;
use crate::backend::cuda::store::pool::Pool;
use crate::layout::KvDtype;

/// Maximum number of CTAs per multiprocessor of any kernel.
pub(super) const RESIDENT_MAX: u32 = 8;
/// Maximum number of CTAs per multiprocessor of a decode kernel for several tokens. Registers and shared memory set
/// this limit.
pub(super) const WIDE_RESIDENT: u32 = 2;

/// The parameters of attention that distinguish variants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct VariantKey {
    /// Index of the pool's shape.
    shape: usize,
    /// Number of query heads.
    q_heads: u32,
    /// Sliding window; 0: none.
    window: u32,
    /// Size of chunks; 0: none.
    pub(super) chunk: u32,
    /// Length of a list; 0 without lists.
    pub(super) top: u32,
    /// Whether the scale is positive.
    pub(super) is_positive: bool,
}

/// Slots of the listed positions of a step, which a kernel writes.
#[derive(Debug)]
pub struct ListBuffers {
    /// u32 `[rows, kv_heads, top]`.
    pub listed: DeviceBuffer,
    /// u32 `[rows, kv_heads]`.
    pub counts: DeviceBuffer,
}

/// One variant of attention: its split, and the memory of its kernels.
#[derive(Debug)]
pub(super) struct Variant {
    pub(super) key: VariantKey,
    /// The properties that select its kernels.
    pub(super) selection: Selection,
    pub(super) decode: Decodes,
    /// `None` until `Cuda::prepare` or a step adds the extend kernel.
    pub(super) extend: Option<Extend>,
    pub(super) split: Split,
    /// Present for attention over lists.
    pub(super) lists: Option<ListBuffers>,
    /// Whether `add_shared` must still look for a kernel that reads spans once.
    pub(super) may_share: bool,
    /// Reads shared spans once, if a kernel supports the variant.
    pub(super) shared: Option<SharedDecode>,
    /// The split of the staged step.
    pub(super) count: SplitCount,
    /// Byte offset of this variant's split from the start of the image's splits.
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
    /// Replaces the extend kernel in steps with trees, if the extend kernel supports no trees.
    pub(super) trees: Option<&'static Kernel>,
    /// Plan on the device.
    pub(super) plan: DeviceBuffer,
    /// Partial sums.
    pub(super) partial: DeviceBuffer,
    /// Zero between launches.
    pub(super) counters: DeviceBuffer,
}

pub(super) fn key(pool: &Pool, attend: &Attend, top: u32) -> VariantKey {
    VariantKey {
        shape: pool.shape(),
        q_heads: attend.q_heads,
        window: attend.window.unwrap_or(0),
        chunk: attend.chunk.unwrap_or(0),
        top,
        is_positive: attend.scale > 0.0,
    }
}

/// Returns a variant's shape, without grids.
pub(super) fn shape_of(pool: &Pool, key: VariantKey, limits: StepLimits) -> Result<SplitShape, CudaError> {
    let layout = pool.layout();
    let (kv_heads, head_dim) = (layout.kv_heads(), layout.head_dim());
    let extend = pool.selection().extend().ok_or(CudaError::HeadDim { head_dim })?;
    Ok(SplitShape {
        kv_heads,
        group: key.q_heads / kv_heads,
        head_dim,
        extend_rows: extend.item_rows(),
        extend_tokens: extend.cut_tokens(),
        window: key.window,
        top: key.top,
        extra: decode_extra(layout.dtype().is_quantised()),
        decode_ctas: [0; DECODE_ROWS.len()],
        extend_ctas: 0,
        batch_max: if key.chunk > 0 { chunk_rows::most(layout, limits) } else { limits.rows },
        tokens_max: limits.tokens,
    })
}

/// Returns the decode kernels of a supported shape.
pub(super) fn decodes_of(selection: &Selection, shape: &SplitShape) -> Result<Decodes, CudaError> {
    if shape.top == 0 {
        return Ok(selection.decodes(shape.group));
    }
    let narrowest = shape.narrowest();
    // Only rows of one token have lists, so no step uses a wider kernel. Quantised pools have no lists.
    let dtype = if selection.scaling.is_some() { KvDtype::Fp8E4M3 } else { selection.rows.into() };
    let over_lists = selection.selected()[narrowest].ok_or(CudaError::Lists { dtype })?;
    let mut decodes = Decodes::default();
    decodes[narrowest] = Some(over_lists);
    Ok(decodes)
}

/// Returns the CTAs of a grid that fills the device.
pub(super) fn ctas(gpu: &Gpu, kernel: &'static Kernel) -> Result<u32, CudaError> {
    Ok(gpu.multiprocessors() * gpu.resident(kernel)?.clamp(1, RESIDENT_MAX))
}

impl ListBuffers {
    /// Allocates the buffers of a variant's lists, for the rows of the largest step.
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
    /// Returns the number that identifies the staged step's kernels. `trees` is set if some rows are trees.
    pub(super) fn key_of(&self, trees: bool) -> u8 {
        let taken = self.shared.as_ref().and_then(SharedDecode::taken);
        let suffixes = taken.map_or(0, |taken| taken.suffixes as u8 + 1);
        let decode = u8::from(self.count.decode_units > 0);
        let extend = match self.count.extend_items {
            0 => 0,
            _ => 1 + u8::from(trees),
        };
        decode | extend << 1 | (self.count.width as u8) << 3 | suffixes << 5
    }

    /// Returns the decode kernel of a width.
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
        let selection = *pool.selection();
        let mut shape = shape_of(pool, key, limits)?;
        let (decode, narrowest) = (decodes_of(&selection, &shape)?, shape.narrowest());
        let of_group = ctas(gpu, decode[narrowest].expect("every group has a decode kernel"))?;
        for (width, ctas) in shape.decode_ctas.iter_mut().enumerate().skip(narrowest) {
            let most = if width == narrowest { u32::MAX } else { WIDE_RESIDENT };
            let resident = (of_group / gpu.multiprocessors()).min(most);
            *ctas = if decode[width].is_some() { resident * gpu.multiprocessors() } else { 0 };
        }
        Ok(Self {
            key,
            selection,
            decode,
            extend: None,
            split: Split::new(shape),
            lists: if key.top > 0 { Some(ListBuffers::new(gpu, &shape)?) } else { None },
            may_share: false,
            shared: None,
            count: SplitCount::default(),
            image_at: 0,
            partial: DeviceBuffer::lasting(gpu, shape.decode_partial_bytes() as u64)?,
            counters: DeviceBuffer::zeros(gpu, shape.decode_counter_bytes(), stream)?,
        })
    }

    /// Compiles the extend kernel and allocates its memory, once.
    pub(super) fn add_extend(&mut self, gpu: &Gpu, stream: RawStream) -> Result<(), CudaError> {
        if self.extend.is_some() {
            return Ok(());
        }
        let kernel = self.selection.extend().expect("the shape is served");
        let mut shape = *self.split.shape();
        shape.extend_ctas = ctas(gpu, kernel)?;
        self.extend = Some(Extend {
            kernel,
            trees: self.selection.trees(),
            plan: DeviceBuffer::lasting(gpu, 4 * shape.extend_words() as u64)?,
            partial: DeviceBuffer::lasting(gpu, shape.extend_partial_bytes() as u64)?,
            counters: DeviceBuffer::zeros(gpu, shape.extend_counter_bytes(), stream)?,
        });
        self.split.add_extend(shape.extend_ctas);
        Ok(())
    }

    /// Compiles the kernel that reads spans once and allocates its memory, if it supports the variant.
    pub(super) fn add_shared(&mut self, gpu: &Gpu, limits: StepLimits, stream: RawStream) -> Result<(), CudaError> {
        if self.may_share {
            self.shared = SharedDecode::new(gpu, &self.selection, *self.split.shape(), limits, stream)?;
            self.may_share = false;
        }
        Ok(())
    }
}
