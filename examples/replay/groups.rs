//! Groups of layers on the command line.

use kvarena::layout::{Groups, Reach, StatePart};

/// The groups of a model. Group 0 keeps all tokens and has one layer. A page therefore has one lane, so each layer of
/// another group has its own track.
#[derive(Clone, Debug)]
pub struct LayerGroups {
    /// The argument of the command line.
    pub text: String,
    pub groups: Groups,
    /// Number of layers of all groups together.
    pub layers: u32,
}

impl LayerGroups {
    /// Parses each group except group 0: its reach and the number of its tracks, or the pages of a state, such as
    /// `window:1024x6,chunk:8192x3,state:36`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (mut reaches, mut layers) = (vec![Reach::All], vec![0_u8]);
        for (group, part) in (1..).zip(text.split(',')) {
            let (reach, tracks) = parse_group(part)
                .ok_or_else(|| format!("{part:?} is not like window:1024x6, chunk:8192x3 or state:36"))?;
            reaches.push(reach);
            layers.extend(std::iter::repeat_n(group, tracks.into()));
        }
        let groups = Groups::new(&reaches, &layers).map_err(|error| error.to_string())?;
        Ok(Self { text: text.to_owned(), groups, layers: layers.len() as u32 })
    }

    /// Returns the groups for pages of `page_bytes` bytes. A layer's state fills a page.
    pub fn in_pages(&self, page_bytes: u32) -> Groups {
        let with_state = |group| {
            let part = StatePart { heads: 1, head_bytes: page_bytes };
            self.groups.with_state(group, &[part]).expect("the group keeps a state")
        };
        self.groups.state_group().map_or(self.groups, with_state)
    }
}

fn parse_group(text: &str) -> Option<(Reach, u8)> {
    let (kind, numbers) = text.split_once(':')?;
    if kind == "state" {
        return Some((Reach::State, numbers.parse().ok()?));
    }
    let (size, tracks) = numbers.split_once('x')?;
    let (size, tracks) = (size.parse().ok()?, tracks.parse().ok()?);
    match kind {
        "window" => Some((Reach::Window(size), tracks)),
        "chunk" => Some((Reach::Chunk(size), tracks)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_reaches_and_tracks() {
        let parsed = LayerGroups::parse("window:1024x6,chunk:8192x3").expect("two groups");
        assert_eq!(parsed.layers, 1 + 6 + 3);
        let limited: Vec<_> = parsed.groups.limited().collect();
        assert_eq!(limited, [(1, Reach::Window(1024)), (2, Reach::Chunk(8192))]);
        assert_eq!([0, 1, 2].map(|group| parsed.groups.layers_of(group)), [1, 6, 3]);
    }

    #[test]
    fn other_groups_are_refused() {
        for text in ["", "window", "window:5", "all:5x1", "window:x1", "window:5x256", "window:5x1,", "state:4x1"] {
            let error = LayerGroups::parse(text).expect_err("the text is not a list of groups");
            assert!(error.contains("is not like"), "{text}: {error}");
        }
        let four = "window:1x1,window:2x1,window:3x1,window:4x1";
        for text in
            ["window:0x1", "window:5x0", "chunk:6x1", "state:0", "state:1,state:1", "window:5x255,chunk:4x9", four]
        {
            let error = LayerGroups::parse(text).expect_err("the groups are invalid");
            assert!(!error.contains("is not like"), "{text}: {error}");
        }
    }
}
