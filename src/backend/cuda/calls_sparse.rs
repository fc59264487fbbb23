//! Implements [`SparseBackend`] on a GPU. Lists are packed u32 in device memory.

use super::check::{check_packed, check_pool, row_stride};
use super::error::CudaError;
use super::kernels::RESOLVE_SELECTION;
use super::opened::Cuda;
use crate::backend::cuda::driver::memory::{DeviceRows, DeviceRowsMut, Element};
use crate::backend::cuda::driver::raw;
use crate::backend::cuda::kernels::params::{AttendParams, SelectParams};
use crate::backend::cuda::store::labels::Labels;
use crate::backend::{Attend, Operand, PlanError, Queries, Select, Selection, SparseBackend, check, sparse};
use crate::id::LayerId;
use crate::plan::BatchPlan;

impl SparseBackend for Cuda {
    type Positions<'a> = DeviceRows<'a>;
    type PositionsMut<'a> = DeviceRowsMut<'a>;

    /// # Errors
    /// The errors of attention. [`CudaError::Plan`] for a pool without labels, lists that do not fit, and a layer
    /// outside group 0. [`CudaError::Limit`] if rows with lists see more tokens in total than
    /// [`CudaOptions::select_tokens`](super::CudaOptions::select_tokens).
    fn select(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        select: &Select,
        q: DeviceRows<'_>,
        positions: DeviceRowsMut<'_>,
    ) -> Result<(), CudaError> {
        let devices = [q.device, positions.device];
        devices.into_iter().try_for_each(|device| self.gpu.check_same(device))?;
        self.gpu.bind()?;
        let (stream, layout) = (self.stream.raw(), *self.pools.of_group(0).layout());
        self.check_open(plan)?;
        check::layer(layer, &layout)?;
        check::sparse_layer(layer, &layout)?;
        let longest = self.tables.longest_row();
        sparse::check(select, &layout, longest)?;
        let labels = self.labels.as_mut().ok_or(PlanError::NoLabels)?;
        let width = select.q_heads as usize * layout.head_dim() as usize;
        let (tokens, dtype) = (plan.token_count(), self.pools.of_group(0).rows());
        let q_stride = row_stride(Operand::Q, &q.extent, tokens, width, dtype)?;
        if [q.extent.address, q_stride].iter().any(|x| x % 2 != 0) {
            return Err(CudaError::RowsAlignment { align: 2 });
        }
        let lists = plan.rows.len() * layout.kv_heads() as usize;
        check_packed(Operand::Selection, &positions.extent, lists, select.top as usize, Element::Position)?;
        labels.check(plan)?;
        if !labels.used {
            if raw::is_capturing(stream)? {
                return Err(CudaError::NotPrepared);
            }
            self.gpu.compile_all(&Labels::kernels(self.pools.of_group(0).selection(), true))?;
            labels.used = true;
        }
        self.before_layer(layer)?;
        let image = self.stage.ensure(&self.gpu, plan, &mut self.variants, &self.tables, stream)?;
        if plan.rows.is_empty() {
            return Ok(());
        }
        let window = select.window.filter(|&window| u64::from(window) < longest);
        let attend = Attend { window, ..Attend::new(select.q_heads, layout.head_dim()) };
        let params = self.attend_params(&image, layer, &attend)?;
        let params = AttendParams { q: q.extent.address, q_stride, ..params };
        let capturing = raw::is_capturing(stream)?;
        let start = self.stage.start.first(capturing);
        let labels = self.labels.as_ref().expect("the pool has labels");
        let (of, list) = ((layer, params), (positions.extent.address, select.top));
        // SAFETY: q and the lists were checked above, the plan when it was staged.
        unsafe { labels.select(&self.gpu, self.pools.of_group(0), &image, of, list, (start, stream)) }?;
        self.stage.start.launched(capturing);
        Ok(())
    }

    /// Supports 16-bit pools, with or without labels, except latent rows.
    ///
    /// # Errors
    /// The errors of attention, and [`CudaError::Lists`] for pools without a kernel over lists.
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
        self.attend_rows(plan, layer, (attend, Some(selection)), queries, out, lse)
    }
}

impl Cuda {
    /// Checks that the pool supports lists, and that the lists fit a plan and belong to the device.
    pub(super) fn check_selection(
        &self,
        plan: &BatchPlan<'_>,
        selection: &Selection<DeviceRows<'_>>,
    ) -> Result<(), CudaError> {
        check_pool(selection.top, self.pools.of_group(0).layout(), self.tables.longest_row())?;
        self.gpu.check_same(selection.positions.device)?;
        let lists = plan.rows.len() * self.pools.of_group(0).layout().kv_heads() as usize;
        let (extent, top) = (&selection.positions.extent, selection.top as usize);
        check_packed(Operand::Selection, extent, lists, top, Element::Position)
    }

    /// Resolves the positions of a selection to slots for a variant's kernel, which must be launched later.
    ///
    /// # Safety
    /// The lists were checked, and `params` belong to the staged plan.
    pub(super) unsafe fn resolve(
        &mut self,
        index: usize,
        params: AttendParams,
        selection: &Selection<DeviceRows<'_>>,
    ) -> Result<(), CudaError> {
        let stream = self.stream.raw();
        let buffers = self.variants.lists(index).expect("the variant is over lists");
        let lists = params.batch * params.kv_heads;
        let params = SelectParams {
            attend: params,
            positions: selection.positions.extent.address,
            listed: buffers.listed.address(),
            counts: buffers.counts.address(),
            top: selection.top,
            ..SelectParams::default()
        };
        let capturing = raw::is_capturing(stream)?;
        let start = self.stage.start.first(capturing);
        let (grid, block) = ((lists, 1), (RESOLVE_SELECTION.threads(), 1));
        // SAFETY: the caller guarantees the addresses; the buffers have space for the rows of every step.
        unsafe { self.gpu.launch(RESOLVE_SELECTION, grid, block, stream, &params, start) }?;
        self.stage.start.launched(capturing);
        Ok(())
    }
}
