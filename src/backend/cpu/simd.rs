//! Instruction sets: which of them the machine has, which one computes, and the operations that differ between them.
//!
//! `pulp` checks what the machine has and calls the instructions. Its vectors have as many lanes as a set's registers;
//! code that is generic over [`Lanes`] is compiled once for each set, with the operations of `simd/`. The portable
//! path has no vectors here: its code is in `math.rs`.
//!
//! Not here: what is computed (`fold.rs`).

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
    /// The paths that this machine has, slowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|&path| Isa::new(path).is_ok())
    }
}

/// A path, with the proof that the machine has its instructions.
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
    /// The path that an option names, else the environment, else the fastest.
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

    /// The path of conversions, which belong to no backend and give the same bits on each.
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
            _ if cfg!(miri) => None, // Miri has no such instructions
            #[cfg(target_arch = "x86_64")]
            CpuPath::Avx2 if is_x86_feature_detected!("f16c") => {
                pulp::x86::V3::try_new().map(Self::Avx2)
            }
            #[cfg(target_arch = "x86_64")]
            CpuPath::Avx512 if is_x86_feature_detected!("avx512vbmi") => {
                pulp::x86::V4::try_new().map(Self::Avx512)
            }
            #[cfg(target_arch = "aarch64")]
            CpuPath::Neon => pulp::aarch64::Neon::try_new().map(Self::Neon),
            #[allow(unreachable_patterns)] // an architecture may have all of them
            _ => None,
        };
        isa.ok_or(CpuError::Path { path })
    }

    /// Whether it has vectors.
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

    /// Runs an operation with the path's vectors; returns it where the path has none.
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

/// A computation that is compiled for each set. Functions with vectors have to be inlined into it; closures are not for
/// certain, so none of them has vectors.
pub(super) trait Op {
    fn go<S: Lanes>(self, s: S);
}

/// An operation to call where `pulp` has enabled a set's instructions.
struct Call<S, O>(S, O);

impl<S: Lanes, O: Op> NullaryFnOnce for Call<S, O> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.1.go(self.0);
    }
}

/// The vectors of a set.
pub(super) trait Lanes: Simd {
    /// Vectors of a row of results that are held in registers beside those of three other rows.
    const HELD: usize;

    /// One number of 16 bits in each lane.
    fn halves(self, numbers: &[u16]) -> Self::u32s;

    /// The sum of each vector's lanes; its order depends on the set alone.
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

/// Reads a vector's worth of bytes.
#[inline(always)]
pub(super) fn load<V: bytemuck::Pod, T: bytemuck::Pod>(numbers: &[T]) -> V {
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(numbers))
}
