//! Matrix products with what stands before and after them, each in the way that was measured to be fastest for its
//! number of rows: by cublasLt with one of the algorithms that it proposes, or, for a few rows, by `ptx/skinny.cu`, which
//! takes norm, addition and activation along.
//!
//! A way is chosen when a number of rows is first met, and kept. Numbers of rows are rounded up to a few sizes: rows past
//! the step's hold what earlier steps left there, and nobody reads what comes of them.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::size_of;
use std::ptr::from_ref;

use cudarc::cublaslt::{result, sys};
use kvarena::backend::cuda::{CudaEvent, DeviceBuffer};

use super::device::Device;
use super::error::GpuError;
use super::kernels::{NormParams, SKINNY, SiluMulParams, SkinnyMode, SkinnyParams};

const WORKSPACE_BYTES: usize = 64 << 20;
/// Algorithms asked of cublasLt for numbers of rows that are tuned.
const ALGORITHMS: usize = 8;
/// Up to so many rows the skinny kernels serve.
const SKINNY_ROWS: usize = 16;
/// Beyond so many rows the first algorithm that cublasLt proposes is taken.
const TUNED_ROWS: usize = 512;
/// Layers whose weights a measurement goes through, so that they do not stay in the cache.
const TUNED_LAYERS: usize = 12;
/// Most bytes of the next product's matrix that are fetched ahead: a few microseconds of memory's time.
pub(super) const AHEAD_BYTES: usize = 16 << 20;
/// Launches of a way, of which the fastest counts.
const REPEATS: usize = 8;

/// The products of a model.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    /// Norm, then q, k and v.
    Qkv,
    /// Attention's output, added to x.
    Out,
    /// Norm, then gate and up, then silu(gate) * up.
    GateUp,
    /// The MLP's output, added to x.
    Down,
    /// Norm of the rows that draws name, then logits.
    Logits,
}

/// What a product is of.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// The matrix.
    pub weight: u64,
    /// Rows to multiply with.
    pub x: u64,
    /// Rows to write, or to add to.
    pub y: u64,
    /// The norm's weight; 0: x is normed already, or is not to be.
    pub norm: u64,
    /// The draws that name rows of x; 0: all rows.
    pub draws: u64,
    /// Scratch for normed rows.
    pub normed: u64,
    /// Scratch for gate and up.
    pub gate_up: u64,
    /// Address and bytes of what the next product reads first.
    pub next: (u64, usize),
}

/// A product's widths: columns of y and of x.
#[derive(Clone, Copy, Debug)]
pub struct Widths {
    /// Of y; of gate and up: of each.
    pub outs: usize,
    /// Of x.
    pub ins: usize,
}

/// A product of cublasLt, planned.
#[derive(Clone, Copy, Debug)]
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    /// Of the weight, x and y; made once, kept until the program ends.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    beta: f32,
}

/// A way to make a product.
#[derive(Clone, Copy, Debug)]
enum Way {
    CublasLt(Plan),
    /// A kernel of [`SKINNY`].
    Skinny(usize),
}

/// How ways are chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Choice {
    /// The fastest, measured.
    #[default]
    Fastest,
    /// cublasLt's first proposal: the same in every run.
    First,
    /// A skinny kernel where one fits: the same in every run.
    Skinny,
}

/// The products of one model, and how each is made.
#[derive(Debug)]
pub struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceBuffer,
    ways: HashMap<(Op, usize), Way>,
    eps: f32,
    choice: Choice,
}

/// The rows that a product is made of for so many tokens.
pub fn padded_rows(tokens: usize) -> usize {
    const SIZES: [usize; 21] =
        [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512];
    match SIZES.iter().find(|&&size| size >= tokens) {
        Some(&size) => size,
        None => tokens.next_multiple_of(256),
    }
}

fn lt(call: &'static str, error: result::CublasError) -> GpuError {
    GpuError::CublasLt { call, status: error.0 as u32 }
}

