//! The operands of a step's products: their matrix, their input and output, and the prefetch of the next product.

use super::super::delta::projected_width;
use super::super::device::Device;
use super::super::error::GpuError;
use super::super::products::{AHEAD_BYTES, Op, Operands, Product, Widths, padded_rows};
use super::super::weights::qkv_stride;
use super::Forward;
use crate::config::ModelConfig;
use crate::delta::DeltaConfig;

impl Forward {
    /// Chooses the implementations of all products for steps of this many tokens and draws, with `Products::choose`.
    /// If `unhurried`, also measures products of many rows. Overwrites the activations.
    ///
    /// # Errors
    /// cublasLt has no algorithm for a product, or cublasLt or the driver failed.
    ///
    /// # Panics
    /// If there are more tokens than the limits allow, or more draws than rows of logits at a time.
    pub fn choose_products(
        &mut self,
        device: &Device,
        (tokens, draws): (usize, usize),
        unhurried: bool,
    ) -> Result<(), GpuError> {
        assert!(tokens <= padded_rows(self.limits.tokens) && draws <= self.limits.logits);
        // Separate kernels compute experts, so a layer with experts has only two products.
        let ops: &[Op] = match self.mixture {
            Some(_) => &[Op::Qkv, Op::Out],
            None => &[Op::Qkv, Op::Out, Op::GateUp, Op::Down],
        };
        for ops in [ops, &[Op::Delta, Op::DeltaOut]] {
            let layers: Vec<usize> = (0..self.config.layers).filter(|&layer| self.first_op(layer) == ops[0]).collect();
            if layers.is_empty() || tokens == 0 || self.products.is_chosen(ops[0], tokens) {
                continue;
            }
            let of_layers =
                |&op| -> Vec<Operands> { layers.iter().map(|&layer| self.operands(op, layer, tokens)).collect() };
            let operands: Vec<_> = ops.iter().map(of_layers).collect();
            let product = |(&op, operands)| Product { op, widths: self.widths(op), operands };
            let products: Vec<_> = ops.iter().zip(operands.iter().map(Vec::as_slice)).map(product).collect();
            self.products.choose(device, tokens, &products, unhurried)?;
        }
        if draws > 0 && !self.products.is_chosen(Op::Logits, draws) {
            let (op, widths, operands) = (Op::Logits, self.widths(Op::Logits), &[self.logits_operands(0)][..]);
            let product = Product { op, widths, operands };
            self.products.choose(device, draws, &[product], unhurried)?;
        }
        Ok(())
    }

    fn widths(&self, op: Op) -> Widths {
        let ModelConfig { hidden, intermediate, vocab, q_heads, head_dim, .. } = self.config;
        let delta = self.config.delta.as_ref();
        let (outs, ins) = match op {
            Op::Qkv => (qkv_stride(&self.config), hidden),
            Op::Delta => (delta.map_or(0, projected_width), hidden),
            Op::DeltaOut => (hidden, delta.map_or(0, DeltaConfig::value_width)),
            Op::Out => (hidden, q_heads * head_dim),
            Op::GateUp => (intermediate, hidden),
            Op::Down => (hidden, intermediate),
            Op::Logits => (vocab, hidden),
        };
        Widths { outs, ins }
    }

    pub(super) fn operands(&self, op: Op, index: usize, tokens: usize) -> Operands {
        let layer = &self.weights.layers[index];
        let sum = match &self.output {
            Some(output) => output,
            None if self.are_parts(tokens) => &self.normed,
            None => &self.x,
        };
        let (weight, x, y, norm) = match op {
            Op::Qkv | Op::Delta => (layer.qkv, &self.x, &self.qkv, layer.attention_norm),
            Op::Out | Op::DeltaOut => (layer.o, &self.attended, sum, 0),
            Op::GateUp => (layer.gate_up, &self.x, &self.activated, layer.mlp_norm),
            Op::Down => (layer.down, &self.activated, sum, 0),
            Op::Logits => unreachable!("logits have no layer"),
        };
        let (next, after) = match op {
            Op::Qkv => (layer.o, Op::Out),
            Op::Delta => (layer.o, Op::DeltaOut),
            Op::Out | Op::DeltaOut => (layer.gate_up, Op::GateUp),
            Op::GateUp => (layer.down, Op::Down),
            _ => match self.weights.layers.get(index + 1) {
                Some(layer) => (layer.qkv, self.first_op(index + 1)),
                None => (self.weights.output, Op::Logits),
            },
        };
        let Widths { outs, ins } = self.widths(after);
        // In a layer with experts, no product follows `Op::Out`.
        let bytes = if next == 0 { 0 } else { (2 * outs * ins).min(AHEAD_BYTES) };
        let next = (next, bytes);
        let (x, y) = (x.address(), y.address());
        let (normed, gate_up) = (self.normed.address(), self.gate_up.address());
        Operands { weight, x, y, norm, draws: 0, normed, gate_up, next }
    }

    /// Returns the first product of a layer.
    pub(super) fn first_op(&self, layer: usize) -> Op {
        if self.config.delta_of(layer).is_some() { Op::Delta } else { Op::Qkv }
    }

    pub(super) fn logits_operands(&self, draws: u64) -> Operands {
        Operands {
            weight: self.weights.output,
            x: self.x.address(),
            y: self.logits.address(),
            norm: self.weights.norm,
            draws,
            normed: self.normed.address(),
            gate_up: 0,
            next: (0, 0),
        }
    }

    /// Returns whether the ranks sum their output and down products in peer memory, in steps of this many tokens. Then
    /// each rank's product is a part of the sum, which the ranks add to x.
    pub(super) fn are_parts(&self, tokens: usize) -> bool {
        padded_rows(tokens) <= self.part_rows
    }

    pub(super) fn product(&self, device: &Device, op: Op, tokens: usize, operands: Operands) -> Result<(), GpuError> {
        // SAFETY: weights and activations live as long as the model, and have memory for that many rows, rounded up.
        unsafe { self.products.run(device, op, self.widths(op), tokens, operands) }
    }
}
