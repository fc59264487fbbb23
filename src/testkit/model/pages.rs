//! The state of each page. Searches look at all pages.

use crate::id::PageId;

/// The state of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageIs {
    /// It has no owner.
    Free,
    /// It belongs to one sequence.
    Private,
    /// It belongs to the tree.
    Cached,
    /// A sequence has released it, but an unfinished step may still access it.
    Fenced,
    /// No sequence gets it.
    Reserved,
}

/// The states of all pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pages(Vec<PageIs>);

impl Pages {
    /// Creates `count` pages. The first `reserved` ones are reserved, the others free.
    pub fn new(count: u32, reserved: u32) -> Self {
        Self((0..count).map(|page| if page < reserved { PageIs::Reserved } else { PageIs::Free }).collect())
    }

    /// Returns the state of a page.
    pub fn state(&self, page: PageId) -> PageIs {
        self.0[page.index()]
    }

    /// Returns the number of pages in a state.
    pub fn count(&self, state: PageIs) -> u32 {
        self.0.iter().filter(|&&is| is == state).count() as u32
    }

    /// Returns the number of pages of the pool.
    pub fn page_count(&self) -> u32 {
        self.0.len() as u32
    }

    /// Makes the `count` lowest free pages private. The caller has checked that the pool has enough.
    pub fn alloc(&mut self, count: u32) -> Vec<PageId> {
        let free = (0..self.page_count()).map(PageId::new);
        let taken: Vec<_> = free.filter(|&page| self.state(page) == PageIs::Free).take(count as usize).collect();
        assert_eq!(taken.len(), count as usize, "the model allocates without having checked");
        self.turn(&taken, PageIs::Free, PageIs::Private);
        taken
    }

    /// Changes the state of pages, all of which have the state `from`.
    pub fn turn(&mut self, pages: &[PageId], from: PageIs, to: PageIs) {
        for page in pages {
            let state = &mut self.0[page.index()];
            assert_eq!(*state, from, "the model turns {page:?} into {to:?}");
            *state = to;
        }
    }
}
