//! The KV-cache core of an LLM serving engine.

pub mod backend;
mod bitmap;
pub mod config;
pub mod engine;
pub mod error;
pub mod id;
pub mod layout;
pub mod page;
pub mod plan;
#[cfg(any(test, feature = "testkit"))]
pub mod testkit;
pub mod prefix;
pub mod sequence;
pub mod step;
pub mod system;
pub mod world;

pub use backend::{Attend, Backend, Cpu, Null};
pub use config::{EngineConfig, EngineShape, PrefixMode};
pub use engine::{Engine, Keep, Stats};
pub use error::{ConfigError, EngineError, Error};
pub use id::{
    LayerId, Namespace, NodeKey, PageId, PrefixLock, RowId, Scope, SeqKey, SlotId, StepId, TokenId,
};
pub use layout::{Capacity, Dtype, Kv, Layout, PoolConfig, PoolLayout, TableShape};
pub use plan::{
    BatchPlan, BatchRow, Extend, OwnedPlan, PackedPlan, PageCopy, SlotMapping, StepScratch,
    TableWrite,
};
pub use prefix::PrefixMatch;
pub use system::fork::Forked;
pub use world::Broken;
