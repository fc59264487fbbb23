//! The fingerprint of a page format. Pages can move between pools with equal fingerprints.

use super::format::Format;
use super::groups::Reach;
use super::labels::LabelChannels;
use super::pool::PoolLayout;
use super::scales::KvScales;
use super::shape::KvShape;
use crate::id::LayerId;

/// FNV-1a with 64 bits, which is stable across machines and runs.
struct Fnv(u64);

impl Fnv {
    fn take(&mut self, number: u32) {
        for byte in number.to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn take_format(&mut self, format: &Format) {
        for plane in format.planes.as_slice() {
            let kinds = [plane.name as u32, plane.dtype as u32, plane.order as u32];
            kinds.into_iter().chain([plane.heads, plane.elements]).for_each(|x| self.take(x));
        }
        // The planes do not record which numbers form V.
        if let KvShape::Latent { rank, .. } = format.shape {
            self.take(rank);
        }
    }
}

impl PoolLayout {
    /// Returns a hash of the format and meaning of a page's bytes, equal in every process. O(planes, layers, scales and
    /// channels).
    ///
    /// It covers the planes, the layers and their groups, the parts of a state, the page size, and the given scales and
    /// label channels. The caller passes the scales and channels of this pool. The hash does not cover the
    /// [`Layout`](crate::layout::Layout) or the number of pages. It also does not cover which of a model's heads the
    /// pool contains, so without scales and labels it is equal for all ranks.
    pub fn page_fingerprint(&self, scales: Option<&KvScales>, labels: Option<&LabelChannels>) -> u64 {
        let mut all = Fnv(0xcbf2_9ce4_8422_2325);
        all.take(self.layers());
        all.take(self.page_size());
        // The tokens that each further group reads, and the group's layers.
        let state = self.groups().state_group().map(|group| (group, Reach::State));
        let sharing = (1..self.groups().count()).filter(|&group| self.groups().shares_pages(group));
        let sharing = sharing.map(|group| (group, Reach::All));
        for (group, reach) in self.groups().limited().chain(state).chain(sharing) {
            let (kind, size) = match reach {
                Reach::All => (0, 0),
                Reach::Window(size) => (1, size),
                Reach::Chunk(size) => (2, size),
                Reach::State => (3, 0),
            };
            [group, kind, size].into_iter().for_each(|x| all.take(x));
            let layers = (0..self.layers()).map(LayerId::new);
            let own = layers.filter(|&layer| self.groups().group(layer) == group);
            own.for_each(|layer| all.take(layer.raw()));
        }
        all.take_format(&self.formats[0]);
        for group in (1..self.groups().count()).filter(|&group| self.groups().shape(group).is_some()) {
            all.take(group);
            all.take_format(&self.formats[group as usize]);
        }
        if self.extra_bytes > 0 {
            all.take(self.extra_bytes);
        }
        let parts = self.groups().state_parts().iter();
        parts.flat_map(|part| [part.heads, part.head_bytes]).for_each(|x| all.take(x));
        let scales = scales.filter(|scales| !scales.are_ones());
        scales.into_iter().flat_map(KvScales::values).for_each(|scale| all.take(scale.to_bits()));
        let channels = labels.into_iter().flat_map(LabelChannels::values);
        channels.for_each(|&channel| all.take(channel));
        all.0
    }
}
