//! What a host sees of the crate, one subject a file, in one binary so that it is linked once. Tests with an allocator
//! of their own, and those of the repository and of GPUs, stand beside this folder.

mod attention;
mod bench_work;
mod config;
mod drafts;
mod ended_steps;
mod engine;
mod errors;
mod events;
mod faults;
mod fork;
mod groups;
mod layout;
mod leaders;
mod packed;
mod plan_bytes;
mod plan_scratch;
mod promise;
mod read_plan;
mod record_bytes;
mod refusals;
mod regression;
mod replay;
mod small_cpu;
mod trees;
