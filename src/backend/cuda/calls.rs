//! The calls of [`Backend`] on a GPU: what is asked for is checked, staged where it has to be, and launched.
//!
//! Not here: what else a host asks for (`opened.rs`).

use super::check::{attend_strides, check_attend, check_sinks};
use super::driver::raw;
use super::error::CudaError;
use super::opened::Cuda;
use super::store::{fp8 as store_fp8, rows as store};
use crate::backend::cuda::attention::latent as attend_latent;
use crate::backend::cuda::attention::variants::launch_f32;
use crate::backend::cuda::driver::memory::{DeviceRows, DeviceRowsMut};
use crate::backend::cuda::kernels::params::{AttendParams, magic};
use crate::backend::cuda::moves::compact::compact;
use crate::backend::cuda::moves::copy::copy_on_device;
use crate::backend::cuda::plan::image::Image;
use crate::backend::{Attend, Backend, Queries, Selection, check};
use crate::id::LayerId;
use crate::layout::Dtype;
use crate::plan::{BatchPlan, Compaction, PageCopy, StepEnd};

impl Backend for Cuda {
    type Error = CudaError;
    type Rows<'a> = DeviceRows<'a>;
    type RowsMut<'a> = DeviceRowsMut<'a>;
    type Sinks<'a> = DeviceRows<'a>;
    type Lse<'a> = DeviceRowsMut<'a>;

    /// Waits only where the host is more than twice `max_steps` steps ahead of the device.
    ///
    /// # Errors
    /// A plan that names what does not exist or is too large, whose step does not follow the last one, with trees where
    /// a window was [prepared](Cuda::prepare), while the stream is captured, or the driver's.
    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), CudaError> {
        self.gpu.bind()?;
        let step = plan.step;
        check::may_begin(&self.steps, step)?;
        check::window(plan, self.window)?;
        let stream = self.stream.raw();
        // A replay would take the plan out of a slot that holds another one by then.
        if raw::is_capturing(stream)? {
            return Err(CudaError::NotStaged { step });
        }
        self.stage.begin(&self.gpu, plan, &mut self.variants, &self.tables, stream)?;
        self.steps.begin(step);
        Ok(())
    }

    fn end(&mut self, end: StepEnd) {
        self.steps.end(end);
    }

    /// Rows are of the pool's dtype, those of a quantised pool of [`Cuda::rows`].
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
        [k.device, v.device].into_iter().try_for_each(|device| self.gpu.check_same(device))?;
        self.gpu.bind()?;
        let stream = self.stream.raw();
        check::is_open(&self.steps, plan.step)?;
        let image = self.stage.ensure(&self.gpu, plan, &mut self.variants, &self.tables, stream)?;
        if self.pool.layout().dtype().is_quantised() {
            return store_fp8::store(&self.gpu, &self.pool, &image, layer, [k, v], stream);
        }
        store::store(&self.gpu, &self.pool, &image, layer, [k, v], stream)?;
        self.labels
            .as_ref()
            .map_or(Ok(()), |labels| labels.store(&self.gpu, &self.pool, &image, layer, k, stream))
    }

    /// Rows are of the pool's dtype, those of a quantised pool of [`Cuda::rows`], 16-byte aligned unless that is f32.
    /// Rows of 16 bits: head_dim 64, 128 or 256; f32 (slow, for checking): a multiple of 32 up to 256. At most 16 query
    /// heads for a kv head, 128 over latent rows. Sinks are packed f32; one that is NaN or infinity makes its head's
    /// rows nonsense.
    ///
    /// # Errors
    /// A plan whose step is not open or that names what does not exist, rows that do not fit it, an [`Attend`] that no
    /// kernel serves, a window where rows are trees, or the driver's.
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
    /// Pages that do not exist, or the driver's.
    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), CudaError> {
        self.gpu.bind()?;
        let pages = self.pool.pages();
        check::copies(copies, (pages.count, pages.count))?;
        copy_on_device(&self.gpu, pages, pages, copies, self.stream.raw())
    }

    /// # Errors
    /// Rows or slots that do not exist, or the driver's.
    fn compact(&mut self, compactions: &[Compaction]) -> Result<(), CudaError> {
        self.gpu.bind()?;
        check::compactions(compactions, self.pool.layout(), self.tables.shape())?;
        compact(&self.gpu, &self.pool, &self.tables, compactions, self.stream.raw())
    }

    /// # Errors
    /// Whatever failed since the last call.
    fn synchronize(&mut self) -> Result<(), CudaError> {
        self.stream.synchronize()
    }
}

impl Cuda {
    /// Attention, of rows that have lists over those.
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
        check::is_open(&self.steps, plan.step)?;
        check::window(plan, attend.window)?;
        let attend = &check_attend(attend, &self.pool, self.tables.longest_row())?;
        let tokens = plan.token_count();
        let (q_stride, out_stride) =
            attend_strides(attend, &self.pool, tokens, &q, &out, lse.as_ref())?;
        sinks.map_or(Ok(()), |sinks| check_sinks(&sinks, attend.q_heads))?;
        selection.as_ref().map_or(Ok(()), |selection| self.check_selection(plan, selection))?;
        let latent_pool = self.pool.layout().is_latent();
        let index = match self.pool.rows() {
            _ if latent_pool => {
                let latent = &mut self.variants.latent;
                latent.prepare(&self.gpu, &self.pool, attend, self.limits, stream)?
            }
            Dtype::F32 => None,
            _ => {
                let top = selection.as_ref().map_or(0, |selection| selection.top);
                let variant = (attend, top);
                Some(self.variants.prepare(&self.gpu, &self.pool, variant, self.limits, stream)?)
            }
        };
        let image = self.stage.ensure(&self.gpu, plan, &mut self.variants, &self.tables, stream)?;
        if tokens == 0 {
            return Ok(());
        }
        let params = AttendParams {
            q: q.address,
            out: out.address,
            lse: lse.map_or(0, |lse| lse.address),
            sinks: sinks.map_or(0, |sinks| sinks.address),
            q_stride,
            out_stride,
            ..self.attend_params(&image, layer, attend)?
        };
        if latent_pool {
            let (gpu, pool, latent) = (&self.gpu, &self.pool, &self.variants.latent);
            let start = &mut self.stage.start;
            // SAFETY: rows were checked above, the plan when it was staged.
            return unsafe {
                match index {
                    Some(index) => latent.launch(gpu, pool, (index, layer), params, start, stream),
                    None => attend_latent::launch_plain(gpu, pool, layer, params, stream),
                }
            };
        }
        // The layer exists: its parameters do.
        let scales = self.pool.scales(layer);
        let Some(index) = index else {
            // SAFETY: rows were checked above, the plan when it was staged.
            return unsafe { launch_f32(&self.gpu, &self.pool, params, scales, stream) };
        };
        if let Some(selection) = &selection {
            // SAFETY: the lists were checked above, the plan when it was staged.
            unsafe { self.resolve(index, params, selection) }?;
        }
        let start = &mut self.stage.start;
        // SAFETY: rows were checked above, the plan when it was staged.
        unsafe { self.variants.launch(&self.gpu, index, &image, (params, scales), start, stream) }
    }

    /// What attention of one layer takes but the host's rows.
    pub(super) fn attend_params(
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
            masks: image.masks,
            window: attend.window.unwrap_or(0),
            scale: attend.scale,
            soft_cap: attend.soft_cap.unwrap_or(0.0),
            ..AttendParams::default()
        })
    }
}
