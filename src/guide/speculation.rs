//! Speculation: a small model drafts tokens, the large one checks them all in one step, and wrong ones are rolled back.
//!
//! The order matters. Drafts are appended and planned; the model runs; wrong drafts are rolled back *before* the
//! commit, which would publish pages with them; then the token that the model wants instead is appended.
//!
//! ```
//! use kvarena::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut engine = Engine::new(PoolConfig { page_size: 4, ..Default::default() }, Null)?;
//! let mut scratch = StepScratch::new();
//! let model = |last: TokenId| TokenId::new(last.raw() + 1); // what the large model would say
//! let prompt: Vec<TokenId> = (0..6).map(TokenId::new).collect();
//! let seq = engine.admit(Namespace::default(), &prompt, 0)?;
//! let prefill = engine.plan_batch(&mut scratch, &[Extend { seq, len: 6 }])?.step();
//! engine.append(seq, &[TokenId::new(6)])?;
//! engine.commit(prefill)?;
//! engine.complete(prefill)?;
//!
//! // How many of the four drafts are right, in each round.
//! for right in [4, 2, 0] {
//!     let known = engine.token_count(seq)?;
//!     let last = engine.tokens(seq)?.last().expect("it has tokens");
//!     let draft = |i| last.raw() + 1 + i + if i < right { 0 } else { 1000 };
//!     let drafts: Vec<_> = (0..4).map(|i| TokenId::new(draft(i))).collect();
//!
//!     engine.append(seq, &drafts)?;
//!     let len = engine.extend_max(seq)?; // the last token, which has no K and V yet, and the drafts
//!     assert_eq!(len, 5);
//!     let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }])?;
//!     // One row of logits for each: what follows the last token, what follows the first draft, ...
//!     let wanted: Vec<_> = plan.tokens.iter().map(|&token| model(token)).collect();
//!     let step = plan.step();
//!
//!     let accepted = drafts.iter().zip(&wanted).take_while(|(draft, wanted)| draft == wanted).count();
//!     assert_eq!(accepted, right as usize);
//!     engine.rollback(seq, known + accepted as u32)?; // does nothing where all were right
//!     engine.append(seq, &[wanted[accepted]])?; // one more token in any case
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//!     assert_eq!(engine.cached_len(seq)?, known + accepted as u32);
//! }
//! let tokens: Vec<u32> = engine.tokens(seq)?.map(TokenId::raw).collect();
//! assert_eq!(tokens, (0..16).collect::<Vec<_>>()); // 7, then 5, 3 and 1 more
//! engine.verify()?;
//! # Ok(())
//! # }
//! ```
//!
//! What is published cannot be rolled back: the answer is `RollbackLen`. A tree of drafts is made with
//! [`fork`](crate::Engine::fork).
//!
//! Not here: an edited turn of a conversation, which is a new prompt: the cache finds what is still the same.