impl Products {
    /// No product yet.
    ///
    /// # Errors
    /// cublasLt's, or no memory.
    pub fn new(device: &Device, eps: f32, choice: Choice) -> Result<Self, GpuError> {
        let handle = result::create_handle().map_err(|e| lt("cublasLtCreate", e))?;
        let workspace = device.zeros(WORKSPACE_BYTES)?;
        Ok(Self { handle, workspace, ways: HashMap::new(), eps, choice })
    }

    /// Whether a product of so many rows has its way.
    pub fn is_planned(&self, op: Op, tokens: usize) -> bool {
        self.ways.contains_key(&(op, padded_rows(tokens)))
    }

    /// Chooses the way of a product of so many rows, unless it is chosen. `operands` are those of each layer; what they
    /// write is spoiled.
    ///
    /// # Errors
    /// cublasLt knows no way, or something failed.
    pub fn plan(
        &mut self,
        device: &Device,
        op: Op,
        widths: Widths,
        tokens: usize,
        operands: &[Operands],
    ) -> Result<(), GpuError> {
        let rows = padded_rows(tokens);
        if self.ways.contains_key(&(op, rows)) {
            return Ok(());
        }
        let tune = self.choice == Choice::Fastest && rows <= TUNED_ROWS;
        let mut ways = self.cublaslt_ways(op, widths, rows, if tune { ALGORITHMS } else { 1 })?;
        let skinny = skinny_ways(op, widths, rows);
        match self.choice {
            Choice::Fastest if tune => ways.extend(skinny),
            Choice::Skinny if !skinny.is_empty() => {
                ways = vec![skinny[(op as usize + rows) % skinny.len()]]; // each now and then
            }
            _ => {}
        }
        let mut best = (f32::INFINITY, None);
        for &way in &ways {
            if ways.len() == 1 {
                best.1 = Some(way);
                break;
            }
            let layers = &operands[..operands.len().min(TUNED_LAYERS)];
            // An algorithm that fails is one not to take.
            let time = self.measure(device, op, widths, rows, way, layers);
            let time = time.unwrap_or(f32::INFINITY);
            if time < best.0 {
                best = (time, Some(way));
            }
        }
        let way = best.1.ok_or(GpuError::NoProduct { shape: [rows, widths.outs, widths.ins] })?;
        if ways.len() == 1 {
            // Kernels are loaded when they are first launched, which is not to be in a capture.
            // SAFETY: the caller hands over operands for that many rows.
            unsafe { self.run_way(device, op, widths, rows, way, operands[0]) }?;
        }
        self.ways.insert((op, rows), way);
        Ok(())
    }

