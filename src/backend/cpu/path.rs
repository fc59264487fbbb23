//! The names of the instruction sets of the CPU backend. `simd.rs` detects them.

/// The environment variable that names the path if [`CpuOptions::path`](super::CpuOptions::path) is `None`.
pub const PATH_VARIABLE: &str = "KVARENA_CPU_PATH";

/// The instruction set of a [`Cpu`](super::Cpu). Results of two paths differ by rounding.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum CpuPath {
    /// Code for the crate's compile target. Always available.
    Portable,
    /// AVX2 with FMA and F16C, 8 numbers at a time.
    Avx2,
    /// AVX-512 (F, BW, CD, DQ, VL, VBMI), 16 numbers at a time: Intel from Ice Lake on, AMD from Zen 4 on.
    Avx512,
    /// Advanced SIMD of ARMv8, 4 numbers at a time. CI compiles this path and does not run it.
    Neon,
}

impl CpuPath {
    /// All paths, slowest first.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512];

    /// Returns the path's name in [`PATH_VARIABLE`]: `portable`, `avx2`, `avx512` or `neon`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Neon => "neon",
        }
    }
}
