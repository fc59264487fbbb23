//! Instruction sets: which of them the machine has, which one computes, and the operations that differ between them.
//!
//! `pulp` checks what the machine has and calls the instructions, so nothing here is unsafe. Its vectors have as many
//! lanes as a set's registers; code that is generic over [`Lanes`] is compiled once for each set. The portable path has
//! no vectors here: its code is in `math.rs`.
//!
//! Not here: what is computed (`fold.rs`).

use std::env;
use std::sync::OnceLock;

use bytemuck::cast;
use pulp::{NullaryFnOnce, Simd};

use super::error::CpuError;
use super::path::{CpuPath, PATH_VARIABLE};

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
                path.ok_or(CpuError::PathName)
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
            CpuPath::Avx2 => pulp::x86::V3::try_new().map(Self::Avx2),
            #[cfg(target_arch = "x86_64")]
            CpuPath::Avx512 => pulp::x86::V4::try_new().map(Self::Avx512),
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

    /// One number of 8 bits in each lane.
    fn bytes(self, numbers: &[u8]) -> Self::u32s;

    /// One number of 16 bits in each lane.
    fn halves(self, numbers: &[u16]) -> Self::u32s;

    /// The sum of each vector's lanes; its order depends on the set alone.
    fn sums(self, vectors: [Self::f32s; 4]) -> [f32; 4];

    /// Widens numbers of f16, by their bits.
    #[inline(always)]
    fn f16(self, numbers: &[u16]) -> Self::f32s {
        widen(self, self.halves(numbers), &F16)
    }

    /// Widens numbers of E4M3, by their bits.
    #[inline(always)]
    fn e4m3(self, numbers: &[u8]) -> Self::f32s {
        widen(self, self.bytes(numbers), &E4M3)
    }
}

#[cfg(target_arch = "x86_64")]
impl Lanes for pulp::x86::V3 {
    const HELD: usize = 2;

    #[inline(always)]
    fn bytes(self, numbers: &[u8]) -> Self::u32s {
        let [low, high] =
            [0, 4].map(|at| u32::from_le_bytes(numbers[at..at + 4].try_into().expect("4")));
        cast(self.avx2._mm256_cvtepu8_epi32(cast([low, high, 0, 0])))
    }

    #[inline(always)]
    fn halves(self, numbers: &[u16]) -> Self::u32s {
        cast(self.avx2._mm256_cvtepu16_epi32(load(numbers)))
    }

    #[inline(always)]
    fn sums(self, [a, b, c, d]: [Self::f32s; 4]) -> [f32; 4] {
        let avx = self.avx;
        let (ab, cd) = (avx._mm256_hadd_ps(cast(a), cast(b)), avx._mm256_hadd_ps(cast(c), cast(d)));
        let halves = avx._mm256_hadd_ps(ab, cd);
        let (low, high) =
            (avx._mm256_castps256_ps128(halves), avx._mm256_extractf128_ps::<1>(halves));
        cast(self.sse._mm_add_ps(low, high))
    }
}

#[cfg(target_arch = "x86_64")]
impl Lanes for pulp::x86::V4 {
    const HELD: usize = 4;

    #[inline(always)]
    fn bytes(self, numbers: &[u8]) -> Self::u32s {
        cast(self.avx512f._mm512_cvtepu8_epi32(load(numbers)))
    }

    #[inline(always)]
    fn halves(self, numbers: &[u16]) -> Self::u32s {
        cast(self.avx512f._mm512_cvtepu16_epi32(load(numbers)))
    }

    #[inline(always)]
    fn f16(self, numbers: &[u16]) -> Self::f32s {
        cast(self.avx512f._mm512_cvtph_ps(load(numbers)))
    }

    // As f16 with the same exponent and three bits of mantissa, 2^-8 of the number. What is NaN becomes 480.
    #[inline(always)]
    fn e4m3(self, numbers: &[u8]) -> Self::f32s {
        let (avx, avx2) = (self.avx, self.avx2);
        let high = avx2._mm256_slli_epi16::<8>(avx2._mm256_cvtepu8_epi16(load(numbers)));
        let exponent = avx._mm256_set1_epi16(!0x4000);
        let half = avx2._mm256_and_si256(avx2._mm256_srai_epi16::<1>(high), exponent);
        let small = cast(self.avx512f._mm512_cvtph_ps(half));
        let wide = self.mul_f32s(small, self.splat_f32s(256.0));
        let is_nan = self.greater_than_or_equal_f32s(self.abs_f32s(wide), self.splat_f32s(480.0));
        self.select_f32s(is_nan, self.splat_f32s(f32::NAN), wide)
    }

