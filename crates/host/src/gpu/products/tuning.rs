//! Chooses the implementations of products. Candidates are measured alone, and then in sequence with their neighbours.
//!
//! `products.rs` computes a product.

use std::mem::{discriminant, size_of};
use std::ptr::from_ref;

use cudarc::cublaslt::{result, sys};
use kvarena::backend::cuda::CudaEvent;

use super::{Method, Op, Product, Products, Proposal, WORKSPACE_BYTES, Widths, lt, padded_rows};
use crate::gpu::device::Device;
use crate::gpu::error::GpuError;
use crate::gpu::gemm::GemmMethod;
use crate::gpu::kernels::{ProductMode, SKINNY};
use crate::linear::Activation;

/// Number of algorithms requested from cublasLt for a product that is tuned.
const ALGORITHMS: usize = 8;
/// Maximum number of rows of the skinny kernels.
const SKINNY_ROWS: usize = 16;
/// Maximum number of rows of a product that is tuned. Products of more rows use the first algorithm of cublasLt, unless
/// the caller of [`Products::choose`] is `unhurried`.
const TUNED_ROWS: usize = 512;
/// Number of layers over which a product is measured, if the model has as many; their weights exceed the cache.
/// Products of more than [`TUNED_ROWS`] rows are measured over one layer.
const TUNED_LAYERS: usize = 12;
/// Rounds that measure a product's candidates: the number of launches of each candidate, and the number of candidates
/// of each kind that the round keeps. The fastest launch of a candidate counts.
const ROUNDS: [(usize, usize); 2] = [(1, 6), (5, 2)];
/// Number of launches when products are measured in sequence.
const LAUNCHES: usize = 5;

/// The rule that chooses implementations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Choice {
    /// The implementation that was measured as the fastest.
    #[default]
    Fastest,
    /// cublasLt's first proposal, which is the same in every run.
    First,
    /// A skinny kernel if one fits, the same in every run.
    Skinny,
    /// A kernel of `gemm.rs` if one fits, the same in every run.
    Gemm,
}

impl Product<'_> {
    /// Returns the number of layers that a measurement reads.
    fn layers(&self, rows: usize) -> usize {
        self.operands.len().min(if rows > TUNED_ROWS { 1 } else { TUNED_LAYERS })
    }
}

impl Products {
    /// Chooses the implementations of products of this many rows that follow each other in every layer. Tuning measures
    /// each product alone and keeps a few fast candidates. It then measures the candidates in sequence, because a
    /// product starts before its predecessor has ended. [`Choice::Fastest`] tunes products of up to 512 rows, or of any
    /// number of rows if `unhurried`. Overwrites the products' outputs.
    ///
    /// # Errors
    /// cublasLt has no algorithm, or a call failed.
    pub fn choose(
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
        let mut chosen: Vec<Method> = lists.iter().map(|list| list[0]).collect();
        let sequence = |methods: &[Method]| products.iter().copied().zip(methods.iter().copied()).collect::<Vec<_>>();
        if products.len() > 1 && lists.iter().any(|list| list.len() > 1) {
            let mut least = self.measure(device, rows, &sequence(&chosen), LAUNCHES)?;
            for (i, &method) in
                lists.iter().enumerate().flat_map(|(i, list)| list[1..].iter().map(move |method| (i, method)))
            {
                let mut other = chosen.clone();
                other[i] = method;
                let time = self.measure(device, rows, &sequence(&other), LAUNCHES)?;
                if time < least {
                    (least, chosen) = (time, other);
                }
            }
        }
        for (product, method) in sequence(&chosen) {
            // A first launch moves the kernel to the device, which must not happen in a capture.
            // SAFETY: the caller passes operands for that many rows.
            unsafe { self.run_method(device, product.op, product.widths, rows, method, product.operands[0]) }?;
            self.methods.insert((product.op, rows), method);
        }
        Ok(())
    }

    /// Returns the candidates for a product, the fastest first.
    fn shortlist(
        &self,
        device: &Device,
        rows: usize,
        product: Product<'_>,
        tune: bool,
    ) -> Result<Vec<Method>, GpuError> {
        let Product { op, widths, .. } = product;
        let mut methods = self.cublaslt_methods(op, widths, rows, if tune { ALGORITHMS } else { 1 })?;
        let own = match self.choice {
            Choice::First => Vec::new(),
            // The kernels that fuse the activation support only SiLU.
            _ if op == Op::GateUp && self.activation != Activation::Silu => Vec::new(),
            Choice::Fastest if !tune => Vec::new(),
            Choice::Fastest => {
                let mut own = gemm_methods(device, widths, rows);
                own.retain(|method| method.is_sensible(self.mode_of(op, rows), widths.outs));
                let skinny = skinny_methods(op, widths, rows).into_iter();
                skinny.chain(own.into_iter().map(Method::Gemm)).collect()
            }
            Choice::Skinny => skinny_methods(op, widths, rows),
            Choice::Gemm => gemm_methods(device, widths, rows).into_iter().map(Method::Gemm).collect(),
        };
        match self.choice {
            Choice::Skinny | Choice::Gemm if !own.is_empty() => {
                return Ok(vec![own[(op as usize + rows) % own.len()]]); // different products use different kernels
            }
            _ => methods.extend(own),
        }
        for (launches, left) in ROUNDS {
            if methods.len() == 1 {
                break;
            }
            let mut times: Vec<(f32, Method)> = Vec::new();
            for &method in &methods {
                // An algorithm that fails is not used.
                let time = self.measure(device, rows, &[(product, method)], launches);
                times.extend(time.ok().map(|time| (time, method)));
            }
            times.sort_by(|a, b| a.0.total_cmp(&b.0));
            methods.clear();
            for (_, method) in times {
                let kind = discriminant(&method);
                if methods.iter().filter(|method| discriminant(*method) == kind).count() < left {
                    methods.push(method);
                }
            }
        }
        let shape = [rows, widths.outs, widths.ins];
        if methods.is_empty() { Err(GpuError::NoProduct { shape }) } else { Ok(methods) }
    }

