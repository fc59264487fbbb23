//! The fingerprint of a model's pages, and the space of a namespace.

use std::ops::Range;

use kvarena::hash::{Hashing, NamespaceNames};
use kvarena::id::LayerId;
use kvarena::layout::{KvScales, KvShape, LabelChannels, PoolLayout, Reach};
use sha2::{Digest, Sha256};

use crate::check::Secret;
use crate::name::{Fingerprint, Space};

/// Purpose of the key of spaces. Checks use the secret itself.
const SPACES: &str = "kvarena-tiers v1 spaces";

/// Everything that gives the bytes of a page their meaning. Two hosts with equal identities read each other's records.
#[derive(Clone, Debug)]
pub struct Identity<'a> {
    /// Digest of the model's weights and config.
    pub weights: [u8; 32],
    /// Recipe of the page hashes, with its parameter.
    pub hashing: Hashing,
    /// Layout of a rank's pages.
    pub layout: &'a PoolLayout,
    /// Static scales of the pool.
    pub scales: Option<&'a KvScales>,
    /// Channels of the pool's labels.
    pub labels: Option<&'a LabelChannels>,
    /// Parameters of the rotary embedding, as the host writes them.
    pub rope: &'a str,
    /// Layers of the model on this rank.
    pub layers: Range<u32>,
    /// Heads of K and V on this rank.
    pub heads: Range<u32>,
    /// Heads of K and V of the model.
    pub heads_of_model: u32,
    /// Text for the numerics of the host's kernels, such as `cuda` or `cpu`. Hosts with one text accept each other's
    /// rounding.
    pub numerics: &'a str,
}

impl Identity<'_> {
    /// Returns the fingerprint: SHA-256 of all fields, each with its name and length. O(layers and scales).
    ///
    /// Latent rows have no range of heads, because all ranks store the same rows. Each rank has its own states.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut all = Fields(Sha256::new());
        all.bytes("format", b"kvarena v1");
        all.bytes("weights", &self.weights);
        all.bytes("hashing", format!("{:?}", self.hashing).as_bytes());
        all.bytes("rope", self.rope.as_bytes());
        all.bytes("numerics", self.numerics.as_bytes());
        all.numbers("layers", [self.layers.start, self.layers.end]);
        let is_latent =
            self.layout.views().all(|view| view.is_latent()) && self.layout.groups().state_parts().is_empty();
        let heads = [self.heads.start, self.heads.end, self.heads_of_model];
        all.numbers("heads", if is_latent { [0; 3] } else { heads });
        self.layout_fields(&mut all);
        let scales = self.scales.map_or(&[][..], KvScales::values);
        all.numbers("scales", scales.iter().map(|scale| scale.to_bits()));
        all.numbers("labels", self.labels.map_or(&[][..], LabelChannels::values).iter().copied());
        Fingerprint(all.0.finalize().into())
    }

    /// Returns the fingerprint of each of `ranks` ranks, for the identity of the first. All ranks have as many heads.
    ///
    /// Ranks of latent rows have equal fingerprints, and share their records: a store gets the pages of the first of
    /// them alone. So the [extra bytes](kvarena::PoolConfig::extra_bytes) of their pages must be equal, or be values
    /// that each of these ranks can use.
    pub fn of_ranks(&self, ranks: u32) -> Vec<Fingerprint> {
        let (heads, first) = (self.heads.end - self.heads.start, self.heads.start);
        let of = |rank: u32| first + rank * heads..first + (rank + 1) * heads;
        (0..ranks).map(|rank| Identity { heads: of(rank), ..self.clone() }.fingerprint()).collect()
    }

    fn layout_fields(&self, all: &mut Fields) {
        let (layout, groups) = (self.layout, self.layout.groups());
        all.numbers("pages", [layout.page_size(), layout.layers(), groups.count(), layout.extra_bytes()]);
        all.bytes("page bytes", &layout.page_bytes().to_le_bytes());
        let layers = (0..layout.layers()).map(LayerId::new);
        all.numbers("groups of layers", layers.map(|layer| layout.place(layer).group));
        for group in 0..groups.count() {
            let reach = match groups.reach(group) {
                Reach::Window(tokens) => [1, tokens],
                Reach::Chunk(tokens) => [2, tokens],
                Reach::State => [3, 0],
                _ => [0, 0],
            };
            all.numbers("reach", reach);
            let view = layout.of_group(group);
            // The planes do not record which numbers form V.
            let rank = if let KvShape::Latent { rank, .. } = view.shape() { rank } else { 0 };
            all.numbers("shape", [layout.lanes_of(group), rank]);
            for plane in view.planes() {
                all.bytes("plane", format!("{:?} {:?} {:?}", plane.name, plane.dtype, plane.order).as_bytes());
                all.numbers("plane", [plane.heads, plane.elements]);
            }
        }
        let parts = groups.state_parts().iter();
        all.numbers("state", parts.flat_map(|part| [part.heads, part.head_bytes]));
    }
}

