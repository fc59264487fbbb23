//! Normalises and rotates q and k, then stores k and v. This code specifies `ptx/src/moves/rope_store.cuh`.

use super::{Cpu, CpuError, CpuRows, CpuRowsMut};
use crate::backend::{Backend, Operand, Rope, check, rope};
use crate::id::LayerId;
use crate::plan::BatchPlan;

impl Cpu {
    /// Checks a call, normalises and rotates q and k in place, and stores k and v.
    pub(super) fn rotate_and_store(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        rope: &Rope<CpuRows<'_>, &[f32]>,
        mut qkv: CpuRowsMut<'_>,
    ) -> Result<(), CpuError> {
        self.check_open(plan)?;
        check::layer(layer, &self.layout)?;
        let layout = &self.planes.of_group(self.layout.place(layer).group).layout;
        rope::check(layout)?;
        let dim = layout.head_dim() as usize;
        let (q_heads, kv_heads) = (rope.q_heads as usize, layout.kv_heads() as usize);
        let stride = qkv.check(Operand::Qkv, plan.token_count(), (q_heads + 2 * kv_heads) * dim)?;
        for norm in [rope.q_norm, rope.k_norm].into_iter().flatten() {
            norm.check(Operand::Norm, 1, dim)?;
        }
        check::length(Operand::Frequencies, rope.frequencies.len(), dim / 2)?;
        let head = &mut vec![0.0; dim][..];
        for (token, &position) in plan.positions.iter().enumerate() {
            for index in 0..q_heads + kv_heads {
                let start = token * stride + index * dim;
                qkv.elements.as_elements().slice(start..start + dim).convert_into(head);
                let norm = if index < q_heads { rope.q_norm } else { rope.k_norm };
                norm.iter().for_each(|norm| scale(head, norm.elements.slice(0..dim), rope.eps));
                rotate(head, rope.frequencies, position);
                qkv.elements.write(start, head);
            }
        }
        let elements = qkv.elements.as_elements();
        let part = |heads: usize| {
            let start = (heads * dim).min(elements.len());
            CpuRows { elements: elements.slice(start..elements.len()), stride: Some(stride) }
        };
        self.store_cache(plan, layer, part(q_heads), part(q_heads + kv_heads))
    }
}

/// Computes `x / sqrt(mean(x^2) + eps) * weight`.
fn scale(head: &mut [f32], weight: super::Elements<'_>, eps: f32) {
    let mean = head.iter().map(|x| x * x).sum::<f32>() / head.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    head.iter_mut().zip(weight.to_f32()).for_each(|(x, weight)| *x *= scale * weight);
}

fn rotate(head: &mut [f32], frequencies: &[f32], position: u32) {
    let (low, high) = head.split_at_mut(head.len() / 2);
    for ((a, b), frequency) in low.iter_mut().zip(high).zip(frequencies) {
        let (sin, cos) = (position as f32 * frequency).sin_cos();
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}