    #[inline(always)]
    fn sums(self, vectors: [Self::f32s; 4]) -> [f32; 4] {
        let v3: pulp::x86::V3 = *self;
        let [a, b, c, d]: [[pulp::f32x8; 2]; 4] = cast(vectors);
        v3.sums([
            Simd::add_f32s(v3, a[0], a[1]),
            Simd::add_f32s(v3, b[0], b[1]),
            Simd::add_f32s(v3, c[0], c[1]),
            Simd::add_f32s(v3, d[0], d[1]),
        ])
    }
}

#[cfg(target_arch = "aarch64")]
impl Lanes for pulp::aarch64::Neon {
    const HELD: usize = 4;

    #[inline(always)]
    fn bytes(self, numbers: &[u8]) -> Self::u32s {
        pulp::u32x4(numbers[0].into(), numbers[1].into(), numbers[2].into(), numbers[3].into())
    }

    #[inline(always)]
    fn halves(self, numbers: &[u16]) -> Self::u32s {
        pulp::u32x4(numbers[0].into(), numbers[1].into(), numbers[2].into(), numbers[3].into())
    }

    #[inline(always)]
    fn sums(self, [a, b, c, d]: [Self::f32s; 4]) -> [f32; 4] {
        let neon = self.neon;
        let (ab, cd) = (neon.vpaddq_f32(cast(a), cast(b)), neon.vpaddq_f32(cast(c), cast(d)));
        cast(neon.vpaddq_f32(ab, cd))
    }
}

/// Reads a vector's worth of bytes.
#[inline(always)]
pub(super) fn load<V: bytemuck::Pod, T: bytemuck::Pod>(numbers: &[T]) -> V {
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(numbers))
}

const F16: Narrow = Narrow { bits: 16, mantissa: 10, bias: 112, special: 0x7c00 };
const E4M3: Narrow = Narrow { bits: 8, mantissa: 3, bias: 120, special: 0x7f };

/// A type of numbers with fewer bits of exponent and mantissa than f32: a sign in the highest bit, exponent, mantissa.
struct Narrow {
    /// Bits of a number, and of its mantissa.
    bits: u32,
    mantissa: u32,
    /// The difference of the exponents' biases.
    bias: u32,
    /// The least number without sign that is not finite.
    special: u32,
}

/// Widens numbers of fewer bits, one in each lane, exactly. It avoids arithmetic on f32's subnormal numbers, which is a
/// hundred times slower on some machines.
#[inline(always)]
fn widen<S: Lanes>(s: S, x: S::u32s, narrow: &Narrow) -> S::f32s {
    let Narrow { bits, mantissa, bias, special } = *narrow;
    let sign = s.splat_u32s(1 << (bits - 1));
    let size = s.and_u32s(x, s.splat_u32s((1 << (bits - 1)) - 1));
    let sign = s.wrapping_dyn_shl_u32s(s.and_u32s(x, sign), s.splat_u32s(32 - bits));
    let high = s.wrapping_dyn_shl_u32s(size, s.splat_u32s(23 - mantissa));
    let normal = s.add_u32s(high, s.splat_u32s(bias << 23));
    // A subnormal number, with a first bit that is taken away again.
    let first = (bias + 1) << 23;
    let above = s.transmute_f32s_u32s(s.add_u32s(high, s.splat_u32s(first)));
    let subnormal = s.transmute_u32s_f32s(s.sub_f32s(above, s.splat_f32s(f32::from_bits(first))));
    let is_subnormal = s.less_than_u32s(size, s.splat_u32s(1 << mantissa));
    let wide = s.select_u32s(is_subnormal, subnormal, normal);
    let is_special = s.greater_than_or_equal_u32s(size, s.splat_u32s(special));
    let set = s.or_u32s(wide, s.splat_u32s(f32::INFINITY.to_bits()));
    s.transmute_f32s_u32s(s.or_u32s(s.select_u32s(is_special, set, wide), sign))
}