/// A digest of named fields.
struct Fields(Sha256);

impl Fields {
    fn bytes(&mut self, name: &str, value: &[u8]) {
        for part in [name.as_bytes(), value] {
            self.0.update((part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
    }

    fn numbers(&mut self, name: &str, numbers: impl IntoIterator<Item = u32>) {
        let bytes: Vec<u8> = numbers.into_iter().flat_map(u32::to_le_bytes).collect();
        self.bytes(name, &bytes);
    }
}

impl Space {
    /// Returns the space of a namespace: keyed BLAKE3 of its names. Without a secret, the key is zeros.
    ///
    /// A namespace without names is the default namespace, whose space is zeros.
    pub fn of(names: &NamespaceNames, secret: Option<&Secret>) -> Self {
        let NamespaceNames { lora, lora_path, salt } = names;
        let names = [lora, lora_path, salt];
        if names.iter().all(|name| name.is_none()) {
            return Self::default();
        }
        let mut hasher = blake3::Hasher::new_keyed(&secret.map_or([0; 32], |secret| secret.derive(SPACES)));
        for name in names {
            hasher.update(&[u8::from(name.is_some())]);
            let name = name.as_deref().unwrap_or_default();
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
        }
        let mut space = [0; 16];
        hasher.finalize_xof().fill(&mut space);
        Self(space)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use kvarena::layout::{Groups, StatePart};
    use kvarena::{KvDtype, PoolConfig};

    use super::*;

    fn groups(reach: Reach, layers: &[u8]) -> Groups {
        Groups::new(&[Reach::All, reach], layers).expect("valid groups")
    }

    fn identity(layout: &PoolLayout) -> Identity<'_> {
        Identity {
            weights: [1; 32],
            hashing: Hashing::SglangSha256,
            layout,
            scales: None,
            labels: None,
            rope: "theta 10000",
            layers: 0..4,
            heads: 0..2,
            heads_of_model: 2,
            numerics: "cpu",
        }
    }

    #[test]
    fn every_input_changes_the_fingerprint() {
        let (shape, dtype) = (KvShape::heads(2, 64), KvDtype::Bf16);
        let pool = PoolConfig { layers: 4, shape, dtype, page_size: 16, ..PoolConfig::default() };
        let latent_pool = PoolConfig { shape: KvShape::Latent { rank: 192, rope: 64 }, ..pool };
        let layouts = [
            pool,
            PoolConfig { layers: 5, ..pool },
            PoolConfig { page_size: 32, ..pool },
            PoolConfig { dtype: KvDtype::F16, ..pool },
            PoolConfig { dtype: KvDtype::Fp8E4M3, ..pool },
            PoolConfig { shape: KvShape::heads(4, 32), ..pool },
            latent_pool,
            PoolConfig { shape: KvShape::Latent { rank: 128, rope: 128 }, ..pool },
            PoolConfig { groups: groups(Reach::Window(16), &[0, 1, 0, 1]), ..pool },
            PoolConfig { groups: groups(Reach::Window(32), &[0, 1, 0, 1]), ..pool },
            PoolConfig { groups: groups(Reach::Chunk(32), &[0, 1, 0, 1]), ..pool },
            PoolConfig { groups: groups(Reach::Chunk(32), &[0, 0, 1, 1]), ..pool },
        ];
        let layouts = layouts.map(|pool| pool.layout().expect("a valid pool"));
        let scales = KvScales::new(4, 2, vec![0.5; 16]).expect("valid scales");
        let base = identity(&layouts[0]);
        let mut all: Vec<_> = layouts.iter().map(|layout| Identity { layout, ..base.clone() }).collect();
        all.push(Identity { weights: [2; 32], ..base.clone() });
        all.push(Identity { hashing: Hashing::VllmSha256Cbor, ..base.clone() });
        all.push(Identity { scales: Some(&scales), ..base.clone() });
        all.push(Identity { rope: "theta 1e6", ..base.clone() });
        all.push(Identity { layers: 4..8, ..base.clone() });
        all.push(Identity { heads: 2..4, ..base.clone() });
        all.push(Identity { heads_of_model: 4, ..base.clone() });
        all.push(Identity { numerics: "cuda", ..base.clone() });
        let prints: HashSet<_> = all.iter().map(|identity| identity.fingerprint()).collect();
        assert_eq!(prints.len(), all.len());
        // All ranks store the same latent rows.
        let latent = Identity { layout: &layouts[6], ..base };
        assert_eq!(Identity { heads: 2..4, ..latent.clone() }.fingerprint(), latent.fingerprint());
        let part = StatePart { heads: 2, head_bytes: 64 };
        let states = groups(Reach::State, &[0, 1, 0, 1]).with_state(1, &[part]).expect("a valid state");
        let layout = PoolConfig { groups: states, ..latent_pool }.layout().expect("a valid pool");
        let latent = Identity { layout: &layout, ..latent };
        assert!(Identity { heads: 2..4, ..latent.clone() }.fingerprint() != latent.fingerprint());
    }

    #[test]
    fn ranks_have_different_fingerprints() {
        let pool = PoolConfig { shape: KvShape::heads(2, 64), ..PoolConfig::default() };
        let layout = pool.layout().expect("a valid pool");
        let of = |ranks: u32| Identity { heads_of_model: 2 * ranks, ..identity(&layout) }.of_ranks(ranks);
        let all: Vec<_> = [1, 2, 4].into_iter().flat_map(of).collect();
        assert_eq!((all.len(), all.iter().collect::<HashSet<_>>().len()), (7, 7));
        assert_eq!(of(1), [identity(&layout).fingerprint()]);
        // Rank 1 of 2 is the second half of the heads.
        let second = Identity { heads: 2..4, heads_of_model: 4, ..identity(&layout) };
        assert_eq!(of(2)[1], second.fingerprint());
        let layout = PoolConfig { shape: KvShape::Latent { rank: 192, rope: 64 }, ..pool }.layout();
        let layout = layout.expect("a valid pool");
        assert_eq!(identity(&layout).of_ranks(2), [identity(&layout).fingerprint(); 2]);
    }

    #[test]
    fn namespaces_have_different_spaces() {
        let some = |name: &str| Some(name.to_owned());
        let all = [
            NamespaceNames::default(),
            NamespaceNames { salt: some(""), ..Default::default() },
            NamespaceNames { salt: some("ab"), ..Default::default() },
            NamespaceNames { lora: some("ab"), ..Default::default() },
            NamespaceNames { lora: some("a"), lora_path: some("b"), ..Default::default() },
            NamespaceNames { lora: some("a"), salt: some("b"), ..Default::default() },
        ];
        let spaces = |secret: Option<&Secret>| all.iter().map(|names| Space::of(names, secret)).collect::<HashSet<_>>();
        let (open, keyed) = (spaces(None), spaces(Some(&Secret::new([3; 32]))));
        assert_eq!([open.len(), keyed.len()], [all.len(); 2]);
        assert_eq!(open.intersection(&keyed).collect::<Vec<_>>(), [&Space::default()]);
    }
}
