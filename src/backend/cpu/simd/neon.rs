//! The vectors of NEON.

use bytemuck::cast;
use pulp::aarch64::Neon;

use super::Lanes;

impl Lanes for Neon {
    const ROW_VECTORS: usize = 4;

    #[inline(always)]
    fn widen_u16(self, numbers: &[u16]) -> Self::u32s {
        pulp::u32x4(numbers[0].into(), numbers[1].into(), numbers[2].into(), numbers[3].into())
    }

    #[inline(always)]
    fn sums(self, [a, b, c, d]: [Self::f32s; 4]) -> [f32; 4] {
        let neon = self.neon;
        let (ab, cd) = (neon.vpaddq_f32(cast(a), cast(b)), neon.vpaddq_f32(cast(c), cast(d)));
        cast(neon.vpaddq_f32(ab, cd))
    }
}
