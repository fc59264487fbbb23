//! Instruction sets: detection, choice, and the operations that differ between sets.
//!
//! `pulp` detects and calls most instructions. `std` detects F16C and AVX-512 VBMI, whose instructions are assembly in
//! `simd/x86.rs`. A vector has as many lanes as a register of the set. Code that is generic over [`Lanes`] is compiled
//! once for each set, with the operations in `simd/`. The portable path has no vectors; its code is in `math.rs`.

use std::env;
use std::sync::OnceLock;

use half::f16;
use half::slice::HalfFloatSliceExt;
use pulp::{NullaryFnOnce, Simd};

use super::e4m3::E4m3;
use super::error::CpuError;
use super::path::{CpuPath, PATH_VARIABLE};

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

impl CpuPath {
    /// Returns the paths that this machine supports, slowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|&path| Isa::new(path).is_ok())
    }
}

/// An instruction set that this machine has. The value proves the detection.
#[derive(Clone, Copy, Debug)]
pub(super) enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(pulp::x86::V3),
    #[cfg(target_arch = "x86_64")]
    Avx512(pulp::x86::V4),
    #[cfg(target_arch = "aarch64")]
    Neon(pulp::aarch64::Neon),
}

impl Isa {
    /// Returns the path of `option`, or else of [`PATH_VARIABLE`], or else the fastest one.
    pub fn choose(option: Option<CpuPath>) -> Result<Self, CpuError> {
        let named = || match env::var_os(PATH_VARIABLE) {
            Some(name) if !name.is_empty() => {
                let path = CpuPath::ALL.into_iter().find(|path| name == path.name());
                path.ok_or_else(|| CpuError::PathName { name: name.to_string_lossy().into() })
            }
            _ => Ok(Self::fastest().path()),
        };
        Self::new(option.map_or_else(named, Ok)?)
    }

    /// Returns the path for conversions of numbers, chosen once for the process. Every path yields the same bits.
    pub fn of_process() -> Self {
        static ISA: OnceLock<Isa> = OnceLock::new();
        *ISA.get_or_init(|| Self::choose(None).unwrap_or_else(|_| Self::fastest()))
    }

    fn fastest() -> Self {
        let paths = CpuPath::ALL.into_iter().rev();
        paths.flat_map(Self::new).next().expect("every machine has the portable path")
    }

    fn new(path: CpuPath) -> Result<Self, CpuError> {
        let isa = match path {
            CpuPath::Portable => Some(Self::Portable),
            _ if cfg!(miri) => None, // Miri does not support these instructions.
            #[cfg(target_arch = "x86_64")]
            CpuPath::Avx2 if is_x86_feature_detected!("f16c") => pulp::x86::V3::try_new().map(Self::Avx2),
            #[cfg(target_arch = "x86_64")]
            CpuPath::Avx512 if is_x86_feature_detected!("avx512vbmi") => pulp::x86::V4::try_new().map(Self::Avx512),
            #[cfg(target_arch = "aarch64")]
            CpuPath::Neon => pulp::aarch64::Neon::try_new().map(Self::Neon),
            #[allow(unreachable_patterns)] // An architecture may support every path.
            _ => None,
        };
        isa.ok_or(CpuError::Path { path })
    }

    /// Returns whether the path uses vectors.
    pub fn is_vector(self) -> bool {
        !matches!(self, Self::Portable)
    }

    pub fn path(self) -> CpuPath {
        match self {
            Self::Portable => CpuPath::Portable,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => CpuPath::Avx2,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => CpuPath::Avx512,
            #[cfg(target_arch = "aarch64")]
            Self::Neon(_) => CpuPath::Neon,
        }
    }

    /// Runs an operation with the path's vectors, or returns the operation if the path has none.
    #[inline]
    pub fn run<O: Op>(self, op: O) -> Option<O> {
        match self {
            Self::Portable => return Some(op),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(s) => s.vectorize(Call(s, op)),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(s) => s.vectorize(Call(s, op)),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(s) => s.vectorize(Call(s, op)),
        }
        None
    }
}

/// A computation that is compiled for each set. Functions with vectors must be inlined into it. Its closures use no
/// vectors, because the compiler might not inline closures.
pub(super) trait Op {
    fn go<S: Lanes>(self, s: S);
}

/// An operation that `pulp` calls with the instructions of a set enabled.
struct Call<S, O>(S, O);

impl<S: Lanes, O: Op> NullaryFnOnce for Call<S, O> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.1.go(self.0);
    }
}

/// The vector operations of a set.
pub(super) trait Lanes: Simd {
    /// Number of result vectors of a row that are computed together. The result vectors of four rows fit the registers.
    const ROW_VECTORS: usize;

    /// Widens each number of 16 bits to a lane of 32 bits.
    fn widen_u16(self, numbers: &[u16]) -> Self::u32s;

    /// Returns the sum of each vector's lanes. Its order depends only on the set.
    fn sums(self, vectors: [Self::f32s; 4]) -> [f32; 4];

    /// Widens a vector of f16.
    #[inline(always)]
    fn f16(self, numbers: &[f16]) -> Self::f32s {
        let mut wide = [0.0; 16];
        numbers.convert_to_f32_slice(&mut wide[..numbers.len()]);
        load(&wide[..numbers.len()])
    }

    /// Widens `N` vectors of E4M3.
    #[inline(always)]
    fn e4m3<const N: usize>(self, numbers: &[E4m3]) -> [Self::f32s; N] {
        let mut wide = [0.0; 64];
        for (x, y) in numbers.iter().zip(&mut wide) {
            *y = x.to_f32();
        }
        let mut vectors = [self.splat_f32s(0.0); N];
        for n in 0..N {
            vectors[n] = load(&wide[n * Self::F32_LANES..][..Self::F32_LANES]);
        }
        vectors
    }
}

/// Reads a vector from a slice of the same size.
#[inline(always)]
pub(super) fn load<V: bytemuck::Pod, T: bytemuck::Pod>(numbers: &[T]) -> V {
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(numbers))
}
