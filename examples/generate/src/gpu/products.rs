//! Matrix products with what stands before and after them, each in the way that was measured to be fastest for its
//! number of rows: by cublasLt with one of the algorithms that it proposes, or by a kernel that takes norm, addition and
//! activation along: `ptx/skinny.cu` for a few rows, on Hopper `ptx/gemm_sm90a.cu` for a few dozen.
//!
//! A way is chosen when a number of rows is first met, and kept. Numbers of rows are rounded up to a few sizes: rows past
//! the step's hold what earlier steps left there, and nobody reads what comes of them.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::{discriminant, size_of};
use std::ptr::from_ref;

use cudarc::cublaslt::{result, sys};
use kvarena::backend::cuda::{CudaEvent, DeviceBuffer};

use super::device::Device;
use super::error::GpuError;
use super::gemm::{Gemm, GemmWay};
use super::kernels::{NormParams, ProductMode, SKINNY, SiluMulParams, SkinnyParams};

const WORKSPACE_BYTES: usize = 64 << 20;
/// Algorithms asked of cublasLt for numbers of rows that are tuned.
const ALGORITHMS: usize = 8;
/// Up to so many rows the skinny kernels serve.
const SKINNY_ROWS: usize = 16;
/// Beyond so many rows the first algorithm that cublasLt proposes is taken, unless there is time to choose.
const TUNED_ROWS: usize = 512;
/// Layers whose weights a measurement goes through, so that they do not stay in the cache; with more rows one is enough.
const TUNED_LAYERS: usize = 12;
/// Most bytes of the next product's matrix that are fetched ahead: a few microseconds of memory's time.
pub(super) const AHEAD_BYTES: usize = 16 << 20;
/// Rounds in which a product's ways are measured: launches of each, of which the fastest counts, and how many of each
/// kind go on.
const ROUNDS: [(usize, usize); 2] = [(1, 6), (5, 2)];
/// Launches of products in a row.
const LAUNCHES: usize = 5;

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

/// A product of each layer.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// Which.
    pub op: Op,
    /// Its widths.
    pub widths: Widths,
    /// Of each layer.
    pub operands: &'a [Operands],
}

