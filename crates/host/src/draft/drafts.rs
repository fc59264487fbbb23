//! Drafts of one stream: guesses at what follows a token, as a tree.

/// The last token of a stream, which is number 0 and the root, and guesses at what follows it, each behind the one
/// that it follows.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Drafts {
    tokens: Vec<u32>,
    /// The number of the one that each follows; the root's is its own.
    parents: Vec<u32>,
}

impl Drafts {
    /// Forgets all, and begins with a root.
    pub fn begin(&mut self, root: u32) {
        self.clear();
        self.tokens.push(root);
        self.parents.push(0);
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.parents.clear();
    }

    /// Guesses, the root left out.
    pub fn len(&self) -> usize {
        self.tokens.len().saturating_sub(1)
    }

    /// Whether nothing is guessed.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The guesses in order.
    pub fn guesses(&self) -> &[u32] {
        self.tokens.get(1..).unwrap_or_default()
    }

    /// The number of the one that each follows, the root first.
    pub fn parents(&self) -> &[u32] {
        &self.parents
    }

    /// Whether each follows the one before it.
    pub fn is_chain(&self) -> bool {
        self.parents.iter().zip(0_u32..).all(|(&parent, number)| parent == number.saturating_sub(1))
    }

    /// Forgets the last ones, so that so many guesses are left. None is left without the one that it follows.
    pub fn truncate(&mut self, guesses: usize) {
        self.tokens.truncate(guesses + 1);
        self.parents.truncate(guesses + 1);
    }

    /// Takes in what is missing of a way from the root, at most so many tokens. O(its length x guesses).
    pub fn add(&mut self, way: impl Iterator<Item = u32>, mut most: usize) {
        let mut at = 0;
        for token in way {
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

    /// The guess of `token` behind number `of`.
    fn child(&self, of: u32, token: u32) -> Option<u32> {
        let behind = self.tokens.iter().zip(&self.parents).zip(0_u32..).skip(of as usize + 1);
        let mut fits = behind.filter(|&((&t, &parent), _)| (t, parent) == (token, of));
        fits.next().map(|(_, number)| number)
    }

    /// The branch that came true: the root, the guess that is what `said` gives for it, and so on, until nothing was
    /// guessed or a token ends the text. What is said for the last of them was not guessed, and follows it.
    pub fn branch(&self, said: &[u32], ends: impl Fn(u32) -> bool, out: &mut Vec<u32>) {
        let mut next = Some(0);
        while let Some(number) = next {
            out.push(number);
            let token = said[number as usize];
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
    fn ways_that_begin_alike_are_merged() {
        let mut drafts = tree();
        assert_eq!(drafts.guesses(), [1, 2, 3, 4, 5], "of the last way there is room for one");
        assert_eq!(drafts.parents(), [0, 0, 1, 2, 1, 0]);
        assert!(!drafts.is_chain());
        drafts.add([1, 2, 3].into_iter(), 3);
        assert_eq!(drafts.len(), 5, "all of it is there");
        drafts.truncate(3);
        assert!(drafts.is_chain());
        assert_eq!(drafts.guesses(), [1, 2, 3]);
        drafts.clear();
        assert!(drafts.is_empty() && drafts.guesses().is_empty());
    }

    #[test]
    fn the_branch_that_came_true_ends_where_nothing_was_guessed() {
        let drafts = tree();
        let branch = |said: [u32; 6], stop: u32| {
            let mut out = Vec::new();
            drafts.branch(&said, |token| token == stop, &mut out);
            out
        };
        assert_eq!(branch([9, 0, 0, 0, 0, 0], 99), [0]);
        assert_eq!(branch([1, 2, 3, 9, 0, 0], 99), [0, 1, 2, 3]);
        assert_eq!(branch([1, 4, 0, 0, 9, 0], 99), [0, 1, 4]);
        assert_eq!(branch([5, 0, 0, 0, 0, 1], 99), [0, 5]);
        assert_eq!(branch([1, 2, 3, 9, 0, 0], 2), [0, 1], "2 ends the text, and is said for 1");
    }
}
