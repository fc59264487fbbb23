//! The kernels of benches/gpu/ptx/kernels.toml. ptx/build.py generates this file.

use kvarena::backend::cuda::{Archive, Kernel};

macro_rules! archive {
    ($name:literal) => {
        Archive::new($name, include_bytes!(concat!("ptx/out/", $name, ".zst")))
    };
}

static CEILINGS: Archive = archive!("ceilings");

/// All kernels, in the order of the table.
#[rustfmt::skip]
pub static KERNELS: [Kernel; 2] = [
    Kernel::new("ceiling_copy", &CEILINGS, 256, 0).of("ceilings"),
    Kernel::new("ceiling_read", &CEILINGS, 256, 0).of("ceilings"),
];

pub const CEILING_COPY: &Kernel = &KERNELS[0];
pub const CEILING_READ: &Kernel = &KERNELS[1];