    /// Returns cublasLt's proposals for `y = x * weight^T`. All matrices are row-major. cublasLt is column-major, so
    /// its matrices are the transposes of these.
    fn cublaslt_methods(
        &self,
        op: Op,
        Widths { outs, ins }: Widths,
        rows: usize,
        most: usize,
    ) -> Result<Vec<Method>, GpuError> {
        let outs = if op == Op::GateUp { 2 * outs } else { outs };
        let (bf16, f32) = (sys::cudaDataType_t::CUDA_R_16BF, sys::cudaDataType_t::CUDA_R_32F);
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description = result::create_matmul_desc(compute, f32).map_err(|e| lt("cublasLtMatmulDescCreate", e))?;
        let transposed = 1_i32;
        // SAFETY: the attribute takes an i32, which lives during the call.
        unsafe {
            result::set_matmul_desc_attribute(
                description,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                from_ref(&transposed).cast(),
                size_of::<i32>(),
            )
        }
        .map_err(|e| lt("cublasLtMatmulDescSetAttribute", e))?;
        let layout = |rows: usize, cols: usize| {
            result::create_matrix_layout(bf16, rows as u64, cols as u64, rows as i64)
                .map_err(|e| lt("cublasLtMatrixLayoutCreate", e))
        };
        let layouts = [layout(ins, outs)?, layout(ins, rows)?, layout(outs, rows)?];
        let proposed = self.proposals(description, layouts, most)?;
        if proposed.is_empty() {
            return Err(GpuError::NoProduct { shape: [rows, outs, ins] });
        }
        let beta = if self.mode_of(op, rows) == ProductMode::Add { 1.0 } else { 0.0 };
        let method = |algorithm| Method::CublasLt(Proposal { description, layouts, algorithm, beta });
        Ok(proposed.into_iter().map(method).collect())
    }

    /// Returns at most `most` algorithms that cublasLt proposes for a product.
    fn proposals(
        &self,
        description: sys::cublasLtMatmulDesc_t,
        [weights, xs, ys]: [sys::cublasLtMatrixLayout_t; 3],
        most: usize,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, GpuError> {
        let preference = result::create_matmul_pref().map_err(|e| lt("cublasLtMatmulPreferenceCreate", e))?;
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
        // SAFETY: all handles live, and the array holds `most` results.
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
        Ok(proposed[..count as usize].iter().map(|found| found.algo).collect())
    }

    /// Returns the time of products in sequence over some layers, in milliseconds. They run as a graph, and the fastest
    /// of `launches` runs counts.
    fn measure(
        &self,
        device: &Device,
        rows: usize,
        sequence: &[(Product<'_>, Method)],
        launches: usize,
    ) -> Result<f32, GpuError> {
        let all = || {
            // Logits have only one matrix, which exceeds the cache in any large model.
            for layer in 0..sequence[0].0.layers(rows) {
                for &(Product { op, widths, operands }, method) in sequence {
                    // SAFETY: the caller of `choose` passes operands for that many rows.
                    unsafe { self.run_method(device, op, widths, rows, method, operands[layer]) }?;
                }
            }
            Ok::<_, GpuError>(())
        };
        // The first run is outside a capture, because it moves the kernels to the device.
        all()?;
        device.stream.synchronize()?;
        let graph = device.stream.capture(all)?;
        let mut best = f32::INFINITY;
        let (mut begun, mut done) = (CudaEvent::new(&device.gpu, true)?, CudaEvent::new(&device.gpu, true)?);
        for _ in 0..launches {
            begun.record(&device.stream)?;
            // SAFETY: operands and weights live, and the graph contains no work of kvarena.
            unsafe { graph.launch(&device.stream) }?;
            done.record(&device.stream)?;
            done.synchronize()?;
            best = best.min(done.elapsed_ms(&begun)?);
        }
        Ok(best)
    }
}

fn gemm_methods(device: &Device, Widths { outs, ins }: Widths, rows: usize) -> Vec<GemmMethod> {
    if device.kernels.gemm.is_empty() { Vec::new() } else { GemmMethod::all(outs, ins, rows) }
}

/// Returns the skinny kernels that can compute a product.
fn skinny_methods(op: Op, Widths { outs, ins }: Widths, rows: usize) -> Vec<Method> {
    if rows > SKINNY_ROWS || !ins.is_multiple_of(64) {
        return Vec::new();
    }
    let fits = |&kernel: &usize| match (op, SKINNY[kernel].1) {
        (Op::GateUp, tiles) => tiles > 1 && outs.is_multiple_of(4 * tiles),
        (_, tiles) => outs.is_multiple_of(8 * tiles),
    };
    (0..SKINNY.len()).filter(fits).map(Method::Skinny).collect()
}
