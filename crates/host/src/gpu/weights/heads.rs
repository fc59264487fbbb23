//! Widths of the first product of a layer, and the order of the elements of a head.
//!
//! The backend rotates element i of a head with element `i + head_dim / 2`. Where only the first elements of a head
//! rotate, the device stores the elements of q and k in another order, which changes no product of q and k. The
//! frequencies of the other pairs are 0.

use crate::config::ModelConfig;
use crate::gpu::delta::projected_width;
use crate::rope::Rope;

/// Returns the width of q, k and v.
pub(in crate::gpu) fn qkv_width(config: &ModelConfig) -> usize {
    (config.q_heads + 2 * config.kv_heads) * config.head_dim
}

/// Returns the width of q, k, v and of the gates, if attention has them.
pub(in crate::gpu) fn qkv_stride(config: &ModelConfig) -> usize {
    let gates = if config.family.gates_attention() { config.q_heads * config.head_dim } else { 0 };
    qkv_width(config) + gates
}

/// Returns the rows of a layer's first matrix.
pub(super) fn first_width(config: &ModelConfig, layer: usize) -> usize {
    config.delta_of(layer).map_or_else(|| qkv_stride(config), projected_width)
}

/// Returns the order in which the device stores the elements of a head of q and k, of which the first `rotated` rotate.
pub(super) fn order_of(head_dim: usize, rotated: usize) -> Vec<usize> {
    let (half, pairs) = (head_dim / 2, rotated / 2);
    let mut others = rotated..head_dim;
    let place = |at: usize| {
        let (side, pair) = (at / half, at % half);
        if pair < pairs { side * pairs + pair } else { others.next().expect("the others fill the rest") }
    };
    (0..head_dim).map(place).collect()
}

/// Returns the frequencies of all pairs of elements of a head.
pub(in crate::gpu) fn pairs_of(config: &ModelConfig, rope: &Rope) -> Vec<f32> {
    let mut frequencies = rope.frequencies.clone();
    frequencies.resize(config.head_dim / 2, 0.0);
    frequencies
}

#[cfg(test)]
mod tests {
    use super::order_of;

    #[test]
    fn rotating_elements_are_half_a_head_apart() {
        assert_eq!(order_of(8, 4), [0, 1, 4, 5, 2, 3, 6, 7]);
        assert_eq!(order_of(12, 4), [0, 1, 4, 5, 6, 7, 2, 3, 8, 9, 10, 11]);
        assert!(order_of(64, 64).is_sorted());
    }
}
