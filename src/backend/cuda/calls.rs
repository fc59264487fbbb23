//! Implements [`Backend`] on a GPU: each call checks its arguments, stages the plan if necessary, and launches kernels.

use super::check::{attend_strides, check_attend, check_vector};
use super::driver::raw;
use super::error::CudaError;
use super::opened::Cuda;
use super::store::{fp8 as store_fp8, rope as store_rope, rows as store};
use crate::backend::cuda::attention::latent as attend_latent;
use crate::backend::cuda::attention::variant_table::launch_f32;
use crate::backend::cuda::driver::memory::{DeviceRows, DeviceRowsMut};
use crate::backend::cuda::kernels::params::{AttendParams, magic};
use crate::backend::cuda::moves::compact::compact;
use crate::backend::cuda::moves::copy::copy_on_device;
use crate::backend::cuda::moves::direction::Direction;
use crate::backend::cuda::moves::swap_moves::SwapMoves;
use crate::backend::cuda::plan::image::Image;
use crate::backend::cuda::store::pool::Pool;
use crate::backend::{Attend, Backend, Moved, Operand, Queries, Rope, Selection, check};
use crate::id::{LayerId, MoveId};
use crate::layout::Dtype;
use crate::plan::{BatchPlan, Compaction, PageCopy, PageMove, StepEnd};

impl Backend for Cuda {
    type Error = CudaError;
    type Rows<'a> = DeviceRows<'a>;
    type RowsMut<'a> = DeviceRowsMut<'a>;
    type Sinks<'a> = DeviceRows<'a>;
    type Lse<'a> = DeviceRowsMut<'a>;

