//! Element types: of what a host hands in and is given ([`Dtype`]), and of what a pool holds ([`KvDtype`]).

/// Element type of rows: q, k, v, and attention's output.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
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
    /// Bytes of one element.
    pub const fn size(self) -> u32 {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }
}

/// Element type of a pool's K and V, and of each of its planes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum KvDtype {
    /// IEEE binary32, 4 bytes.
    F32,
    /// IEEE binary16, 2 bytes.
    F16,
    /// bfloat16, 2 bytes.
    Bf16,
}

impl KvDtype {
    /// Bytes of one element.
    pub const fn size(self) -> u32 {
        match self {
            KvDtype::F32 => 4,
            KvDtype::F16 | KvDtype::Bf16 => 2,
        }
    }

    /// Element type of rows that hold its numbers exactly.
    pub const fn rows(self) -> Dtype {
        match self {
            KvDtype::F32 => Dtype::F32,
            KvDtype::F16 => Dtype::F16,
            KvDtype::Bf16 => Dtype::Bf16,
        }
    }
}

impl From<Dtype> for KvDtype {
    /// The type of a pool that holds rows as they are.
    fn from(rows: Dtype) -> Self {
        match rows {
            Dtype::F32 => KvDtype::F32,
            Dtype::F16 => KvDtype::F16,
            Dtype::Bf16 => KvDtype::Bf16,
        }
    }
}
