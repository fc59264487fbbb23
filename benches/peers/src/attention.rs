//! Attention on the CPU beside candle's (`candle_nn::attention`), over contiguous K and V of the same numbers: a call a
//! row, each with a causal mask at the row's offset. Candle has no fp8 here, no pages and no latent rows.

#[path = "../../attention/table.rs"]
#[allow(unused)]
mod table;

use std::hint::black_box;

use candle_core::{DType, Device, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use half::{bf16, f16};
use kvarena::{KvDtype, KvShape};
use table::Case;

/// Prints the cases whose name contains a text.
pub fn print(only: &str) {
    table::print(only, |case| Some(Box::new(candle(case)?)));
}

/// What computes all rows of a case.
fn candle(case: &Case) -> Option<impl FnMut() + use<>> {
    let dtype = match case.dtype {
        KvDtype::F32 => DType::F32,
        KvDtype::F16 => DType::F16,
        KvDtype::Bf16 => DType::BF16,
        KvDtype::Fp8E4M3 => return None,
    };
    let KvShape::Heads { kv_heads, head_dim } = case.shape else { return None };
    let tensor = |tokens: u32, heads: u32| {
        let shape = (1, tokens as usize, heads as usize, head_dim as usize);
        let numbers = table::numbers(tokens as usize * (heads * head_dim) as usize);
        let made = Tensor::from_vec(numbers, shape, &Device::Cpu);
        made.and_then(|made| made.to_dtype(dtype)).expect("there is memory")
    };
    let rows: Vec<_> = case
        .prefixes
        .iter()
        .map(|&prefix| {
            let kv = || tensor(prefix + case.len, kv_heads);
            (tensor(case.len, case.q_heads), kv(), kv(), prefix as usize)
        })
        .collect();
    let scale = 1.0 / (head_dim as f32).sqrt();
    Some(move || {
        for (q, k, v, kv_offset) in &rows {
            let mask = AttnMask::Causal { kv_offset: *kv_offset };
            let out = match dtype {
                DType::F32 => flash_attn::<f32>(q, k, v, scale, mask, None, None),
                DType::F16 => flash_attn::<f16>(q, k, v, scale, mask, None, None),
                _ => flash_attn::<bf16>(q, k, v, scale, mask, None, None),
            };
            black_box(out.expect("shapes that fit"));
        }
    })
}
