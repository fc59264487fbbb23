//! How a model's code changes to use the cache, shown with candle's Qwen3.
//!
//! A step has the new tokens of many sequences as packed rows: `[tokens, heads, head_dim]`, in the order of the plan's
//! rows, without padding. So a model loses its batch dimension, its mask, its offset and its cache. It gains the plan's
//! positions, from which it rotates q and k, and one call in each layer, which stores K and V and attends.
//!
//! The crate `kvarena-candle` (`crates/candle`) implements this call as a custom operation of candle. Its patch of
//! candle's Qwen3 adds 53 lines and deletes 249. In attention it changes these lines:
//!
//! ```diff
//! -        let (b, l, _) = x.dims3()?;
//! +    pub(crate) fn forward(&self, x: &Tensor, step: &Step, rotary: &Qwen3RotaryEmbedding) -> Result<Tensor> {
//! +        let (l, _) = x.dims2()?;
//! +        let q = q.reshape((l, self.num_heads, self.head_dim))?;
//! +        let k = k.reshape((l, self.num_kv_heads, self.head_dim))?;
//! +        let v = v.reshape((l, self.num_kv_heads, self.head_dim))?;
//! -        let (q, k) = self.rotary_emb.apply(&q, &k, offset)?;
//! +        let (q, k) = rotary.apply(&q, &k)?;
//! -        let (k, v) = self.kv_cache.append(&k, &v)?;
//! -            return self.forward_cpu_flash_attn(&q, &k, &v, offset, b, l);
//! -        self.forward_standard_attn(&q, &k, &v, attn_mask, b, l)
//! +        let attend = Attend::new(self.num_heads as u32, self.head_dim as u32);
//! +        let ctx = step.attend(self.layer, &attend, &q, &k, &v)?;
//! ```
//!
//! The model computes logits only from each sequence's last row:
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut engine = Engine::new(PoolConfig::default(), Null)?;
//! let prompts = [&[1, 2, 3][..], &[4, 5]].map(|prompt| prompt.iter().copied().map(TokenId::new).collect::<Vec<_>>());
//! let mut items = Vec::new();
//! for prompt in &prompts {
//!     let seq = engine.admit(Namespace::default(), prompt, 0)?;
//!     items.push(Extend { seq, len: prompt.len() as u32 });
//! }
//! let mut scratch = StepScratch::new();
//! let plan = engine.plan_batch(&mut scratch, &items)?;
//! assert_eq!(plan.positions, [0, 1, 2, 0, 1]);
//! let last: Vec<u32> = plan.rows.iter().map(|row| row.qo_start + row.extend_len - 1).collect();
//! assert_eq!(last, [2, 4]);
//! # Ok(())
//! # }
//! ```