    /// Waits for the device only if all `2 * max_steps + 2` upload slots contain data that the device has not read, or
    /// if the step needs a kernel that is not [prepared](Cuda::prepare). A step uses one slot. Masks, the splits of
    /// extend and latent kernels, and table writes that do not fit use further slots.
    ///
    /// # Errors
    /// [`CudaError::Plan`] for an invalid plan, also for one with trees if a window or chunks were
    /// [prepared](Cuda::prepare). [`CudaError::Limit`] for a step above the limits.
    /// [`CudaError::NotStaged`] while the stream is captured. The driver's errors.
    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), CudaError> {
        self.gpu.bind()?;
        let step = plan.step;
        check::may_begin(&self.steps, step)?;
        if let Some(attend) = &self.limited {
            check::window(plan, attend)?;
        }
        let stream = self.stream.raw();
        // A replay would read the plan from an upload slot that may already contain another plan.
        if raw::is_capturing(stream)? {
            return Err(CudaError::NotStaged { step });
        }
        self.stage.begin(&self.gpu, plan, &mut self.variants, &self.tables, stream)?;
        if let Some(swap) = &mut self.swap {
            swap.begin(step, self.tables.pages(plan.table_writes), &self.stream)?;
        }
        self.steps.begin(step);
        Ok(())
    }

    fn end(&mut self, end: StepEnd) {
        if let Some(swap) = &mut self.swap {
            swap.end(end, self.steps.last());
        }
        self.steps.end(end);
        self.stage.states.end(&self.steps);
    }

    /// The rows have the dtype of the layer's group; if it is quantised, that of
    /// [`CudaOptions::rows`](super::CudaOptions::rows).
    ///
    /// # Errors
    /// [`CudaError::Plan`] for an invalid plan, a step that is not open, a layer that does not exist, or rows that do
    /// not fit. [`CudaError::Element`], [`CudaError::Limit`], [`CudaError::RowsAlignment`] or
    /// [`CudaError::OtherDevice`] for rows that the kernels cannot use. In a capture, [`CudaError::NotStaged`] if
    /// the plan must be sent, or [`CudaError::NotPrepared`] if a kernel is not compiled or the stream must wait for a
    /// load of pages. The driver's errors.
    fn store_cache(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        k: DeviceRows<'_>,
        v: DeviceRows<'_>,
    ) -> Result<(), CudaError> {
        [k.device, v.device].into_iter().try_for_each(|device| self.gpu.check_same(device))?;
        self.gpu.bind()?;
        let stream = self.stream.raw();
        self.check_open(plan)?;
        self.before_layer(layer)?;
        let (gpu, pool) = (&self.gpu, self.pools.of_layer(layer)?);
        let image = self.stage.ensure(gpu, plan, &mut self.variants, &self.tables, stream)?;
        if pool.layout().dtype().is_quantised() {
            return store_fp8::store(gpu, pool, &image, layer, [k, v], stream);
        }
        store::store(gpu, pool, &image, layer, [k, v], stream)?;
        self.store_labels(pool, &image, layer, k)
    }

    /// The rows have the dtype of [`store_cache`](Backend::store_cache), and `ptx/README.md` lists the head_dim. One
    /// kernel rotates and stores. Quantised pools and pools with labels need a second kernel.
    ///
    /// # Errors
    /// As [`store_cache`](Backend::store_cache); also for frequencies or norms that are too short, and for pools
    /// without a kernel.
    fn rope_store(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        rope: &Rope<DeviceRows<'_>, DeviceRows<'_>>,
        qkv: DeviceRowsMut<'_>,
    ) -> Result<(), CudaError> {
        let norms = [rope.q_norm, rope.k_norm].map(|norm| norm.and_then(|norm| norm.device));
        [qkv.device, rope.frequencies.device, norms[0], norms[1]]
            .into_iter()
            .try_for_each(|device| self.gpu.check_same(device))?;
        self.gpu.bind()?;
        let stream = self.stream.raw();
        self.check_open(plan)?;
        self.before_layer(layer)?;
        let (gpu, pool) = (&self.gpu, self.pools.of_layer(layer)?);
        let image = self.stage.ensure(gpu, plan, &mut self.variants, &self.tables, stream)?;
        let [k, v] = store_rope::rotate(gpu, pool, &image, layer, rope, qkv, stream)?;
        if pool.layout().dtype().is_quantised() {
            return store_fp8::store(gpu, pool, &image, layer, [k, v], stream);
        }
        self.store_labels(pool, &image, layer, k)
    }

    /// The rows have the dtype of [`store_cache`](Backend::store_cache). Rows of 16-bit numbers are aligned to 16
    /// bytes. `ptx/README.md` lists their head_dims. Rows of f32, which are slow and only for checks, allow each
    /// multiple of 32 up to 256. A kv head has at most 16 query heads; latent rows have at most 128. Sinks are packed
    /// f32. A sink that is NaN or plus infinity invalidates its head's output.
    ///
    /// # Errors
    /// As [`store_cache`](Backend::store_cache); also for an [`Attend`] without a kernel, for trees with a window or
    /// chunks, and for too many variants of attention ([`CudaError::Limit`]).
    fn attend_queries(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        queries: Queries<DeviceRows<'_>, DeviceRows<'_>>,
        out: DeviceRowsMut<'_>,
        lse: Option<DeviceRowsMut<'_>>,
    ) -> Result<(), CudaError> {
        self.attend_rows(plan, layer, (attend, None), queries, out, lse)
    }

    /// # Errors
    /// [`CudaError::Plan`] for pages that do not exist. [`CudaError::Limit`] for pages that are too large for the
    /// kernel. In a capture, [`CudaError::PageInUse`] for pages with an unfinished save or load, or
    /// [`CudaError::NotPrepared`] if the kernel is not compiled. The driver's errors.
    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), CudaError> {
        self.gpu.bind()?;
        let pages = self.pools.of_group(0).pages();
        check::copies(copies, (pages.count, pages.count))?;
        if let Some(swap) = &mut self.swap {
            let ends = copies.iter().flat_map(|copy| [copy.source, copy.target]);
            swap.before_copies(ends, &self.stream)?;
            swap.note_stray_call(self.steps.last());
        }
        copy_on_device(&self.gpu, pages, pages, copies, self.stream.raw())
    }

    /// # Errors
    /// [`CudaError::Plan`] for rows or slots that do not exist. [`CudaError::Limit`] for slots that are too large for
    /// the kernel. In a capture, [`CudaError::NotPrepared`] if the kernel is not compiled or the stream must wait for a
    /// load of pages. The driver's errors.
    fn compact(&mut self, compactions: &[Compaction]) -> Result<(), CudaError> {
        self.gpu.bind()?;
        check::compactions(compactions, self.pools.of_group(0).layout(), self.tables.shape())?;
        self.note_stray_call();
        self.before_pages()?;
        let layout = self.pools.of_group(0).layout();
        (0..layout.groups().count()).try_for_each(|group| {
            let (pool, tracks) = (self.pools.of_group(group), layout.track_range(group));
            compact(&self.gpu, pool, tracks, &self.tables, compactions, self.stream.raw())
        })
    }

    /// Returns the number of pinned pages.
    fn swap_pages(&self) -> u32 {
        self.swap.as_ref().map_or(0, SwapMoves::ready)
    }

    /// # Errors
    /// [`CudaError::NotPinned`], or the error of pinning. Also fails while the stream is captured, and with the errors
    /// of [`copy_pages`](Backend::copy_pages).
    fn save_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), CudaError> {
        self.move_pages(Direction::Save, id, moves)
    }

    /// # Errors
    /// As [`save_pages`](Backend::save_pages).
    fn load_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), CudaError> {
        self.move_pages(Direction::Load, id, moves)
    }

    /// # Errors
    /// Any failure since the last call. Without [`CudaOptions::fewer_swap_pages`](super::CudaOptions), also the error
    /// of pinning if swap pages are missing.
    fn moved(&mut self) -> Result<Moved, CudaError> {
        self.last_moved()
    }

    /// # Errors
    /// Any failure since the last call.
    fn synchronize(&mut self) -> Result<(), CudaError> {
        self.stream.synchronize()?;
        match &mut self.swap {
            Some(swap) => swap.synchronize(),
            None => Ok(()),
        }
    }
}

