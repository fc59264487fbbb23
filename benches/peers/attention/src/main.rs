//! Compares attention on each path of the CPU with candle's over contiguous K and V.
//!
//! ```text
//! cd benches/peers
//! cargo run --release -p kvarena-peers-attention [CASE]
//! ```
//!
//! candle attends to one sequence at a time. It runs in the case's element type and in f32, and the faster of both
//! counts. It has no fp8, no latent rows and no paged store.

#[path = "../../../attention/table.rs"]
mod table;

use candle_core::{DType, Device, Result, Tensor, WithDType};
use candle_nn::attention::{AttnMask, flash_attn};
use half::{bf16, f16};
use kvarena::{KvDtype, KvShape};
use std::time::{Duration, Instant};
use table::{Case, numbers};

fn main() {
    println!("peer: candle-nn 0.11.1, {}", std::env::args().next().unwrap_or_default());
    let only = std::env::args().nth(1).unwrap_or_default();
    table::print(&only, |case| fastest(case).map(|run| -> Box<dyn FnMut()> { Box::new(run) }));
}

/// q, k and v of each row: `[1, tokens, heads, head_dim]`.
struct Rows {
    rows: Vec<[Tensor; 3]>,
    run: fn(&[Tensor; 3], usize) -> Result<Tensor>,
}

impl Rows {
    fn new<T: WithDType + num_traits::Float>(case: &Case, dtype: DType) -> Option<Self> {
        let KvShape::Heads { kv_heads, head_dim } = case.shape else { return None };
        let tensor = |tokens: u32, heads: u32| {
            let shape = [1, tokens as usize, heads as usize, head_dim as usize];
            let numbers = numbers(shape.iter().product());
            Tensor::from_vec(numbers, &shape[..], &Device::Cpu)?.to_dtype(dtype)
        };
        let rows = case.prefixes.iter().map(|prefix| {
            let kv = || tensor(prefix + case.len, kv_heads);
            Ok([tensor(case.len, case.q_heads)?, kv()?, kv()?])
        });
        let run = |[q, k, v]: &[Tensor; 3], prefix| {
            let mask = AttnMask::causal_with_offset(prefix);
            flash_attn::<T>(q, k, v, 0.1, mask, None, None)
        };
        Some(Self { rows: rows.collect::<Result<_>>().expect("the machine has enough memory"), run })
    }

    fn attend(&self, case: &Case) -> Duration {
        let start = Instant::now();
        for (row, &prefix) in self.rows.iter().zip(&case.prefixes) {
            (self.run)(row, prefix as usize).expect("candle supports the case");
        }
        start.elapsed()
    }
}

/// Returns candle's attention in the case's type or in f32, whichever is faster. `None` for fp8, latent rows and
/// stores.
fn fastest(case: &Case) -> Option<impl FnMut() + use<>> {
    if case.stores {
        return None;
    }
    let wide = Rows::new::<f32>(case, DType::F32);
    let narrow = match case.dtype {
        KvDtype::F16 => Rows::new::<f16>(case, DType::F16),
        KvDtype::Bf16 => Rows::new::<bf16>(case, DType::BF16),
        KvDtype::F32 => None,
        _ => return None,
    };
    let ways = [wide, narrow].into_iter().flatten();
    let rows = ways.min_by_key(|rows| [rows.attend(case), rows.attend(case)][1])?;
    let case = Case { prefixes: case.prefixes.clone(), ..*case };
    Some(move || _ = rows.attend(&case))
}
