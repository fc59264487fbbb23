//! Tensor maps of layers of latent rows, through which the TMA loads boxes of rows.

use std::ffi::c_void;
use std::sync::OnceLock;

use crate::backend::cuda::driver::sys;
use crate::backend::cuda::error::{CudaError, check};
use crate::backend::cuda::kernels::params::{RowBoxes, TensorMap};
use crate::backend::cuda::store::pool::Pool;
use crate::id::LayerId;
use crate::layout::{Dtype, PoolLayout};

/// Columns of a box: 128 bytes, the width of the swizzle.
const COLUMNS: u32 = 64;
/// Minimum and maximum rows of a box. The maximum is half of a tile's rows.
const ROWS_LEAST: u32 = 8;
const ROWS_MOST: u32 = 32;

type Encode = unsafe extern "C" fn(
    map: *mut TensorMap,
    kind: u32,
    dims: u32,
    address: *mut c_void,
    sizes: *const u64,
    strides: *const u64,
    window: *const u32,
    steps: *const u32,
    interleave: u32,
    swizzle: u32,
    promotion: u32,
    fill: u32,
) -> u32;

/// `CU_TENSOR_MAP_DATA_TYPE_FLOAT16` and `_BFLOAT16`.
const FLOAT16: u32 = 6;
const BFLOAT16: u32 = 9;
/// `CU_TENSOR_MAP_SWIZZLE_128B`, `CU_TENSOR_MAP_L2_PROMOTION_L2_128B`.
const SWIZZLE_128B: u32 = 3;
const PROMOTION_128B: u32 = 2;

/// Returns `cuTensorMapEncodeTiled`, which `cust::sys` does not declare.
fn encode() -> Result<Encode, CudaError> {
    static FOUND: OnceLock<Option<Encode>> = OnceLock::new();
    let find = || {
        let found = sys::find_function(c"cuTensorMapEncodeTiled", 12_000)?;
        // SAFETY: the driver documents this signature of cuTensorMapEncodeTiled since CUDA 12.0.
        Some(unsafe { std::mem::transmute::<*mut c_void, Encode>(found) })
    };

    FOUND.get_or_init(find).ok_or(CudaError::Driver { call: "cuTensorMapEncodeTiled", code: 500 })
}

/// Returns the number of rows of a box: a power of two that divides the page size. Returns 0 if the largest such power
/// is below the minimum.
pub fn rows(layout: &PoolLayout) -> u32 {
    let most = 1 << layout.page_size().trailing_zeros();
    if most < ROWS_LEAST { 0 } else { most.min(ROWS_MOST) }
}

/// Returns the boxes of a layer of the pool.
pub fn of_layer(pool: &Pool, layer: LayerId) -> Result<RowBoxes, CudaError> {
    let (layout, strides) = (pool.layout(), pool.strides());
    let rows = rows(layout);
    if rows == 0 {
        return Ok(RowBoxes::default());
    }
    let [origin, _] = pool.origins(layer)?;
    let kind = if pool.rows() == Dtype::F16 { FLOAT16 } else { BFLOAT16 };
    let sizes = [layout.head_dim(), layout.page_size(), layout.page_count()].map(u64::from);
    let strides = [strides.slot, strides.page];
    let (window, steps) = ([COLUMNS, rows, 1], [1_u32; 3]);
    let (address, mut map) = (origin as usize as *mut c_void, TensorMap::default());
    let encode = encode()?;
    // SAFETY: `map` has the alignment that the driver requires. The arrays outlive the call and have an element for
    // each of three dimensions (strides: one fewer).
    let result = unsafe {
        encode(
            &mut map,
            kind,
            3,
            address,
            sizes.as_ptr(),
            strides.as_ptr(),
            window.as_ptr(),
            steps.as_ptr(),
            0,
            SWIZZLE_128B,
            PROMOTION_128B,
            0,
        )
    };
    check("cuTensorMapEncodeTiled", result)?;
    Ok(RowBoxes { rows, reserved: [0; 11], map: map.words })
}
