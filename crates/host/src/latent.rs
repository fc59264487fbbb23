//! Latent attention (DeepSeek V3): a token stores one row, from which all heads derive K and V.
//!
//! The projection from a row to K is multiplied into q, and the projection to V into the attended rows. Attention
//! therefore reads rows as they are stored: `q_h (W_h c) = (W_h^T q_h) c`. The first `rank` numbers of a row are the
//! normed latent vector. The last `rope` numbers are rotated, like the last numbers of each head of q.

use crate::error::Result;
use crate::fields::Fields;
use crate::linear::{Linear, resize};
use crate::matrix::Matrix;
use crate::ops::{self, Angles};
use crate::source::Source;

/// The inner norms have a fixed epsilon, independent of the config.
const EPS: f32 = 1e-6;

/// Sizes of latent attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LatentConfig {
    /// Width of the low-rank projection of q, if any.
    pub q_rank: Option<usize>,
    /// Elements of a row that K and V share.
    pub rank: usize,
    /// Rotated elements of a row, after the shared ones.
    pub rope: usize,
    /// Elements of a head of K that are not rotated.
    pub nope: usize,
    /// Elements of a head of V.
    pub value: usize,
    /// Whether the elements of a rotated pair are adjacent; otherwise they are `rope / 2` elements apart.
    pub interleaved: bool,
}

impl LatentConfig {
    /// Reads the sizes.
    ///
    /// # Errors
    /// A field is missing or invalid.
    pub fn parse(fields: &Fields<'_>) -> Result<Self> {
        let rope = fields.size("qk_rope_head_dim")?;
        if !rope.is_multiple_of(2) {
            return Err(fields.wrong(&format!("qk_rope_head_dim {rope} is odd")));
        }
        Ok(Self {
            q_rank: fields.get("q_lora_rank").map(|_| fields.size("q_lora_rank")).transpose()?,
            rank: fields.size("kv_lora_rank")?,
            rope,
            nope: fields.size("qk_nope_head_dim")?,
            value: fields.size("v_head_dim")?,
            interleaved: fields.flag_or("rope_interleave", true)?,
        })
    }
}

/// The projection from x to q.
enum Query {
    Whole(Linear),
    /// A low-rank projection with a norm between its two matrices.
    Narrow {
        down: Linear,
        norm: Vec<f32>,
        up: Linear,
    },
}

/// Projections of one layer.
pub struct Latent {
    config: LatentConfig,
    heads: usize,
    query: Query,
    rows: Linear,
    norm: Vec<f32>,
    /// `[rank, nope]` for each head.
    into_q: Vec<Matrix>,
    /// `[value, rank]` for each head.
    out_of: Vec<Matrix>,
}

/// Buffers of the computation, reused.
#[derive(Default)]
pub struct LatentWork {
    narrow: Vec<f32>,
    narrow_normed: Vec<f32>,
    /// `[tokens, heads, nope + rope]`
    q: Vec<f32>,
    /// One head, before and after a matrix product.
    from: Vec<f32>,
    to: Vec<f32>,
    latent: Vec<f32>,
}

impl Latent {
    /// Builds a layer's projections. `name` is the name of the layer's `self_attn` in the checkpoint.
    pub fn build(
        source: &mut dyn Source,
        name: &str,
        (hidden, heads): (usize, usize),
        config: LatentConfig,
    ) -> Result<Self> {
        let LatentConfig { rank, rope, nope, value, .. } = config;
        let q_width = heads * (nope + rope);
        let part = |part: &str| format!("{name}.{part}");
        let query = match config.q_rank {
            None => Query::Whole(Linear::build(source, &part("q_proj"), q_width, hidden, false)?),
            Some(narrow) => Query::Narrow {
                down: Linear::build(source, &part("q_a_proj"), narrow, hidden, false)?,
                norm: source.vector(&part("q_a_layernorm.weight"), narrow)?,
                up: Linear::build(source, &part("q_b_proj"), q_width, narrow, false)?,
            },
        };
        let rows_name = part("kv_a_proj_with_mqa");
        let rows = Linear::build(source, &rows_name, rank + rope, hidden, false)?;
        let norm = source.vector(&part("kv_a_layernorm.weight"), rank)?;
        let both = source.matrix(&part("kv_b_proj.weight"), heads * (nope + value), rank)?;
        let first = |head: usize| head * (nope + value);
        let into_q = (0..heads).map(|h| both.part(first(h)..first(h) + nope).transpose()).collect();
        let out_of = (0..heads).map(|h| both.part(first(h) + nope..first(h + 1))).collect();
        Ok(Self { config, heads, query, rows, norm, into_q, out_of })
    }

