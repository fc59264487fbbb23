//! Changes to the tables: one verb per file, free functions over the tables that they touch.
//!
//! A system that the engine calls takes an access list: a struct with a field for each table, `&` to read and `&mut` to
//! write. Its constructor `of` borrows them from a [`World`](crate::world::World). Systems that other systems call take
//! the tables as arguments. `tests/tidy.rs` compares both with this table, which is in the order of a step:
//!
//! | system | pages | prefixes | sequences | steps | fence |
//! |---|---|---|---|---|---|
//! | [`admit`], `resume`: match, lock, take a row | reads | writes | writes | | writes |
//! | [`leader`]: who computes what a prompt needs | | reads | reads | | |
//! | [`page_budget`]: how many pages a call may take | reads | reads | reads | | reads |
//! | [`promise`]: set pages aside, or give them back | reads | reads | writes | | reads |
//! | [`reclaim`]: evict no more pages than are lacking | writes | writes | | | |
//! | [`plan_batch`]: take pages, write the plan | writes | writes | writes | writes | reads |
//! | [`plan_drafts`]: refuse drafts, or write what they see | | | writes | writes | |
//! | [`find_spans`]: what several rows read from the same pages | | writes | reads | | |
//! | [`packed`], [`packed_levels`]: the same batch in FlashInfer's contract | | | reads | reads | |
//! | [`append`]: tokens become known | | | writes | | |
//! | [`accept`]: of drafts a branch is kept | writes | | writes | writes | writes |
//! | [`commit`]: tokens have K and V, whole pages become matchable | writes | writes | writes | writes | writes |
//! | [`publish`]: whole pages into the tree, duplicates out | writes | writes | writes | | writes |
//! | [`complete`]: the fence returns what waited | writes | writes | | writes | writes |
//! | [`abort`]: undo plans | writes | | writes | writes | writes |
//! | [`finish`], `preempt`: release everything | writes | writes | writes | | writes |
//! | [`fork`]: share a prefix, copy a tail | writes | writes | writes | writes | writes |
//! | [`rollback`]: forget tokens | writes | | writes | writes | writes |
//! | [`release`]: pages and locks, at once or through the fence | writes | writes | | | writes |
//! | [`reset`]: forget what is cached | writes | writes | | | |
//!
//! Each decides before its first write: an error leaves the tables as they were.

mod access;

pub mod abort;
pub mod accept;
pub mod admit;
pub mod append;
pub mod commit;
pub mod complete;
pub mod find_spans;
pub mod finish;
pub mod fork;
pub mod leader;
pub mod packed;
pub mod packed_levels;
pub mod page_budget;
pub mod plan_batch;
pub mod plan_drafts;
pub mod promise;
pub mod publish;
pub mod reclaim;
pub mod release;
pub mod reset;
pub mod rollback;
