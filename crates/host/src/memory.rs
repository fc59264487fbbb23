//! Reports the memory of a long sequence, with and without groups of layers.

use std::fmt::Write;

use kvarena::layout::{PoolLayout, Reach};

/// Tokens of the sequence.
const TOKENS: u32 = 8192;

/// Returns a line about the memory of a sequence of 8,192 tokens, if there are groups of layers.
pub fn report(layout: &PoolLayout) -> Option<String> {
    let groups = layout.groups();
    if groups.count() == 1 {
        return None;
    }
    let bytes = |group| layout.sequence_bytes(group, TOKENS);
    let all: u64 = (0..groups.count()).map(bytes).sum();
    let places = bytes(0) / layout.page_bytes();
    let kept = |group| {
        if Some(group) == groups.state_group() {
            return bytes(group); // A state has one size in any pool.
        }
        let lanes = layout.page_bytes() - layout.unused_bytes(group);
        places * lanes / u64::from(layout.lanes_of(group)) * u64::from(groups.layers_of(group))
    };
    let one = (0..groups.count()).map(kept).sum();
    let [all, one] = [all, one].map(megabytes);
    let mut line = format!("{TOKENS} tokens of a sequence take {all} MB, {one} without groups of layers");
    for group in 0..groups.count() {
        let (layers, reach) = (groups.layers_of(group), groups.reach(group));
        let what = if reach == Reach::State { "keep" } else { "read" };
        _ = write!(line, "; {layers} layers that {what} {reach}: {}", megabytes(bytes(group)));
    }
    Some(line + "\n")
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use kvarena::layout::{Groups, Reach};
    use kvarena::{KvDtype, KvShape, PoolConfig};

    use super::report;

    #[test]
    fn gemma_3_27b_takes_less_than_a_third() {
        let layers: Vec<u8> = (1..=62).map(|layer| u8::from(layer % 6 > 0)).collect();
        let groups = Groups::new(&[Reach::All, Reach::Window(1024)], &layers).expect("two groups");
        let pool = PoolConfig {
            layers: 62,
            groups,
            shape: KvShape::heads(16, 128),
            dtype: KvDtype::Bf16,
            ..PoolConfig::default()
        };
        let line = report(&pool.layout().expect("a pool"));
        let want = "8192 tokens of a sequence take 1174.4 MB, 4160.7 without groups of layers; 10 layers that read \
                    everything: 671.1; 52 layers that read a window of 1024: 503.3\n";
        assert_eq!(line.as_deref(), Some(want));
        let own = groups.with_shape(1, KvShape::heads(16, 64), KvDtype::Bf16);
        let own = PoolConfig { groups: own.expect("there is group 1"), ..pool };
        let line = report(&own.layout().expect("a pool")).expect("two groups");
        // 10 layers of 67.1 MB, and 52 of half as much.
        assert!(line.contains("922.7 MB, 2415.9 without groups"), "{line}");
        let plain = PoolConfig { groups: Groups::ONE, ..pool }.layout().expect("a pool");
        assert_eq!(report(&plain), None);
    }
}
