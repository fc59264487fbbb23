//! Element types of the host's rows ([`Dtype`]) and of the pool ([`KvDtype`]), and the source of the scales of a
//! quantised pool ([`Scaling`]).

/// Element type of rows: q, k, v, and attention's output.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE binary32, 4 bytes.
    F32,
    /// IEEE binary16, 2 bytes.
    F16,
    /// bfloat16, 2 bytes.
    Bf16,
}

impl Dtype {
    /// Returns the number of bytes of an element.
    pub const fn size(self) -> u32 {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }
}

/// Element type of a pool's K and V, or of a plane.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum KvDtype {
    /// IEEE binary32, 4 bytes.
    F32,
    /// IEEE binary16, 2 bytes.
    F16,
    /// bfloat16, 2 bytes.
    Bf16,
    /// OCP fp8 with 4 bits of exponent and 3 of mantissa (E4M3 "fn": no infinities, maximum 448), 1 byte, times a scale
    /// ([`Scaling`]). The store divides a number by its scale, in f32, and rounds to nearest even. Numbers beyond 448
    /// and infinities become 448 with their sign. NaN becomes 0x7f, which reads as NaN.
    #[cfg_attr(feature = "serde", serde(rename = "fp8_e4m3"))]
    Fp8E4M3,
}

impl KvDtype {
    /// Returns the number of bytes of an element.
    pub const fn size(self) -> u32 {
        match self {
            KvDtype::F32 => 4,
            KvDtype::F16 | KvDtype::Bf16 => 2,
            KvDtype::Fp8E4M3 => 1,
        }
    }

    /// Returns whether elements are multiples of a scale, so that a store rounds rows.
    pub const fn is_quantised(self) -> bool {
        matches!(self, KvDtype::Fp8E4M3)
    }

    /// Returns the element type of rows that can contain the elements exactly, without their scale.
    pub const fn rows(self) -> Dtype {
        match self {
            KvDtype::F32 => Dtype::F32,
            KvDtype::F16 => Dtype::F16,
            KvDtype::Bf16 | KvDtype::Fp8E4M3 => Dtype::Bf16,
        }
    }
}

/// The source of the scales of a quantised pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Scaling {
    /// One scale for each layer, head, and K and V, given when the backend is opened ([`KvScales`](super::KvScales)).
    /// The default is 1.
    #[default]
    Static,
    /// One scale for each token, layer, head, and K and V. The store computes it: the maximum of the finite absolute
    /// values, divided by 448, at least 2^-126. It is 1 if the maximum is 0.
    ByToken,
}

impl From<Dtype> for KvDtype {
    /// Returns the type of a pool that stores rows unchanged.
    fn from(rows: Dtype) -> Self {
        match rows {
            Dtype::F32 => KvDtype::F32,
            Dtype::F16 => KvDtype::F16,
            Dtype::Bf16 => KvDtype::Bf16,
        }
    }
}
