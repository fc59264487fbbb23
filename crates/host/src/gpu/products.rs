//! Matrix products with the operations before and after them. An implementation is cublasLt with one of its proposed
//! algorithms, or a kernel that fuses norm, addition and activation: `ptx/src/skinny.cu` for up to 16 rows, on Hopper
//! `ptx/src/gemm_sm90a.cu` for up to 256. By default, a product of up to 512 rows uses the implementation that was
//! measured as the fastest for its number of rows. Products of more rows use cublasLt's first proposal, unless they are
//! also measured. [`Choice`] lists the alternatives.
//!
//! An implementation is chosen at the first use of a number of rows, and kept. Numbers of rows are rounded up to a few
//! sizes. Rows past the step's last row contain results of earlier steps. Their products change no row of the step.
//!
//! `products/tuning.rs` chooses the implementation.

mod tuning;

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::from_ref;

use cudarc::cublaslt::{result, sys};
use kvarena::backend::cuda::DeviceBuffer;

use super::device::Device;
use super::error::GpuError;
use super::gemm::{Gemm, GemmMethod};
use super::kernels::{NormParams, ProductMode, SKINNY, SiluMulParams, SkinnyParams};
use crate::config::ModelConfig;
use crate::linear::Activation;
pub use tuning::Choice;

const WORKSPACE_BYTES: usize = 64 << 20;
/// Maximum number of bytes of the next product's matrix that are prefetched: a few microseconds of memory bandwidth.
pub(super) const AHEAD_BYTES: usize = 16 << 20;

/// The products of a model.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    /// Norm, then q, k and v.
    Qkv,
    /// Norm, then the projection of a layer of Gated DeltaNet.
    Delta,
    /// The projection of the output of such a layer; see [`Op::Out`].
    DeltaOut,
    /// The projection of attention's output, added to its target if [`Products::adds`] returns true.
    Out,
    /// Norm, then gate and up, then the activation.
    GateUp,
    /// The MLP's output; see [`Op::Out`].
    Down,
    /// Norm of the rows that draws select, then logits.
    Logits,
}

/// The operands of a product.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// The matrix.
    pub weight: u64,
    /// Rows of x.
    pub x: u64,
    /// Rows to write or to add to.
    pub y: u64,
    /// The norm's weight; 0: x is already normed, or needs no norm.
    pub norm: u64,
    /// The draws that select rows of x; 0: all rows.
    pub draws: u64,
    /// Scratch for normed rows.
    pub normed: u64,
    /// Scratch for gate and up.
    pub gate_up: u64,
    /// Address of the next product's matrix, and the number of its bytes to prefetch.
    pub next: (u64, usize),
}

/// A product's widths: columns of y and of x.
#[derive(Clone, Copy, Debug)]
pub struct Widths {
    /// Columns of y. For gate and up, the columns of each.
    pub outs: usize,
    /// Columns of x.
    pub ins: usize,
}

/// A product and its operands in each layer.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// The operation.
    pub op: Op,
    /// Widths of the product.
    pub widths: Widths,
    /// Operands of each layer.
    pub operands: &'a [Operands],
}

/// A product of cublasLt with one of its algorithms.
#[derive(Clone, Copy, Debug)]
struct Proposal {
    description: sys::cublasLtMatmulDesc_t,
    /// Layouts of the weight, x and y, created once and kept until the program ends.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    beta: f32,
}

/// An implementation of a product.
#[derive(Clone, Copy, Debug)]
enum Method {
    CublasLt(Proposal),
    /// A kernel of [`SKINNY`].
    Skinny(usize),
    /// A kernel of `gemm.rs`.
    Gemm(GemmMethod),
}

/// The products of one model, and the implementation of each.
#[derive(Debug)]
pub struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceBuffer,
    methods: HashMap<(Op, usize), Method>,
    eps: f32,
    activation: Activation,
    choice: Choice,
    /// Minimum number of rows for which the output and down products are added to their target; with fewer rows they
    /// replace it. At most one of several ranks adds, so the sum of the ranks equals the result of one GPU.
    adds_from: usize,
}

