//! Fills free pages with NaN, so that a read of a released page changes the output.

use crate::backend::Backend;
use crate::engine::Engine;
use crate::id::PageId;
use crate::page::PageState;

/// A byte that is NaN in every element type.
const NAN: u8 = 0xFF;

/// Fills all free pages with NaN; `write` writes a page of the backend. O(pages + bytes of the free pages).
pub fn poison<B: Backend>(engine: &mut Engine<B>, mut write: impl FnMut(&mut B, PageId, &[u8])) {
    let layout = engine.shape().layout;
    let page = vec![NAN; layout.page_bytes() as usize];
    for id in (0..layout.page_count()).map(PageId::new) {
        if engine.world().pages.state(id) == PageState::Free {
            write(engine.backend_mut(), id, &page);
        }
    }
}
