//! Changes to the tables: each file is one operation, as free functions over tables.
//!
//! A system that the engine calls takes an access list: a struct with `&` of each table that it reads and `&mut` of
//! each that it writes. Its constructor `of` borrows them from a [`World`](crate::world::World). Systems that other
//! systems call take the tables as arguments. This table lists all systems in the order of a step; `tests/tidy.rs`
//! compares it with their access lists and arguments:
//!
//! | system | pages | prefixes | sequences | steps | fence |
//! |---|---|---|---|---|---|
//! | [`admit`], `resume`: match, lock, take a row | reads | writes | writes | | writes |
//! | [`leader`]: find the sequence that computes a prompt's tokens | | reads | reads | | |
//! | [`page_budget`]: count the pages that a call may take | reads | reads | reads | | reads |
//! | [`promise`]: set pages aside, or give them back | reads | reads | writes | | reads |
//! | [`reclaim`]: evict the missing pages | writes | writes | | | |
//! | [`load`]: take pages to load from swap memory | writes | writes | writes | | reads |
//! | [`plan_batch`]: take pages, write the plan | writes | writes | writes | writes | reads |
//! | [`plan_drafts`]: check drafts, write their masks | | | writes | writes | |
//! | [`find_spans`]: find pages that several rows read | | writes | reads | | |
//! | [`packed`], [`packed_levels`]: write the batch in FlashInfer's format | | | reads | reads | |
//! | [`append`]: add known tokens | | | writes | | |
//! | [`accept`]: keep a branch of drafts | writes | | writes | writes | writes |
//! | [`commit`]: advance `cached_len`, make whole pages matchable | writes | writes | writes | writes | writes |
//! | [`publish`]: insert whole pages into the tree, release duplicates | writes | writes | writes | | writes |
//! | [`tails`]: make cells of a row's pages, give held places back | | writes | | | writes |
//! | [`states`]: make cells of a row's states at marks, leave places | writes | writes | writes | writes | writes |
//! | [`mark`]: keep tails where prompts can match | writes | writes | writes | writes | writes |
//! | [`complete`]: return pages and locks from the fence | writes | writes | | writes | writes |
//! | [`abort`]: undo plans | writes | | writes | writes | writes |
//! | [`finish`], `preempt`: release everything | writes | writes | writes | | writes |
//! | [`fork`]: share a prefix, copy the last page | writes | writes | writes | writes | writes |
//! | [`rollback`]: forget tokens | writes | | writes | writes | writes |
//! | [`release`]: release pages and locks, at once or through the fence | writes | writes | | | writes |
//! | [`reset`]: drop cached prefixes | writes | writes | | | |
//!
//! Each system checks before its first write, so an error leaves the tables unchanged.

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
pub mod load;
pub mod mark;
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
pub mod states;
pub mod tails;
