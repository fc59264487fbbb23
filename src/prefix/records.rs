//! Records that stores have or will get: consecutive pages of group 0, or one cell of another group.
//!
//! Not here: the queue of puts (`puts.rs`), fetches (`fetches.rs`).

use crate::id::{CellId, MoveId, Namespace, PageId, Scope, TokenId};
use crate::layout::Limits;
use crate::moves::{Lookup, Put, PutId};

use super::PrefixTree;
use super::hashes::named;
use super::nodes::Cursor;
use super::puts::Record;
use super::swap::Swap;

impl PrefixTree {
    /// Makes a cell of these pages at an entry of a prefix, with one user, and queues it to be put.
    pub(crate) fn create_cell(
        &mut self,
        scope: Scope,
        group: u32,
        entry: u32,
        pages: impl Iterator<Item = PageId>,
    ) -> CellId {
        if let Some(swap) = self.swap.as_mut().filter(|_| scope.generation == self.generation) {
            swap.puts.add(group + 1, entry);
        }
        self.cells_mut().create(group, entry, pages)
    }

    /// Opens puts of the next records to be put, at most `max`; saves to the stage are collected in `staged`. If the
    /// round has no record to put, begins the next round.
    pub(crate) fn begin_puts(&mut self, max: usize) {
        let Self { nodes, cells, swap: Some(swap), chain: Some(chain), .. } = self else { return };
        let save = swap.next_move();
        let Swap { puts, pool, of_entry, .. } = &mut **swap;
        let cells = cells.as_deref();
        puts.begin(max, (chain, pool, save), |puts, record, parts| {
            let Some(group) = record.group.checked_sub(1) else {
                let device = |entry| nodes.lists.pages_of_run(entry, 1)[0];
                let entries = puts.entries_back(record.entry);
                parts.extend(entries.map(|entry| (device(entry), of_entry[entry as usize])));
                parts.reverse();
                return !puts.is_stored(record.entry);
            };
            let Some(cells) = cells else { return false };
            let cell = cells.at(group, record.entry);
            if !cell.is_some() || cells.is_stored(cell) {
                return false;
            }
            cells.write_pages(cell, parts);
            true
        });
    }

    /// Calls `sink` with the puts whose pages the store can read. All saves up to `saved` are done. Returns the number
    /// of calls.
    pub(crate) fn give_puts(&mut self, saved: MoveId, sink: impl FnMut(Put<'_>)) -> usize {
        let Self { nodes, names, swap: Some(swap), chain: Some(chain), .. } = self else { return 0 };
        let Swap { puts, pool, .. } = &mut **swap;
        puts.give((nodes, chain, names), pool, saved, sink)
    }

    /// Ends a put. `ok` is set if the store has the record; otherwise it is queued for the next round. Returns whether
    /// the put was open.
    pub(crate) fn end_put(&mut self, id: PutId, ok: bool) -> bool {
        let Self { cells, swap: Some(swap), .. } = self else { return false };
        let Swap { puts, pool, .. } = &mut **swap;
        let Some(stored) = puts.end(pool, id, ok) else { return false };
        match stored {
            Some(Record { group: 0, entry, .. }) => puts.set_record_stored(entry, true),
            Some(Record { group, entry, .. }) => {
                cells.iter_mut().for_each(|cells| cells.set_stored(group - 1, entry, true));
            }
            None => {}
        }
        true
    }

    /// Returns the records that the tree has of a prompt of these tokens; `None` without hashes or swap memory.
    /// O(tokens matched, and cached pages for each group).
    #[cfg_attr(
        not(any(feature = "xxhash", feature = "sha256")),
        expect(unreachable_code, unused_variables, unused_assignments, reason = "no recipe is compiled in")
    )]
    pub(crate) fn lookup(&self, namespace: Namespace, tokens: &[TokenId]) -> Option<Lookup> {
        let Self { nodes, cells, swap: Some(swap), chain: Some(chain), names, .. } = self else { return None };
        let scope = self.present_scope(namespace);
        let (end, full) = nodes.walk_from(Cursor::START, scope, tokens);
        let (mut hit, mut present) = (full, Vec::new());
        if let Some(cells) = cells {
            hit = self.hit(scope, end, full).pages();
            present.resize(full as usize, 0);
            let mut path = nodes.path_from(end, full);
            for (place, bits) in present.iter_mut().enumerate().rev() {
                let entry = nodes.entry_at(&mut path, place as u32);
                let groups = 0..cells.limits().count();
                *bits = groups.map(|group| u8::from(cells.at(group, entry).is_some()) << group).sum();
            }
        }
        Some(Lookup {
            hashing: chain.hashing(),
            named: named(names, namespace).clone(),
            limits: self.cells.as_ref().map_or(Limits::NONE, |cells| *cells.limits()),
            page_size: nodes.page_size,
            record_pages: swap.puts.record_pages(),
            limit: (tokens.len() / nodes.page_size as usize) as u32,
            hit,
            full,
            cells: present,
        })
    }

    /// Queues again the records of a prompt of these tokens that a store had and that `stored` denies, by group and
    /// place. Returns the number of the prompt's records that no store has. O(tokens matched, and cached pages for each
    /// group).
    pub(crate) fn restate_puts(
        &mut self,
        namespace: Namespace,
        tokens: &[TokenId],
        mut stored: impl FnMut(u32, u32) -> bool,
    ) -> u32 {
        let scope = self.present_scope(namespace);
        let Self { nodes, cells, swap: Some(swap), chain: Some(_), .. } = self else { return 0 };
        let (end, full) = nodes.walk_from(Cursor::START, scope, tokens);
        let mut path = nodes.path_from(end, full);
        let mut entries: Vec<_> = (0..full).rev().map(|place| (place, nodes.entry_at(&mut path, place))).collect();
        entries.reverse();
        let (puts, mut lacking) = (&mut swap.puts, 0);
        for &(place, entry) in &entries {
            if !(place + 1).is_multiple_of(puts.record_pages()) {
                continue;
            }
            if puts.is_stored(entry) && !stored(0, place) {
                puts.set_record_stored(entry, false);
                puts.add(0, entry);
            }
            lacking += u32::from(!puts.is_stored(entry));
        }
        let Some(cells) = cells else { return lacking };
        let limits = *cells.limits();
        for group in limits.tails(0).map(|tail| tail.group) {
            for &(place, entry) in &entries {
                let cell = cells.at(group, entry);
                if !cell.is_some() {
                    continue;
                }
                if cells.is_stored(cell) && !stored(group + 1, place) {
                    cells.set_stored(group, entry, false);
                    puts.add(group + 1, entry);
                }
                lacking += u32::from(!cells.is_stored(cell));
            }
        }
        lacking
    }
}
