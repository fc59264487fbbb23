//! Speculative decoding: a small model drafts tokens, and the large model verifies all of them in one step.
//!
//! The host appends draft tokens so that each one comes after its parent, and plans them with
//! [`plan_drafts`](crate::Engine::plan_drafts). Drafts form a chain or a tree. A [`DraftTree`](crate::plan::DraftTree)
//! computes the masks and positions of a tree from the parents.
//!
//! The model runs once. [`accept`](crate::Engine::accept) keeps one branch, makes its K and V contiguous, and removes
//! the other drafts. Then the host appends the token that the model predicts next. A step with drafts commits only
//! after `accept`, so the cache never contains a rejected token.
//!
//! ```
//! use kvarena::*;
//! use kvarena::plan::DraftTree;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut engine = Engine::new(PoolConfig { page_size: 4, ..Default::default() }, Null)?;
//! let mut scratch = StepScratch::new();
//! let model = |last: TokenId| TokenId::new(last.raw() + 1); // the large model's prediction
//! let prompt: Vec<TokenId> = (0..6).map(TokenId::new).collect();
//! let seq = engine.admit(Namespace::default(), &prompt, 0)?;
//! let prefill = engine.plan_batch(&mut scratch, &[Extend { seq, len: 6 }])?.step();
//! engine.append(seq, &[TokenId::new(6)])?;
//! engine.commit(prefill)?;
//! engine.complete(prefill)?;
//!
//! let mut tree = DraftTree::new();
//! // Two guesses at each of two positions; one guess at each position is right.
//! for round in 0..2 {
//!     let last = engine.tokens(seq)?.last().expect("it has tokens").raw();
//!     // The root is the last token, which has no K and V yet. It has two children with one child each.
//!     let parents = [0, 0, 0, 1, 2];
//!     let drafts = [last + 50, last + 1, last + 51, last + 2].map(TokenId::new);
//!     tree.set(engine.planned_len(seq)?, &parents)?;
//!
//!     engine.append(seq, &drafts)?;
//!     let items = [Extend { seq, len: 5 }];
//!     let plan = engine.plan_drafts(&mut scratch, &items, &[tree.draft(seq)])?;
//!     assert_eq!(plan.positions[0] + 2, plan.positions[4]); // by depth, for the model's position encoding
//!     // store_cache and attend run as usual. Each token's logits predict its successor on its branch.
//!     let wanted: Vec<_> = plan.tokens.iter().map(|&token| model(token)).collect();
//!     let (step, tokens) = (plan.step(), plan.tokens.to_vec());
//!
//!     // From the root down, follow the child that the model predicts.
//!     let mut kept = vec![0_u32];
//!     let fits = |of: u32, i: u32| parents[i as usize] == of && tokens[i as usize] == wanted[of as usize];
//!     let child = |of: u32| (of + 1..5).find(|&i| fits(of, i));
//!     while let Some(next) = kept.last().and_then(|&last| child(last)) {
//!         kept.push(next);
//!     }
//!     assert_eq!(kept, [0, 2, 4]);
//!     let moved = engine.accept(step, seq, &kept)?;
//!     assert_eq!(moved.len(), 1); // for other ranks' backends
//!     engine.append(seq, &[wanted[4]])?;
//!     engine.commit(step)?;
//!     engine.complete(step)?;
//!     assert_eq!(engine.cached_len(seq)?, 9 + 3 * round);
//! }
//! let tokens: Vec<u32> = engine.tokens(seq)?.map(TokenId::raw).collect();
//! assert_eq!(tokens, (0..13).collect::<Vec<_>>()); // three tokens a step, one right guess of two at each depth
//! let stats = engine.stats();
//! assert_eq!((stats.drafts, stats.draft_tokens, stats.accepted_tokens), (2, 2 * 4, 2 * 2));
//! engine.verify()?;
//! # Ok(())
//! # }
//! ```
//!
//! A chain ([`Draft::chain`](crate::plan::Draft::chain)) needs no masks, so every attention supports it, with or
//! without a window. `accept` keeps the start of the chain and moves nothing. A host may also plan a chain with
//! `plan_batch` as ordinary tokens. It must then [`rollback`](crate::Engine::rollback) the rejected tokens *before* the
//! commit, which would publish them.
//!
//! Sampling need not be greedy. If the host samples each position with the same random numbers as without drafts,
//! drafts do not change the output. `crates/server` (`--draft`) does this, with drafts from the text itself.
//!
//! A server accepts the branches of all its sequences in one call: [`accept_batch`](crate::Engine::accept_batch). If a
//! step fails, [`abort`](crate::Engine::abort) it and roll the drafts back, because after the abort they are ordinary
//! tokens of the sequence.
//!
//! If the engine rejects the plan, for example with `OutOfPages`, the drafts also stay appended as ordinary tokens.
//! Roll them back before you plan the sequence without drafts or preempt it. Otherwise they become part of its text.
//!
//! [`Stats`](crate::stats::Stats) counts drafts, their guessed tokens and the accepted guesses. A lone root is the last
//! sampled token, not a guess. If there are several roots, each is a guess of that token.
//!
//! Positions of a tree count depth, so several drafts have the same position, and attention with a sliding window does
//! not support trees. A model with windows uses chains. After the host has prepared a layer with a window, `Cuda`
//! rejects trees before any work runs.
//!
//! `rollback` cannot remove published tokens and returns `RollbackLen`.
//!
//! An edited turn of a conversation is not a rollback. It is a new prompt, and the cache matches its unchanged start.
