//! Published formats of 8 and 4 bits, dequantised to bf16 as they are read: fp8 in blocks (DeepSeek V3), and MXFP4
//! (gpt-oss).

use half::bf16;
use rayon::prelude::*;
use serde_json::json;

use crate::error::Result;
use crate::family::Family;
use crate::fields::Fields;

/// Rows and columns of a block of fp8. The numbers of a block share a factor.
pub const FP8_BLOCK: usize = 128;

/// Consecutive numbers of a row of MXFP4 that share an exponent.
pub const MXFP4_BLOCK: usize = 32;

/// Values of the FP4 codes 0 to 7. The other 8 codes have the negative values, in the same order.
const FP4: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Checks that the config's format of quantised weights is implemented, if it has one.
///
/// # Errors
/// `quantization_config` names another format than fp8 in blocks of 128 x 128 and, for gpt-oss, MXFP4.
pub fn check(fields: &Fields<'_>, family: Family) -> Result<()> {
    let name = "quantization_config";
    let Some(config) = fields.object(name)? else { return Ok(()) };
    let block = json!([FP8_BLOCK, FP8_BLOCK]);
    let has_blocks =
        config.get("weight_block_size") == Some(&block) && config.text("fmt")?.is_none_or(|format| format == "e4m3");
    match config.text("quant_method")? {
        Some("fp8") if has_blocks => Ok(()),
        Some("mxfp4") if family == Family::GptOss => Ok(()),
        method => Err(fields.wrong(&format!(
            "{name}: quant_method {} with weight_block_size {} is not implemented, only fp8 (e4m3) in blocks of \
             {block}, and mxfp4 of gpt-oss",
            json!(method),
            config.get("weight_block_size").unwrap_or(&json!(null)),
        ))),
    }
}

/// Dequantises e4m3 codes `[rows, cols]`. `factors` is `[rows / 128, cols / 128]`, rounded up.
pub fn fp8(codes: &[u8], factors: &[f32], cols: usize) -> Vec<bf16> {
    let values: [f32; 256] = std::array::from_fn(|code| e4m3(code as u8));
    let mut out = bytemuck::zeroed_vec(codes.len());
    let rows = out.par_chunks_mut(cols).zip(codes.par_chunks(cols)).enumerate();
    rows.for_each(|(row, (out, codes))| {
        let factors = factors[row / FP8_BLOCK * cols.div_ceil(FP8_BLOCK)..].iter();
        let blocks = out.chunks_mut(FP8_BLOCK).zip(codes.chunks(FP8_BLOCK));
        for ((out, codes), factor) in blocks.zip(factors) {
            let pairs = out.iter_mut().zip(codes);
            pairs.for_each(|(x, &code)| *x = bf16::from_f32(values[usize::from(code)] * factor));
        }
    });
    out
}

/// Returns the value of a code: sign, 4 bits of exponent, 3 bits of mantissa. e4m3 has no infinities.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let value = match exponent {
        15 if mantissa == 7.0 => f32::NAN,
        0 => mantissa * 2_f32.powi(-9),
        _ => (8.0 + mantissa) * 2_f32.powi(exponent - 10),
    };
    if code < 128 { value } else { -value }
}

/// Dequantises MXFP4 matrices `[rows, cols]`, and returns their transposes `[cols, rows]`, as gpt-oss uses them. A byte
/// of `blocks` contains the codes of two columns, the lower one in its low bits. `exponents` has one byte a block.
pub fn mxfp4(blocks: &[u8], exponents: &[u8], rows: usize, cols: usize) -> Vec<bf16> {
    let (per_row, bytes) = (cols / MXFP4_BLOCK, MXFP4_BLOCK / 2);
    let mut out = bytemuck::zeroed_vec(2 * blocks.len());
    let matrices = out
        .par_chunks_mut(rows * cols)
        .zip(blocks.par_chunks(rows * cols / 2))
        .zip(exponents.par_chunks(rows * per_row));
    matrices.for_each(|((out, blocks), exponents)| {
        // A block's columns are rows of the result, so this order writes each row of the result from end to end.
        for block in 0..per_row {
            let out = &mut out[block * MXFP4_BLOCK * rows..];
            for row in 0..rows {
                let at = row * per_row + block;
                let factor = 2_f64.powi(i32::from(exponents[at]) - 127);
                for (pair, byte) in blocks[at * bytes..(at + 1) * bytes].iter().enumerate() {
                    out[2 * pair * rows + row] = fp4(byte & 15, factor);
                    out[(2 * pair + 1) * rows + row] = fp4(byte >> 4, factor);
                }
            }
        }
    });
    out
}

/// Returns a code's value times a factor, which may exceed f32 although the result does not.
fn fp4(code: u8, factor: f64) -> bf16 {
    let value = FP4[usize::from(code & 7)];
    bf16::from_f32((if code < 8 { value } else { -value } * factor) as f32)
}
