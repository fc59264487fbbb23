//! The audit of pages in swap memory: H1 to H4, and parts of M1 to M3.

use std::collections::HashSet;

use crate::prefix::PrefixTree;
use crate::prefix::check::Broken;
use crate::prefix::cursors::Seek;
use crate::prefix::nodes::{NO_PAGE, Sides};

impl PrefixTree {
    /// Checks H1 to H4, and parts of M1 to M3.
    pub(crate) fn check_swap(&self) -> Result<(), Broken> {
        let Some(swap) = &self.swap else { return Ok(()) };
        swap.pool.check().map_err(|what| (what, None))?;
        if !swap.saves.is_empty() {
            return Err(("H6: no save waits between calls", None));
        }
        let (mut pages, mut clean) = (HashSet::new(), 0);
        for (node, link) in &self.nodes.link {
            let Sides { device, swap_start } = self.nodes.sides_of(node);
            let entries = link.list.pages();
            let all = swap_start <= device && device <= entries;
            self.ensure(all, "H2: every entry has a page, device pages come first", node)?;
            for (place, entry) in (0..).zip(self.nodes.lists.entries(&link.list)) {
                if place >= swap_start {
                    let page = swap.of_entry[entry as usize];
                    let own = swap.pool.is_cached(page) && pages.insert(page);
                    self.ensure(own, "H1: a swap page belongs to one entry", node)?;
                }
                let on_device = self.nodes.lists.pages_of_run(entry, 1)[0] != NO_PAGE;
                let what = "H2: entries below `device` have device pages";
                self.ensure(on_device == (place < device), what, node)?;
            }
            let is_whole = |parent| self.nodes.sides_of(parent).device == self.nodes.entries(parent);
            let parent = link.parent.is_none_or(is_whole);
            let what = "H2: a node has device pages only if its parent is entirely on the device";
            self.ensure(device == 0 || parent, what, node)?;
            if self.usage[node].lock_count > 0 {
                let what = "H3: a node in use has no clean entries";
                self.ensure(swap_start == device, what, node)?;
            } else {
                clean += device - swap_start;
            }
        }
        if let Some(cells) = &self.cells {
            clean += cells.check_swap(&swap.pool, &mut pages)?;
        }
        let what = |what| (what, None);
        swap.fetches.check().map_err(what)?;
        let filling = |&page: &_| swap.pool.is_filling(page) && pages.insert(page);
        if !swap.fetches.pages.iter().all(filling) {
            return Err(("M1: a page that a fetch writes has no other user", None));
        }
        let key_of = |entry| self.chain.as_ref().map(|chain| chain.of(entry));
        swap.puts.check(&swap.pool, &self.nodes.lists, key_of).map_err(what)?;
        let count = pages.len() - swap.fetches.pages.len();
        if count as u32 != swap.pool.cached_count() {
            return Err(("H1: Cached swap pages belong to entries and cells", None));
        }
        if clean != swap.clean {
            return Err(("H3: clean entries of idle nodes are counted", None));
        }
        self.check_cursors()
    }

    fn check_cursors(&self) -> Result<(), Broken> {
        let Some(ages) = &self.ages else { return Ok(()) };
        for seek in Seek::ALL {
            let cursor = ages.cursors().at[seek as usize];
            let mut nodes = self.order.iter(&self.usage);
            for node in nodes.by_ref().take_while(|&node| Some(node) != cursor) {
                let found = seek.finds(self.nodes.sides_of(node), self.nodes.entries(node));
                let what = "H4: no node older than a cursor has what the cursor looks for";
                self.ensure(!found, what, node)?;
            }
            let listed = |node| self.order.iter(&self.usage).any(|idle| idle == node);
            if !cursor.is_none_or(listed) {
                return Err(("H4: a cursor is at an idle node", None));
            }
        }
        Ok(())
    }
}
