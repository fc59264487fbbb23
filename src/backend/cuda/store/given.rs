//! K and V in memory that the host allocated: its form, and the checks that keep every slot inside it.

use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::region::DeviceRegion;
use crate::backend::cuda::error::{CudaError, GivenError, Limit};
use crate::backend::cuda::kernels::params::KV_HEADS_MAX;
use crate::layout::{Plane, PlaneName, PoolLayout};

/// Multiple of every address, stride and head, in bytes: kernels load 16 bytes at a time.
const ALIGN: u64 = 16;
/// The planes of a layer, in the order of [`GivenPool::layers`].
const PLANES: [PlaneName; 2] = [PlaneName::K, PlaneName::V];

/// K or V of one layer in a [`GivenPool`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GivenPlane {
    /// Index in [`GivenPool::regions`].
    pub region: usize,
    /// First byte of page 0, slot 0, head 0 in the region.
    pub origin: u64,
}

/// A pool in memory that the host allocated, for [`CudaOptions::pool`](crate::backend::cuda::CudaOptions::pool). Head h
/// of slot s of page p of a plane begins at `origin + p * page + s * slot + h * head`, and is contiguous. All planes
/// have the same strides, because kernels take one set.
///
/// The pool has planes K and V alone, of one shape: no latent rows, labels or scales by token, no groups with their own
/// shapes, and no states. Addresses, strides and heads are multiples of 16 bytes. The config's
/// [`Layout`](crate::layout::Layout) then has no meaning, and swap pages still belong to the backend.
#[derive(Clone, Debug)]
pub struct GivenPool {
    /// The memory. Layers may share a region.
    pub regions: Vec<DeviceRegion>,
    /// K and V of each layer. In a pool with groups, of each layer of group 0, whose pages other groups share.
    pub layers: Vec<[GivenPlane; 2]>,
    /// Bytes from page to page.
    pub page: u64,
    /// Bytes from slot to slot in a page.
    pub slot: u64,
    /// Bytes from head to head.
    pub head: u64,
}

impl GivenPool {
    /// Describes tensors of K and of V for each layer, `[pages, page_size, kv_heads, head_dim]`.
    pub fn nhd(layout: &PoolLayout, layers: Vec<[DeviceRegion; 2]>) -> Self {
        let (head_bytes, heads, slots) = sizes(layout);
        Self::tensors(layers, [heads * slots * head_bytes, heads * head_bytes, head_bytes])
    }

    /// Describes tensors of K and of V for each layer, `[pages, kv_heads, page_size, head_dim]`.
    pub fn hnd(layout: &PoolLayout, layers: Vec<[DeviceRegion; 2]>) -> Self {
        let (head_bytes, heads, slots) = sizes(layout);
        Self::tensors(layers, [heads * slots * head_bytes, head_bytes, slots * head_bytes])
    }

    /// Describes one allocation, `[pages, layers, K and V, page_size, kv_heads, head_dim]`.
    pub fn page_layer_plane(layout: &PoolLayout, region: DeviceRegion) -> Self {
        let (head_bytes, heads, slots) = sizes(layout);
        let plane = heads * slots * head_bytes;
        let planes = 2 * u64::from(layout.lanes());
        let of = |index| GivenPlane { region: 0, origin: index * plane };
        let layers = (0..planes / 2).map(|layer| [of(2 * layer), of(2 * layer + 1)]).collect();
        let (page, slot, head) = (planes * plane, heads * head_bytes, head_bytes);
        Self { regions: vec![region], layers, page, slot, head }
    }

    fn tensors(layers: Vec<[DeviceRegion; 2]>, [page, slot, head]: [u64; 3]) -> Self {
        let of = |region| GivenPlane { region, origin: 0 };
        let planes = (0..layers.len()).map(|layer| [of(2 * layer), of(2 * layer + 1)]).collect();
        Self { regions: layers.into_iter().flatten().collect(), layers: planes, page, slot, head }
    }

    /// Returns the device address of a lane's K or V. The planes have been checked.
    pub(in crate::backend::cuda) fn address(&self, plane: GivenPlane) -> u64 {
        self.regions[plane.region].address() + plane.origin
    }

    /// Checks that the memory is the device's, and that every head of every slot is in its region and shares no byte
    /// with another. O(layers^2).
    pub(in crate::backend::cuda) fn check(&self, gpu: &Gpu, layout: &PoolLayout) -> Result<(), CudaError> {
        if !layout.has_one_shape() {
            return Err(GivenError::Shapes { groups: layout.groups().count() }.into());
        }
        if layout.state().is_some() {
            return Err(GivenError::States.into());
        }
        let planes = layout.planes();
        if !planes.iter().map(|plane| plane.name).eq(PLANES) {
            return Err(GivenError::Planes { planes: planes.len() }.into());
        }
        if self.layers.len() != layout.lanes() as usize {
            return Err(GivenError::Layers { actual: self.layers.len(), wanted: layout.lanes() }.into());
        }
        let grid = self.grid(layout)?;
        self.regions.iter().try_for_each(|region| region.check(gpu))?;
        let mut earlier: Vec<(u64, u32, PlaneName)> = Vec::with_capacity(2 * self.layers.len());
        for (layer, planes) in (0..).zip(&self.layers) {
            for (&place, plane) in planes.iter().zip(PLANES) {
                let start = self.start(place, &grid, (layer, plane))?;
                let meets = |other: &&(u64, _, _)| grid.meets(i128::from(start) - i128::from(other.0));
                if let Some(&(_, other, of)) = earlier.iter().find(meets) {
                    return Err(GivenError::Overlap { layers: [other, layer], planes: [of, plane] }.into());
                }
                earlier.push((start, layer, plane));
            }
        }
        Ok(())
    }

