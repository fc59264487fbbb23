//! Speculation: a small model drafts tokens, the large one checks them all in one step, and a branch of them is kept.
//!
//! Drafts are appended in an order in which none stands before the one that it follows, and planned as such with
//! [`plan_drafts`](crate::Engine::plan_drafts): a chain, or a tree, whose masks and positions a
//! [`DraftTree`](crate::DraftTree) makes from parents. The model runs once; [`accept`](crate::Engine::accept) keeps
//! what it agrees with, moves K and V of that branch together, and forgets the rest; then the token that the model
//! wants next is appended. Until a branch is kept nothing is committed, so nothing of the others is ever published.
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
//! let mut tree = DraftTree::new();
//! // Two guesses at each place, one of which is right: the first branch is wrong in its second token.
//! for round in 0..2 {
//!     let last = engine.tokens(seq)?.last().expect("it has tokens").raw();
//!     // The root is the last token, which has no K and V yet. Two tokens follow it, and one follows each of those.
//!     let parents = [0, 0, 0, 1, 2];
//!     let drafts = [last + 50, last + 1, last + 51, last + 2].map(TokenId::new);
//!     tree.set(engine.planned_len(seq)?, &parents)?;
//!
//!     engine.append(seq, &drafts)?;
//!     let items = [Extend { seq, len: 5 }];
//!     let plan = engine.plan_drafts(&mut scratch, &items, &[tree.draft(seq)])?;
//!     assert_eq!(plan.positions[0] + 2, plan.positions[4]); // by depth: for the model's own use
//!     // store_cache and attend as ever. One row of logits for each token: what follows it on its branch.
//!     let wanted: Vec<_> = plan.tokens.iter().map(|&token| model(token)).collect();
//!     let (step, tokens) = (plan.step(), plan.tokens.to_vec());
//!
//!     // From the root down, to whichever child is what the model wants.
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
//! assert_eq!(tokens, (0..13).collect::<Vec<_>>()); // three a step, with one right guess of two
//! let stats = engine.stats();
//! assert_eq!((stats.drafts, stats.draft_tokens, stats.accepted_tokens), (2, 2 * 4, 2 * 2));
//! engine.verify()?;
//! # Ok(())
//! # }
//! ```
//!
//! A chain needs no masks, and any attention serves it, windows too: [`Draft::chain`](crate::Draft::chain). What is
//! kept of it is a run from its start, and nothing is moved. A host may also plan it with `plan_batch` as tokens like
//! others, and [`rollback`](crate::Engine::rollback) those that are wrong *before* the commit, which would publish
//! them.
//!
//! What is said need not be greedy: where each place is drawn with the noise that it would have without drafts, what is
//! said with drafts is what would be said without. `crates/server` does so (`--draft`), with drafts from the text
//! itself.
//!
//! A server keeps the branches of all its sequences at once: [`accept_batch`](crate::Engine::accept_batch). Where a
//! step fails, [`abort`](crate::Engine::abort) it, and roll the drafts back: they are tokens like others then.
//!
//! [`Stats`](crate::Stats) counts drafts, their guessed tokens, and the guesses that were kept: what a drafter is
//! worth. A lone root is the token sampled last, which is no guess; of several roots each is a guess of that token.
//!
//! Positions of a tree count its depth, so no sliding window serves it: a model with windows is drafted for in chains,
//! and a backend that such a layer was prepared on refuses trees before anything of them runs.
//!
//! What is published cannot be rolled back: the answer is `RollbackLen`.
//!
//! Not here: an edited turn of a conversation, which is a new prompt: the cache finds what is still the same.