    /// The name of the way of a product, for reports.
    pub fn way(&self, op: Op, tokens: usize) -> &'static str {
        match self.ways.get(&(op, padded_rows(tokens))) {
            Some(Way::CublasLt(_)) => "cublasLt",
            Some(Way::Skinny(kernel)) => SKINNY[*kernel].0,
            None => "none",
        }
    }

    /// Asks for a product that was planned.
    ///
    /// # Errors
    /// The driver's or cublasLt's.
    ///
    /// # Panics
    /// If it was not planned.
    ///
    /// # Safety
    /// The operands are valid for [`padded_rows`] of `tokens` rows of these widths until the work is done.
    pub unsafe fn run(
        &self,
        device: &Device,
        op: Op,
        widths: Widths,
        tokens: usize,
        operands: Operands,
    ) -> Result<(), GpuError> {
        let way = self.ways[&(op, padded_rows(tokens))];
        // SAFETY: the caller's.
        unsafe { self.run_way(device, op, widths, tokens, way, operands) }
    }

    /// # Safety
    /// As [`Products::run`].
    unsafe fn run_way(
        &self,
        device: &Device,
        op: Op,
        Widths { outs, ins }: Widths,
        tokens: usize,
        way: Way,
        operands: Operands,
    ) -> Result<(), GpuError> {
        let Operands { weight, mut x, mut y, norm, draws, normed, gate_up, next } = operands;
        let (next, next_bytes) = next;
        let (kernels, stream) = (&device.kernels, device.raw());
        let plan = match way {
            Way::CublasLt(plan) => plan,
            Way::Skinny(kernel) => {
                let tiles = SKINNY[kernel].1;
                let mode = match op {
                    Op::Qkv | Op::Logits => SkinnyMode::Set,
                    Op::Out | Op::Down => SkinnyMode::Add,
                    Op::GateUp => SkinnyMode::Silu,
                };
                let params = SkinnyParams {
                    weight,
                    x,
                    y,
                    norm,
                    draws,
                    outs: outs as u32,
                    ins: ins as u32,
                    tokens: tokens as u32,
                    mode: mode as u32,
                    eps: self.eps,
                    next,
                    next_lines: (next_bytes / 128) as u32,
                };
                let taken = if op == Op::GateUp { 4 * tiles } else { 8 * tiles };
                let grid = ((outs / taken) as u32, 1);
                // SAFETY: the way was found to fit (`skinny_ways`); the caller answers for the operands.
                return unsafe { kernels.skinny[kernel].launch(stream, grid, 256, &params) };
            }
        };
        if norm != 0 {
            let params =
                NormParams { x, weight: norm, normed, draws, hidden: ins as u32, eps: self.eps };
            // SAFETY: widths were checked when the forward pass was made; the caller answers for the operands.
            unsafe {
                let block = (ins / 8).next_multiple_of(32) as u32;
                kernels.rms_norm.launch(stream, (tokens as u32, 1), block, &params)
            }?;
            x = normed;
        }
        if op == Op::GateUp {
            y = gate_up;
        }
        // SAFETY: the caller's.
        unsafe { self.multiply(&plan, weight, x, y, stream) }?;
        if op == Op::GateUp {
            let params =
                SiluMulParams { gate_up, out: operands.y, width: outs as u32, reserved: 0 };
            let grid = ((outs / 8).div_ceil(128) as u32, tokens as u32);
            // SAFETY: as above.
            unsafe { kernels.silu_mul.launch(stream, grid, 128, &params) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`Products::run`].
    unsafe fn multiply(
        &self,
        plan: &Plan,
        weight: u64,
        x: u64,
        y: u64,
        stream: u64,
    ) -> Result<(), GpuError> {
        let [weights, xs, ys] = plan.layouts;
        let pointer = |address: u64| address as usize as *mut c_void;
        let alpha = 1.0_f32;
        // SAFETY: handle, description and layouts live; the algorithm was proposed for them with this workspace; the
        // caller answers for the addresses.
        let result = unsafe {
            result::matmul(
                self.handle,
                plan.description,
                from_ref(&alpha).cast(),
                from_ref(&plan.beta).cast(),
                pointer(weight),
                weights,
                pointer(x),
                xs,
                pointer(y),
                ys,
                pointer(y),
                ys,
                &plan.algorithm,
                pointer(self.workspace.address()),
                WORKSPACE_BYTES,
                stream as usize as sys::cudaStream_t,
            )
        };
        result.map_err(|e| lt("cublasLtMatmul", e))
    }

    /// What cublasLt proposes for `y = x * weight^T`, all row-major: to it, columns are rows.
    fn cublaslt_ways(
        &self,
        op: Op,
        Widths { outs, ins }: Widths,
        rows: usize,
        most: usize,
    ) -> Result<Vec<Way>, GpuError> {
        let outs = if op == Op::GateUp { 2 * outs } else { outs };
        let (bf16, f32) = (sys::cudaDataType_t::CUDA_R_16BF, sys::cudaDataType_t::CUDA_R_32F);
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description = result::create_matmul_desc(compute, f32)
            .map_err(|e| lt("cublasLtMatmulDescCreate", e))?;
        let turned = 1_i32;
        // SAFETY: the attribute takes an i32, which lives during the call.
        unsafe {
            result::set_matmul_desc_attribute(
                description,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                from_ref(&turned).cast(),
                size_of::<i32>(),
            )
        }
        .map_err(|e| lt("cublasLtMatmulDescSetAttribute", e))?;
        let layout = |rows: usize, cols: usize| {
            result::create_matrix_layout(bf16, rows as u64, cols as u64, rows as i64)
                .map_err(|e| lt("cublasLtMatrixLayoutCreate", e))
        };
        let layouts = [layout(ins, outs)?, layout(ins, rows)?, layout(outs, rows)?];
        let preference =
            result::create_matmul_pref().map_err(|e| lt("cublasLtMatmulPreferenceCreate", e))?;
        let bytes = WORKSPACE_BYTES;
        // SAFETY: the attribute takes a size, which lives during the call.
        unsafe {
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                from_ref(&bytes).cast(),
                size_of::<usize>(),
            )
        }
        .map_err(|e| lt("cublasLtMatmulPreferenceSetAttribute", e))?;
        // SAFETY: all bit patterns are valid for these plain numbers.
        let empty = || unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() };
        let mut proposed: Vec<_> = (0..most).map(|_| empty()).collect();
        let mut count = 0;
        let [weights, xs, ys] = layouts;
        // SAFETY: all handles live, and there is room for `most` results.
        let status = unsafe {
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                description,
                weights,
                xs,
                ys,
                ys,
                preference,
                most as i32,
                proposed.as_mut_ptr(),
                &mut count,
            );
            let _ = result::destroy_matmul_pref(preference);
            status
        };
        status.result().map_err(|e| lt("cublasLtMatmulAlgoGetHeuristic", e))?;
        if count == 0 {
            return Err(GpuError::NoProduct { shape: [rows, outs, ins] });
        }
        let beta = if matches!(op, Op::Out | Op::Down) { 1.0 } else { 0.0 };
        let plan = |algorithm| Way::CublasLt(Plan { description, layouts, algorithm, beta });
        Ok(proposed[..count as usize].iter().map(|found| plan(found.algo)).collect())
    }

    /// Milliseconds of a way over some layers, as a graph: the least of a few.
    fn measure(
        &self,
        device: &Device,
        op: Op,
        widths: Widths,
        rows: usize,
        way: Way,
        layers: &[Operands],
    ) -> Result<f32, GpuError> {
        let all = || {
            // Once for each layer; logits have but one matrix, which is larger than the cache in any model of size.
            layers.iter().try_for_each(|&operands| {
                // SAFETY: the caller of `plan` hands over operands for that many rows.
                unsafe { self.run_way(device, op, widths, rows, way, operands) }
            })
        };
        // Outside of a capture first: kernels are loaded when they are first launched.
        all()?;
        device.stream.synchronize()?;
        let graph = device.stream.capture(all)?;
        let mut best = f32::INFINITY;
        let (mut begun, mut done) =
            (CudaEvent::new(&device.gpu, true)?, CudaEvent::new(&device.gpu, true)?);
        for _ in 0..REPEATS {
            begun.record(&device.stream)?;
            // SAFETY: operands and weights live, and nothing of kvarena's is in the graph.
            unsafe { graph.launch(&device.stream) }?;
            done.record(&device.stream)?;
            done.synchronize()?;
            best = best.min(done.elapsed_ms(&begun)?);
        }
        Ok(best)
    }
}

/// The skinny kernels that can make a product.
fn skinny_ways(op: Op, Widths { outs, ins }: Widths, rows: usize) -> Vec<Way> {
    if rows > SKINNY_ROWS || !ins.is_multiple_of(64) {
        return Vec::new();
    }
    let fits = |&kernel: &usize| match (op, SKINNY[kernel].1) {
        (Op::GateUp, tiles) => tiles > 1 && outs.is_multiple_of(4 * tiles),
        (_, tiles) => outs.is_multiple_of(8 * tiles),
    };
    (0..SKINNY.len()).filter(fits).map(Way::Skinny).collect()
}