impl Product<'_> {
    /// Layers that a measurement goes through.
    fn layers(&self, rows: usize) -> usize {
        self.operands.len().min(if rows > TUNED_ROWS { 1 } else { TUNED_LAYERS })
    }
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
    /// A kernel of `gemm.rs`.
    Gemm(GemmWay),
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
    /// One of `gemm.rs` where one fits: the same in every run.
    Gemm,
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

    /// Chooses the ways of products of so many rows that follow each other in every layer: of each alone the fastest few,
    /// of these the ones that are fastest in a row, since each begins while the one before it ends. What they write is
    /// spoiled. `unhurried`: nobody waits, so that many rows are worth choosing for, too.
    ///
    /// # Errors
    /// cublasLt knows no way, or something failed.
    pub fn plan(
        &mut self,
        device: &Device,
        tokens: usize,
        products: &[Product<'_>],
        unhurried: bool,
    ) -> Result<(), GpuError> {
        let rows = padded_rows(tokens);
        let tune = self.choice == Choice::Fastest && (unhurried || rows <= TUNED_ROWS);
        let mut lists = Vec::new();
        for &product in products {
            lists.push(self.shortlist(device, rows, product, tune)?);
        }
        let mut chosen: Vec<Way> = lists.iter().map(|list| list[0]).collect();
        let row =
            |ways: &[Way]| products.iter().copied().zip(ways.iter().copied()).collect::<Vec<_>>();
        if products.len() > 1 && lists.iter().any(|list| list.len() > 1) {
            let mut least = self.measure(device, rows, &row(&chosen), LAUNCHES)?;
            for (i, &way) in lists
                .iter()
                .enumerate()
                .flat_map(|(i, list)| list[1..].iter().map(move |way| (i, way)))
            {
                let mut other = chosen.clone();
                other[i] = way;
                let time = self.measure(device, rows, &row(&other), LAUNCHES)?;
                if time < least {
                    (least, chosen) = (time, other);
                }
            }
        }
        for (product, way) in row(&chosen) {
            // Kernels are loaded when they are first launched, which is not to be in a capture.
            // SAFETY: the caller hands over operands for that many rows.
            unsafe {
                self.run_way(device, product.op, product.widths, rows, way, product.operands[0])
            }?;
            self.ways.insert((product.op, rows), way);
        }
        Ok(())
    }

    /// The ways to make a product that are worth trying among others, the fastest first.
    fn shortlist(
        &self,
        device: &Device,
        rows: usize,
        product: Product<'_>,
        tune: bool,
    ) -> Result<Vec<Way>, GpuError> {
        let Product { op, widths, .. } = product;
        let mut ways = self.cublaslt_ways(op, widths, rows, if tune { ALGORITHMS } else { 1 })?;
        let own = match self.choice {
            Choice::First => Vec::new(),
            Choice::Fastest if !tune => Vec::new(),
            Choice::Fastest => {
                let mut own = gemm_ways(device, widths, rows);
                own.retain(|way| way.is_sensible(mode_of(op), widths.outs));
                let skinny = skinny_ways(op, widths, rows).into_iter();
                skinny.chain(own.into_iter().map(Way::Gemm)).collect()
            }
            Choice::Skinny => skinny_ways(op, widths, rows),
            Choice::Gemm => gemm_ways(device, widths, rows).into_iter().map(Way::Gemm).collect(),
        };
        match self.choice {
            Choice::Skinny | Choice::Gemm if !own.is_empty() => {
                return Ok(vec![own[(op as usize + rows) % own.len()]]); // each now and then
            }
            _ => ways.extend(own),
        }
        for (launches, left) in ROUNDS {
            if ways.len() == 1 {
                break;
            }
            let mut times: Vec<(f32, Way)> = Vec::new();
            for &way in &ways {
                // An algorithm that fails is one not to take.
                let time = self.measure(device, rows, &[(product, way)], launches);
                times.extend(time.ok().map(|time| (time, way)));
            }
            times.sort_by(|a, b| a.0.total_cmp(&b.0));
            ways.clear();
            for (_, way) in times {
                let kind = discriminant(&way);
                if ways.iter().filter(|way| discriminant(*way) == kind).count() < left {
                    ways.push(way);
                }
            }
        }
        let shape = [rows, widths.outs, widths.ins];
        if ways.is_empty() { Err(GpuError::NoProduct { shape }) } else { Ok(ways) }
    }

    /// The name of the way of a product, for reports.
    pub fn way(&self, op: Op, tokens: usize) -> String {
        self.ways.get(&(op, padded_rows(tokens))).map_or("none".into(), |way| self.name_of(way))
    }

    fn name_of(&self, way: &Way) -> String {
        match way {
            Way::CublasLt(_) => "cublasLt".into(),
            Way::Skinny(kernel) => SKINNY[*kernel].0.into(),
            Way::Gemm(way) => way.name(),
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
        let mode = mode_of(op);
        if let Way::Skinny(kernel) = way {
            let tiles = SKINNY[kernel].1;
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
        // Of layers the norm's weights stand in the matrix, so that the kernel can norm by itself.
        let norms_itself = norm != 0 && op != Op::Logits && matches!(way, Way::Gemm(_));
        if norm != 0 && !norms_itself {
            let params =
                NormParams { x, weight: norm, normed, draws, hidden: ins as u32, eps: self.eps };
            // SAFETY: widths were checked when the forward pass was made; the caller answers for the operands.
            unsafe {
                let block = (ins / 8).next_multiple_of(32) as u32;
                kernels.rms_norm.launch(stream, (tokens as u32, 1), block, &params)
            }?;
            x = normed;
        }
        let plan = match way {
            Way::CublasLt(plan) => plan,
            Way::Gemm(way) => {
                let norm = norms_itself.then_some(self.eps);
                let gemm = Gemm { weight, x, y, outs, ins, tokens, mode, norm };
                // SAFETY: the way was found to fit; the caller answers for the operands.
                return unsafe { way.launch(device, &gemm) };
            }
            Way::Skinny(_) => unreachable!("done above"),
        };
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

    /// Milliseconds of products in a row over some layers, as a graph: the least of a few.
    fn measure(
        &self,
        device: &Device,
        rows: usize,
        row: &[(Product<'_>, Way)],
        launches: usize,
    ) -> Result<f32, GpuError> {
        let all = || {
            // Once for each layer; logits have but one matrix, which is larger than the cache in any model of size.
            for layer in 0..row[0].0.layers(rows) {
                for &(Product { op, widths, operands }, way) in row {
                    // SAFETY: the caller of `plan` hands over operands for that many rows.
                    unsafe { self.run_way(device, op, widths, rows, way, operands[layer]) }?;
                }
            }
            Ok::<_, GpuError>(())
        };
        // Outside of a capture first: kernels are loaded when they are first launched.
        all()?;
        device.stream.synchronize()?;
        let graph = device.stream.capture(all)?;
        let mut best = f32::INFINITY;
        let (mut begun, mut done) =
            (CudaEvent::new(&device.gpu, true)?, CudaEvent::new(&device.gpu, true)?);
        for _ in 0..launches {
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

fn mode_of(op: Op) -> ProductMode {
    match op {
        Op::Qkv | Op::Logits => ProductMode::Set,
        Op::Out | Op::Down => ProductMode::Add,
        Op::GateUp => ProductMode::Silu,
    }
}

fn gemm_ways(device: &Device, Widths { outs, ins }: Widths, rows: usize) -> Vec<GemmWay> {
    match device.kernels.gemm.is_empty() {
        true => Vec::new(),
        false => GemmWay::all(outs, ins, rows),
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
