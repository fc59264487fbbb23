//! The kernels: generated PTX within the crate, in an archive for each family.
//!
//! ```text
//! ptx/kernels.toml -- ptx/build.py --> ptx/out/*.zst, table
//!
//! kernel     an entry of a PTX text, its launch, and the attention that it serves
//! table      all kernels (generated)
//! archive    texts of a family, compressed
//! marks      instructions of newer devices in a text
//! params     structs that kernels take by value
//! loaded     a context's modules: text, marks, driver
//! selection  compute capability, pool and step -> kernels of attention
//! ```
//!
//! The driver compiles a text when one of its entries is first needed. Attention has a text for each entry, so a pool
//! waits only for its own kernels. Not here: the kernels' code (`ptx/src`), launches (`driver/launch.rs`).

mod archive;
mod kernel;
mod loaded;
mod marks;
pub(super) mod params;
mod selection;
mod table;

pub use archive::Archive;
pub use kernel::Kernel;
pub use loaded::Function;

pub(super) use kernel::{Cache, Extra, Step};
pub(super) use loaded::Loaded;
pub(super) use selection::{Decodes, Latent, Selection, Shared};
pub(super) use table::*;
