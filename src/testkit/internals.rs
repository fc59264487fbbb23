//! Tables and a system of the engine, for benches that measure them alone. They are no stable interface.

pub use crate::backend::step_states::{StateColumns, StepStates};
pub use crate::fence::Fence;
pub use crate::page::PagePool;
pub use crate::prefix::PrefixTree;
pub use crate::system::reclaim::reclaim;