impl Cuda {
    /// Checks that the plan's step is open, and records the call if a later step has begun.
    pub(super) fn check_open(&mut self, plan: &BatchPlan<'_>) -> Result<(), CudaError> {
        check::is_open(&self.steps, plan.step)?;
        if plan.step != self.steps.last() {
            self.note_stray_call();
        }
        Ok(())
    }

    /// Records a call that does not belong to the last step. Loads must wait for it.
    fn note_stray_call(&mut self) {
        if let Some(swap) = &mut self.swap {
            swap.note_stray_call(self.steps.last());
        }
    }

    /// Stores the labels of rows of K, if the pool has labels.
    fn store_labels(&self, pool: &Pool, image: &Image, layer: LayerId, k: DeviceRows<'_>) -> Result<(), CudaError> {
        match &self.labels {
            Some(labels) if pool.layout().label_channels() > 0 => {
                labels.store(&self.gpu, pool, image, layer, k, self.stream.raw())
            }
            _ => Ok(()),
        }
    }

    /// Launches attention; rows with lists attend over their lists.
    pub(super) fn attend_rows(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        (attend, selection): (&Attend, Option<Selection<DeviceRows<'_>>>),
        Queries { rows: q, sinks }: Queries<DeviceRows<'_>, DeviceRows<'_>>,
        out: DeviceRowsMut<'_>,
        lse: Option<DeviceRowsMut<'_>>,
    ) -> Result<(), CudaError> {
        let sums = lse.as_ref().and_then(|lse| lse.device);
        [q.device, out.device, sinks.and_then(|sinks| sinks.device), sums]
            .into_iter()
            .try_for_each(|device| self.gpu.check_same(device))?;
        self.gpu.bind()?;
        let stream = self.stream.raw();
        self.check_open(plan)?;
        self.before_layer(layer)?;
        let pool = self.pools.of_layer(layer)?;
        check::window(plan, attend)?;
        match selection {
            Some(_) => check::sparse_layer(layer, pool.layout())?,
            None => check::reach(layer, pool.layout(), attend)?,
        }
        let attend = &check_attend(attend, pool, self.tables.longest_row())?;
        self.stage.check_chunk(attend)?;
        let tokens = plan.token_count();
        let (q_stride, out_stride) = attend_strides(attend, pool, tokens, &q, &out, lse.as_ref())?;
        if let Some(sinks) = &sinks {
            check_vector(Operand::Sinks, sinks, attend.q_heads as usize)?;
        }
        if let Some(selection) = &selection {
            self.check_selection(plan, selection)?;
        }
        let latent_pool = pool.layout().is_latent();
        let index = match pool.rows() {
            _ if latent_pool => {
                let latent = &mut self.variants.latent;
                latent.prepare(&self.gpu, pool, attend, self.limits, stream)?
            }
            Dtype::F32 => None,
            _ => {
                let top = selection.as_ref().map_or(0, |selection| selection.top);
                let variant = (attend, top);
                Some(self.variants.prepare(&self.gpu, pool, variant, self.limits, stream)?)
            }
        };
        let image = self.stage.ensure(&self.gpu, plan, &mut self.variants, &self.tables, stream)?;
        if tokens == 0 {
            return Ok(());
        }
        let params = AttendParams {
            q: q.extent.address,
            out: out.extent.address,
            lse: lse.map_or(0, |lse| lse.extent.address),
            sinks: sinks.map_or(0, |sinks| sinks.extent.address),
            q_stride,
            out_stride,
            ..self.attend_params(&image, layer, attend)?
        };
        if latent_pool {
            let (gpu, latent) = (&self.gpu, &self.variants.latent);
            let start = &mut self.stage.start;
            // SAFETY: the rows were checked above; the plan was checked when it was staged.
            return unsafe {
                match index {
                    Some(index) => latent.launch(gpu, pool, (index, layer), params, start, stream),
                    None => attend_latent::launch_plain(gpu, pool, layer, params, stream),
                }
            };
        }
        // `attend_params` has checked the layer.
        let scales = pool.scales(layer);
        let Some(index) = index else {
            // SAFETY: the rows were checked above; the plan was checked when it was staged.
            return unsafe { launch_f32(&self.gpu, pool, params, scales, stream) };
        };
        if let Some(selection) = &selection {
            // SAFETY: the lists were checked above; the plan was checked when it was staged.
            unsafe { self.resolve(index, params, selection) }?;
        }
        let start = &mut self.stage.start;
        // SAFETY: the rows were checked above; the plan was checked when it was staged.
        unsafe { self.variants.launch(&self.gpu, index, &image, (params, scales), start, stream) }
    }

    /// Returns the arguments of one layer's attention, except the host's rows.
    pub(super) fn attend_params(
        &self,
        image: &Image,
        layer: LayerId,
        attend: &Attend,
    ) -> Result<AttendParams, CudaError> {
        let pool = self.pools.of_layer(layer)?;
        let (layout, table) = (pool.layout(), self.tables.shape());
        let (strides, [k, v]) = (pool.strides(), pool.origins(layer)?);
        let (batch_rows, batch) = self.stage.rows_of(image, attend.chunk)?;
        Ok(AttendParams {
            k,
            v,
            page_stride: strides.page,
            slot_stride: strides.slot,
            head_stride: strides.head,
            table: self.tables.address(),
            batch_rows,
            page_magic: magic(layout.page_size()),
            leaf_magic: magic(table.leaf_pages),
            page_size: layout.page_size(),
            leaf_pages: table.leaf_pages,
            // With chunks, `batch_rows` has chunk rows. The row number of a chunk row is the index of its first
            // directory word.
            leaves_per_row: if attend.chunk.is_some() { 1 } else { table.leaves_per_row },
            leaf_base: self.tables.leaf_base(layout.place(layer).track),
            q_heads: attend.q_heads,
            kv_heads: layout.kv_heads(),
            group: attend.q_heads / layout.kv_heads(),
            batch,
            masks: image.masks,
            window: attend.window.unwrap_or(0),
            scale: attend.scale,
            soft_cap: attend.soft_cap.unwrap_or(0.0),
            head_dim: layout.head_dim(),
            ..AttendParams::default()
        })
    }
}
