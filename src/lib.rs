//! The KV-cache core of an LLM serving engine.

pub mod backend;
pub mod config;
pub mod engine;
pub mod error;
pub mod id;
pub mod layout;
pub mod plan;
#[cfg(any(test, feature = "testkit"))]
pub mod testkit;

pub use backend::{Attend, Backend, Cpu, Null};
pub use config::{EngineConfig, EngineShape, PrefixMode};
pub use engine::{Engine, Forked, Keep, PrefixMatch, Stats};
pub use error::{ConfigError, EngineError, Error};
pub use id::{
    LayerId, Namespace, NodeKey, PageId, PrefixLock, RowId, Scope, SeqKey, SlotId, StepId, TokenId,
};
pub use layout::{Capacity, Dtype, Kv, Layout, PoolConfig, PoolLayout, TableShape};
pub use plan::{
    BatchPlan, BatchRow, Extend, OwnedPlan, PackedPlan, PageCopy, SlotMapping, StepScratch,
    TableWrite,
};
