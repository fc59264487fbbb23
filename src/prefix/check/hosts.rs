//! The audit of pages in host memory: H1 to H4, and parts of M1 to M3.

use std::collections::HashSet;

use super::{Broken, PrefixTree};
#[cfg(any(test, feature = "testkit"))]
use crate::id::HostPageId;
use crate::prefix::residency::{NO_PAGE, Residency, Seek};

impl PrefixTree {
    /// Checks H1 to H4, and parts of M1 to M3.
    pub(crate) fn check_hosts(&self) -> Result<(), Broken> {
        let Some(hosts) = &self.hosts else { return Ok(()) };
        hosts.pool.check().map_err(|what| (what, None))?;
        if !hosts.saves.is_empty() {
            return Err(("H6: no save waits between calls", None));
        }
        let (mut pages, mut clean) = (HashSet::new(), 0);
        for (node, link) in &self.link {
            let Residency { device, host } = hosts.residency[node];
            let entries = link.span.pages();
            let all = host <= device && device <= entries;
            self.ensure(all, "H2: every entry has a page, device pages come first", node)?;
            for (place, entry) in (0..).zip(self.spans.entries(&link.span)) {
                if place >= host {
                    let page = hosts.of_entry[entry as usize];
                    let own = hosts.pool.is_cached(page) && pages.insert(page);
                    self.ensure(own, "H1: a host page belongs to one entry", node)?;
                }
                let on_device = self.spans.pages_of_run(entry, 1)[0] != NO_PAGE;
                let what = "H2: entries below `device` have device pages";
                self.ensure(on_device == (place < device), what, node)?;
            }
            let parent =
                link.parent.is_none_or(|parent| hosts.residency[parent].device == self.link[parent].span.pages());
            let what = "H2: a node has device pages only if its parent is entirely on the device";
            self.ensure(device == 0 || parent, what, node)?;
            if self.usage[node].lock_count > 0 {
                let what = "H3: a node in use has no clean entries";
                self.ensure(host == device, what, node)?;
            } else {
                clean += device - host;
            }
        }
        clean += self.check_host_cells(&mut pages)?;
        let what = |what| (what, None);
        hosts.fetches.check().map_err(what)?;
        let filling = |&page: &_| hosts.pool.is_filling(page) && pages.insert(page);
        if !hosts.fetches.pages.iter().all(filling) {
            return Err(("M1: a page that a fetch writes has no other user", None));
        }
        let key_of = |entry| self.chain.as_ref().map(|chain| chain.of(entry));
        hosts.puts.check(&hosts.pool, &self.spans, key_of).map_err(what)?;
        let count = pages.len() - hosts.fetches.pages.len();
        if count as u32 != hosts.pool.cached_count() {
            return Err(("H1: Cached host pages belong to entries and cells", None));
        }
        if clean != hosts.clean {
            return Err(("H3: clean entries of idle nodes are counted", None));
        }
        self.check_cursors()
    }

    /// Returns whether a host page belongs to an entry or a cell.
    #[cfg(any(test, feature = "testkit"))]
    pub(crate) fn is_host_page_cached(&self, page: HostPageId) -> bool {
        self.hosts.as_ref().is_some_and(|hosts| hosts.pool.is_cached(page))
    }

    fn check_cursors(&self) -> Result<(), Broken> {
        let hosts = self.hosts_ref();
        for seek in Seek::ALL {
            let cursor = hosts.cursors[seek as usize];
            let mut nodes = self.order.iter(&self.usage);
            for node in nodes.by_ref().take_while(|&node| Some(node) != cursor) {
                let found = seek.finds(hosts.residency[node], self.link[node].span.pages());
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