    /// Computes rows of q, `[tokens, heads, rank + rope]`, and rows to store, `[tokens, rank + rope]`. The input is the
    /// normed x.
    pub fn project(
        &self,
        x: &[f32],
        angles: &Angles,
        [q, k]: [&mut Vec<f32>; 2],
        work: &mut LatentWork,
        transposed: &mut Vec<f32>,
    ) {
        let LatentConfig { rank, rope, nope, interleaved, .. } = self.config;
        match &self.query {
            Query::Whole(whole) => whole.apply(x, &mut work.q, transposed),
            Query::Narrow { down, norm, up } => {
                down.apply(x, &mut work.narrow, transposed);
                resize(&mut work.narrow_normed, work.narrow.len());
                ops::rms_norm(&work.narrow, norm, EPS, &mut work.narrow_normed);
                up.apply(&work.narrow_normed, &mut work.q, transposed);
            }
        }
        ops::rotate_ends(&mut work.q, (self.heads, nope + rope), rope, interleaved, angles);
        let (head, row) = (nope + rope, rank + rope);
        let tokens = work.q.len() / (self.heads * head);
        resize(q, tokens * self.heads * row);
        for (h, into_q) in self.into_q.iter().enumerate() {
            work.from.clear();
            for q in work.q.chunks_exact(head).skip(h).step_by(self.heads) {
                work.from.extend_from_slice(&q[..nope]);
            }
            resize(&mut work.to, tokens * rank);
            into_q.multiply(&work.from, &mut work.to, transposed);
            let heads = work.q.chunks_exact(head).zip(q.chunks_exact_mut(row)).skip(h);
            for ((from, q), to) in heads.step_by(self.heads).zip(work.to.chunks_exact(rank)) {
                q[..rank].copy_from_slice(to);
                q[rank..].copy_from_slice(&from[nope..]);
            }
        }
        self.rows.apply(x, k, transposed);
        ops::rotate_ends(k, (1, row), rope, interleaved, angles);
        resize(&mut work.latent, rank);
        for row in k.chunks_exact_mut(row) {
            ops::rms_norm(&row[..rank], &self.norm, EPS, &mut work.latent);
            row[..rank].copy_from_slice(&work.latent);
        }
    }

    /// Computes heads of V, `[tokens, heads, value]`, from the attended rows, `[tokens, heads, rank]`.
    pub fn values(&self, attended: &[f32], out: &mut Vec<f32>, work: &mut LatentWork, transposed: &mut Vec<f32>) {
        let LatentConfig { rank, value, .. } = self.config;
        let tokens = attended.len() / (self.heads * rank);
        resize(out, tokens * self.heads * value);
        for (h, out_of) in self.out_of.iter().enumerate() {
            work.from.clear();
            for row in attended.chunks_exact(rank).skip(h).step_by(self.heads) {
                work.from.extend_from_slice(row);
            }
            resize(&mut work.to, tokens * value);
            out_of.multiply(&work.from, &mut work.to, transposed);
            let heads = out.chunks_exact_mut(value).skip(h).step_by(self.heads);
            heads.zip(work.to.chunks_exact(value)).for_each(|(out, to)| out.copy_from_slice(to));
        }
    }
}
