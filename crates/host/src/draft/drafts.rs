//! The drafts of one stream: a tree of guesses that follow a token.

/// A tree of tokens. Number 0 is the root, the last token of a stream. The other tokens are guesses; each has a higher
/// number than its parent.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Drafts {
    tokens: Vec<u32>,
    /// Number of each token's parent; the root is its own parent.
    parents: Vec<u32>,
}

impl Drafts {
    /// Removes all guesses and sets the root.
    pub fn begin(&mut self, root: u32) {
        self.clear();
        self.tokens.push(root);
        self.parents.push(0);
    }

    /// Removes the root and all guesses.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.parents.clear();
    }

    /// Returns the number of guesses, without the root.
    pub fn len(&self) -> usize {
        self.tokens.len().saturating_sub(1)
    }

    /// Returns whether there are no guesses.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the guesses in order.
    pub fn guesses(&self) -> &[u32] {
        self.tokens.get(1..).unwrap_or_default()
    }

    /// Returns the parent of each token, the root first.
    pub fn parents(&self) -> &[u32] {
        &self.parents
    }

    /// Returns whether each guess is the child of the token before it.
    pub fn is_chain(&self) -> bool {
        self.parents.iter().zip(0_u32..).all(|(&parent, number)| parent == number.saturating_sub(1))
    }

    /// Keeps the first `guesses` guesses. Parents precede children, so each remaining guess has its parent.
    pub fn truncate(&mut self, guesses: usize) {
        self.tokens.truncate(guesses + 1);
        self.parents.truncate(guesses + 1);
    }

    /// Adds the missing tokens of a path from the root, at most `most`. O(length of the path x guesses).
    pub fn add(&mut self, path: impl Iterator<Item = u32>, mut most: usize) {
        let mut at = 0;
        for token in path {
            at = match self.child(at, token) {
                Some(child) => child,
                None if most == 0 => return,
                None => {
                    most -= 1;
                    self.tokens.push(token);
                    self.parents.push(at);
                    self.len() as u32
                }
            };
        }
    }

    /// Returns the number of the child of token number `of` that guesses `token`.
    fn child(&self, of: u32, token: u32) -> Option<u32> {
        let behind = self.tokens.iter().zip(&self.parents).zip(0_u32..).skip(of as usize + 1);
        let mut fits = behind.filter(|&((&t, &parent), _)| (t, parent) == (token, of));
        fits.next().map(|(_, number)| number)
    }

    /// Appends the numbers of the accepted branch to `out`: the root, then its child that equals the token sampled at
    /// the root, and so on. The branch ends where no child matches or a sampled token ends the text. `sampled` has a
    /// token for the root and for each guess. The token sampled at the end of the branch is new.
    pub fn branch(&self, sampled: &[u32], ends: impl Fn(u32) -> bool, out: &mut Vec<u32>) {
        let mut next = Some(0);
        while let Some(number) = next {
            out.push(number);
            let token = sampled[number as usize];
            next = if ends(token) { None } else { self.child(number, token) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Drafts {
        let mut drafts = Drafts::default();
        drafts.begin(7);
        drafts.add([1, 2, 3].into_iter(), 3);
        drafts.add([1, 4].into_iter(), 3);
        drafts.add([5, 2].into_iter(), 1);
        drafts
    }

    #[test]
    fn paths_with_a_common_start_are_merged() {
        let mut drafts = tree();
        assert_eq!(drafts.guesses(), [1, 2, 3, 4, 5], "one token of the last path fits");
        assert_eq!(drafts.parents(), [0, 0, 1, 2, 1, 0]);
        assert!(!drafts.is_chain());
        drafts.add([1, 2, 3].into_iter(), 3);
        assert_eq!(drafts.len(), 5, "the whole path exists");
        drafts.truncate(3);
        assert!(drafts.is_chain());
        assert_eq!(drafts.guesses(), [1, 2, 3]);
        drafts.clear();
        assert!(drafts.is_empty() && drafts.guesses().is_empty());
    }

    #[test]
    fn the_accepted_branch_ends_at_the_first_wrong_guess() {
        let drafts = tree();
        let branch = |sampled: [u32; 6], stop: u32| {
            let mut out = Vec::new();
            drafts.branch(&sampled, |token| token == stop, &mut out);
            out
        };
        assert_eq!(branch([9, 0, 0, 0, 0, 0], 99), [0]);
        assert_eq!(branch([1, 2, 3, 9, 0, 0], 99), [0, 1, 2, 3]);
        assert_eq!(branch([1, 4, 0, 0, 9, 0], 99), [0, 1, 4]);
        assert_eq!(branch([5, 0, 0, 0, 0, 1], 99), [0, 5]);
        assert_eq!(branch([1, 2, 3, 9, 0, 0], 2), [0, 1], "2 ends the text, and follows 1");
    }
}