    /// Returns the device address of a plane that ends in its region.
    fn start(&self, place: GivenPlane, grid: &Grid, (layer, plane): (u32, PlaneName)) -> Result<u64, CudaError> {
        let GivenPlane { region, origin } = place;
        let found = self.regions.get(region).ok_or(GivenError::Region { region, regions: self.regions.len() })?;
        let (end, bytes) = (u128::from(origin) + grid.bytes(), found.bytes());
        if end > bytes.into() {
            return Err(GivenError::End { layer, plane, end: saturated(end), bytes }.into());
        }
        let start = found.address() + origin;
        aligned(start).map(|()| start)
    }

    /// Returns the heads of a plane, if their strides nest.
    fn grid(&self, layout: &PoolLayout) -> Result<Grid, CudaError> {
        let (head_bytes, heads, slots) = sizes(layout);
        if !head_bytes.is_multiple_of(ALIGN) {
            return Err(GivenError::HeadBytes { bytes: head_bytes }.into());
        }
        [self.page, self.slot, self.head].into_iter().try_for_each(aligned)?;
        let wide = [self.slot, self.head].into_iter().find(|&stride| stride > u32::MAX.into());
        if let Some(stride) = wide {
            return Err(GivenError::WideStride { stride }.into());
        }
        if self.head != head_bytes {
            // A store launches a row of CTAs for each head.
            Limit::KvHeads.check(heads, KV_HEADS_MAX.into())?;
        }
        let pages = u64::from(layout.page_count());
        let mut axes = [(self.page, pages), (self.slot, slots), (self.head, heads)];
        axes.sort_by_key(|&(stride, count)| (count > 1, stride));
        let mut grid = Grid { axes, head_bytes };
        for (axis, (stride, count)) in axes.into_iter().enumerate() {
            let inner = grid.inner(axis);
            if count > 1 && u128::from(stride) < inner {
                return Err(GivenError::Stride { stride, bytes: saturated(inner) }.into());
            }
        }
        // Axes of one item have no stride that kernels use.
        grid.axes.iter_mut().filter(|axis| axis.1 <= 1).for_each(|axis| axis.0 = 0);
        Ok(grid)
    }
}

/// Returns the bytes of a head, the number of heads, and the slots of a page.
fn sizes(layout: &PoolLayout) -> (u64, u64, u64) {
    let head_bytes = layout.planes().first().map_or(0, Plane::head_bytes);
    (head_bytes, layout.kv_heads().into(), layout.page_size().into())
}

fn saturated(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

fn aligned(value: u64) -> Result<(), CudaError> {
    if value.is_multiple_of(ALIGN) { Ok(()) } else { Err(GivenError::Alignment { value }.into()) }
}

/// The heads of a plane: three axes, each a stride and a count of at least 1, by rising strides. A stride is at least
/// the bytes of all axes before it.
#[derive(Clone, Copy, Debug)]
struct Grid {
    axes: [(u64, u64); 3],
    head_bytes: u64,
}

impl Grid {
    /// Returns the bytes from the first byte to the end of the axes before `axis`: below 2^98.
    fn inner(&self, axis: usize) -> u128 {
        let steps = self.axes[..axis].iter().map(|&(stride, count)| u128::from(stride) * u128::from(count - 1));
        u128::from(self.head_bytes) + steps.sum::<u128>()
    }

    /// Returns the bytes from the first byte to the last.
    fn bytes(&self) -> u128 {
        self.inner(self.axes.len())
    }

    /// Returns whether this grid and the same grid `distance` bytes further have bytes in common.
    fn meets(&self, distance: i128) -> bool {
        self.meets_from(self.axes.len(), distance)
    }

    /// Compares the inner axes: of the differences of steps along an axis, only the two nearest to the distance can
    /// bring the inner bytes together, because a stride is at least as long as the inner bytes.
    fn meets_from(&self, axes: usize, distance: i128) -> bool {
        if distance.unsigned_abs() >= self.inner(axes) {
            return false;
        }
        let Some(axis) = axes.checked_sub(1) else { return true };
        let (stride, count) = (i128::from(self.axes[axis].0), i128::from(self.axes[axis].1));
        if stride == 0 {
            return self.meets_from(axis, distance);
        }
        let near = distance.div_euclid(stride);
        (near..near + 2).filter(|step| step.abs() < count).any(|step| self.meets_from(axis, distance - step * stride))
    }
}

#[cfg(test)]
mod tests;
