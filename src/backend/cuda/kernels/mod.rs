//! The kernels: generated PTX in the crate, with an archive for each family.
//!
//! ```text
//! ptx/kernels.toml -- ptx/build.py --> ptx/out/*.zst, table
//!
//! kernel     an entry of a PTX text, its launch, and the attention that it serves
//! table      all kernels (generated)
//! archive    texts of a family, compressed
//! marks      instructions of newer devices in a text
//! params     structs that kernels take by value
//! compiled   the modules of a `Gpu`: the driver compiles each text after `marks` has replaced its marks
//! selection  compute capability, pool and step -> kernels of attention
//! ```
//!
//! The driver compiles a text when one of its entry points is first needed. Each attention kernel has its own text, so
//! a pool waits only for the kernels that it uses. The CUDA sources are in `ptx/src`.

mod archive;
mod compiled;
mod kernel;
mod marks;
pub(super) mod params;
mod selection;
mod table;

pub use archive::Archive;
pub use compiled::Function;
pub use kernel::Kernel;

pub(super) use compiled::Compiled;
pub(super) use kernel::{Cache, Extra, Step};
pub(super) use selection::{Decodes, Latent, Selection, Shared, extend_rows_min};
pub(super) use table::*;