/// Returns the number of rows to which products of this many tokens are padded.
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
    /// Returns products without implementations.
    pub fn new(device: &Device, config: &ModelConfig, choice: Choice, adds_from: usize) -> Result<Self, GpuError> {
        let (eps, activation) = (config.norm_eps, config.activation);
        let handle = result::create_handle().map_err(|e| lt("cublasLtCreate", e))?;
        let workspace = device.zeros(WORKSPACE_BYTES)?;
        Ok(Self { handle, workspace, methods: HashMap::new(), eps, activation, choice, adds_from })
    }

    /// Returns whether an implementation was chosen for a product of this many tokens.
    pub fn is_chosen(&self, op: Op, tokens: usize) -> bool {
        self.methods.contains_key(&(op, padded_rows(tokens)))
    }

    /// Returns the name of a product's implementation, for reports.
    pub fn method(&self, op: Op, tokens: usize) -> String {
        self.methods.get(&(op, padded_rows(tokens))).map_or("none".into(), |method| self.name_of(method))
    }

    fn name_of(&self, method: &Method) -> String {
        match method {
            Method::CublasLt(_) => "cublasLt".into(),
            Method::Skinny(kernel) => SKINNY[*kernel].0.name().into(),
            Method::Gemm(method) => method.name(),
        }
    }

    /// Submits a product.
    ///
    /// # Panics
    /// If no implementation was chosen.
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
        let method = self.methods[&(op, padded_rows(tokens))];
        // SAFETY: the caller guarantees the operands.
        unsafe { self.run_method(device, op, widths, tokens, method, operands) }
    }

    /// # Safety
    /// As [`Products::run`].
    unsafe fn run_method(
        &self,
        device: &Device,
        op: Op,
        Widths { outs, ins }: Widths,
        tokens: usize,
        method: Method,
        operands: Operands,
    ) -> Result<(), GpuError> {
        let Operands { weight, x, y, norm, draws, gate_up, next, .. } = operands;
        let (kernels, stream) = (&device.kernels, device.raw());
        let mode = self.mode_of(op, padded_rows(tokens));
        // SAFETY: the caller guarantees the operands.
        let norm_rows = || unsafe { self.norm_rows(device, ins, tokens, operands) };
        match method {
            Method::Skinny(kernel) => {
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
                    next: next.0,
                    next_lines: (next.1 / 128) as u32,
                };
                let taken = if op == Op::GateUp { 4 * tiles } else { 8 * tiles };
                let grid = ((outs / taken) as u32, 1);
                // SAFETY: the implementation was found to fit (`skinny_methods`); the caller guarantees the operands.
                unsafe { kernels.skinny[kernel].launch(stream, grid, 256, &params) }
            }
            Method::Gemm(method) => {
                // The matrices of layers contain the norm's weights, so the kernel itself can norm.
                let norm = (norm != 0 && op != Op::Logits).then_some(self.eps);
                let x = if norm.is_some() { x } else { norm_rows()? };
                let gemm = Gemm { weight, x, y, outs, ins, tokens, mode, norm };
                // SAFETY: the implementation was found to fit; the caller guarantees the operands.
                unsafe { method.launch(device, &gemm) }
            }
            Method::CublasLt(proposal) => {
                let (x, target) = (norm_rows()?, if op == Op::GateUp { gate_up } else { y });
                // SAFETY: the caller guarantees the operands.
                unsafe { self.multiply(&proposal, weight, x, target, stream) }?;
                if op != Op::GateUp {
                    return Ok(());
                }
                let params = SiluMulParams { gate_up, out: y, width: outs as u32, reserved: 0 };
                let grid = ((outs / 8).div_ceil(128) as u32, tokens as u32);
                let kernel = match self.activation {
                    Activation::GeluTanh => &kernels.gelu_mul,
                    _ => &kernels.silu_mul,
                };
                // SAFETY: as above.
                unsafe { kernel.launch(stream, grid, 128, &params) }
            }
        }
    }

    /// Norms x, if it needs a norm, and returns the address of the rows.
    ///
    /// # Safety
    /// As [`Products::run`].
    unsafe fn norm_rows(
        &self,
        device: &Device,
        ins: usize,
        tokens: usize,
        operands: Operands,
    ) -> Result<u64, GpuError> {
        let Operands { x, norm: weight, normed, draws, .. } = operands;
        if weight == 0 {
            return Ok(x);
        }
        let params = NormParams { x, weight, normed, draws, hidden: ins as u32, eps: self.eps };
        let block = (ins / 8).next_multiple_of(32) as u32;
        // SAFETY: widths were checked when the forward pass was created; the caller guarantees the operands.
        unsafe { device.kernels.rms_norm.launch(device.raw(), (tokens as u32, 1), block, &params) }?;
        Ok(normed)
    }

    /// Returns whether the output and down products of this many rows are added to their target.
    pub fn adds(&self, tokens: usize) -> bool {
        self.mode_of(Op::Down, padded_rows(tokens)) == ProductMode::Add
    }

    fn mode_of(&self, op: Op, rows: usize) -> ProductMode {
        match op {
            Op::Out | Op::DeltaOut | Op::Down if rows >= self.adds_from => ProductMode::Add,
            Op::GateUp => ProductMode::Silu,
            _ => ProductMode::Set,
        }
    }

    /// # Safety
    /// As [`Products::run`].
    unsafe fn multiply(&self, proposal: &Proposal, weight: u64, x: u64, y: u64, stream: u64) -> Result<(), GpuError> {
        let [weights, xs, ys] = proposal.layouts;
        let pointer = |address: u64| address as usize as *mut c_void;
        let alpha = 1.0_f32;
        // SAFETY: handle, description and layouts live; the algorithm was proposed for them with this workspace; the
        // caller guarantees the addresses.
        let result = unsafe {
            result::matmul(
                self.handle,
                proposal.description,
                from_ref(&alpha).cast(),
                from_ref(&proposal.beta).cast(),
                pointer(weight),
                weights,
                pointer(x),
                xs,
                pointer(y),
                ys,
                pointer(y),
                ys,
                &proposal.algorithm,
                pointer(self.workspace.address()),
                WORKSPACE_BYTES,
                stream as usize as sys::cudaStream_t,
            )
        };
        result.map_err(|e| lt("cublasLtMatmul", e))
    }
}
