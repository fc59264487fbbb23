//! The comparisons after every op.

use super::agree;
use super::bytes::{self, Inspect};
use super::host::{Host, OTHER, names};
use crate::error::Error;
use crate::event::Event;
use crate::id::{LayerId, Namespace, PageId, SeqKey, SwapPageId, TokenId};

impl<B: Inspect> Host<B> {
    /// Compares the engine's state with the model's, and the match of one earlier text. Verifies the engine.
    pub(super) fn compare(&self) -> Result<(), String> {
        agree("stats", &self.engine.stats(), &self.model.stats())?;
        agree("available", &self.engine.available(), &self.model.available())?;
        for step in self.model.unfinished_steps() {
            let got = self.engine.available_after(step);
            agree("available_after", &(step, got), &(step, self.model.available_after(step)))?;
        }
        for &seq in &self.live {
            self.compare_sequence(seq)?;
        }
        for (leader, cuts, text) in &self.leaders {
            let (got, seq) = (self.engine.is_leading(leader), leader.seq);
            agree("is_leading", &got, &self.model.is_leading(seq, leader.cached_len, *cuts))?;
            if got {
                let tokens = self.model.tokens(seq).map(|tokens| &tokens[..text.len()]);
                agree("the tokens of a leader", &tokens, &Ok(&text[..]))?;
            }
        }
        self.compare_touched()?;
        self.check_swap_pages()?;
        self.compare_matches()?;
        for &seq in self.gone.iter().rev().take(2) {
            let unknown = Err(Error::UnknownSequence { seq });
            agree("a finished sequence", &self.engine.cached_len(seq), &unknown)?;
        }
        self.engine.verify().map_err(|broken| broken.to_string())
    }

    fn compare_sequence(&self, seq: SeqKey) -> Result<(), String> {
        let (engine, model) = (&self.engine, &self.model);
        agree("cached_len", &engine.cached_len(seq), &model.cached_len(seq))?;
        agree("outstanding", &engine.outstanding(seq), &model.outstanding(seq))?;
        agree("planned_len", &engine.planned_len(seq), &model.planned_len(seq))?;
        let stands = model.is_preempted(seq) || model.waiting(seq).is_some();
        let extend_max = if stands { Ok(0) } else { model.extend_max(seq) };
        agree("extend_max", &engine.extend_max(seq), &extend_max)?;
        let most = self.ops as u32 % 7 + 1;
        let next_len = if stands { 0 } else { model.next_len(seq, most) };
        agree("next_len", &engine.next_len(seq, most), &Ok(next_len))?;
        agree("is_state_lost", &engine.is_state_lost(seq), &Ok(model.is_state_lost(seq)))?;
        let tokens = model.tokens(seq).map(<[TokenId]>::to_vec);
        let count = tokens.as_ref().map(|tokens| tokens.len() as u32).map_err(|error| *error);
        agree("token_count", &engine.token_count(seq), &count)?;
        agree("tokens", &engine.tokens(seq).map(Iterator::collect), &tokens)?;
        let table = engine.page_table(seq).map(Iterator::collect::<Vec<_>>);
        agree("page_table", &table, &model.page_table(seq).map(<[_]>::to_vec))?;
        for track in 0..engine.shape().table.tracks {
            let runs = engine.page_runs(seq, track).map(|runs| runs.collect::<Vec<_>>().concat());
            let want = model.track_table(seq, track).map(<[_]>::to_vec);
            agree("page_runs", &runs, &want)?;
            let width = model.page_table(seq).map_or(0, <[_]>::len) + 1;
            let mut dense = vec![0; width];
            let written = engine.write_tables(&[seq], track, width, 7, &mut dense);
            let kept = want.iter().flatten().map(|page| page.raw());
            let before = width - 1 - want.as_ref().map_or(0, Vec::len);
            let want: Vec<_> = std::iter::repeat_n(7, before).chain(kept).chain([7]).collect();
            agree("write_tables", &written.map(|()| dense), &Ok(want))?;
        }
        self.compare_bytes(seq).map_err(|what| format!("{seq:?}: {what}"))
    }

    /// Checks that every cached token of a sequence has its own K and V, found through its page table.
    fn compare_bytes(&self, seq: SeqKey) -> Result<(), String> {
        let layout = &self.engine.shape().layout;
        let scope = self.model.scope(seq).map_err(|error| error.to_string())?;
        // A track's table contains only the places that the track keeps, which are the last ones.
        let places = self.model.page_table(seq).map_err(|error| error.to_string())?.len();
        let page_at = |layer, place: usize| {
            let table = self.model.track_table(seq, layout.place(layer).track);
            let table = table.map_err(|error| error.to_string())?;
            // Pending pages follow the page table.
            let at = (place + table.len()).checked_sub(places);
            Ok::<_, String>(at.and_then(|at| table.get(at).copied()))
        };
        let cached_len = self.model.cached_len(seq).map_err(|error| error.to_string())? as usize;
        let seeds = bytes::seeds(scope, &self.texts[&seq][..cached_len]);
        for (position, &seed) in seeds.iter().enumerate() {
            let (page, offset) = (position as u32 / layout.page_size(), position as u32 % layout.page_size());
            let stores = |layer: &LayerId| Some(layout.place(*layer).group) != layout.groups().state_group();
            for layer in (0..layout.layers()).map(LayerId::new).filter(stores) {
                let Some(page) = page_at(layer, page as usize)? else { continue };
                let slot = layout.slot(page, offset);
                let layout = layout.of_group(layout.place(layer).group);
                for (i, plane) in layout.planes().iter().enumerate() {
                    let name = plane.name;
                    let Some(got) = self.engine.backend().load(name, layer, slot) else {
                        return Ok(());
                    };
                    if got != bytes::numbers(&layout, seed, i, layer) {
                        return Err(format!(
                            "{name:?} of {layer:?} at position {position}, {slot:?}, is another token's"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks that no unfinished step may access a free page.
    fn compare_touched(&self) -> Result<(), String> {
        for (step, pages) in &self.touched {
            if let Some(page) = pages.iter().find(|&&page| self.model.is_free(page)) {
                return Err(format!("{page:?} is free, but unfinished {step:?} may touch it"));
            }
        }
        Ok(())
    }

    /// Checks H6: a swap page of the tree has the bytes of a save that did not fail, or of a fetch.
    fn check_swap_pages(&self) -> Result<(), String> {
        let prefixes = &self.engine.world().prefixes;
        let mut pages = (0..self.engine.shape().layout.swap_pages()).map(SwapPageId::new);
        let is_cached = |page| prefixes.has_swap() && prefixes.swap().is_cached(page);
        let unsaved = |page: &SwapPageId| is_cached(*page) && !self.engine.backend().has_swap_page(*page);
        match pages.find(unsaved) {
            Some(page) => Err(format!("H6: {page:?} has bytes of no save and no fetch")),
            None => Ok(()),
        }
    }

    /// Checks that no unfinished step may access a page that was just taken.
    pub(super) fn compare_untouched(&self, taken: &[PageId]) -> Result<(), String> {
        for (step, pages) in &self.touched {
            if let Some(page) = taken.iter().find(|page| pages.contains(page)) {
                return Err(format!("{page:?} is taken, but unfinished {step:?} may touch it"));
            }
        }
        Ok(())
    }

    /// Checks the match of one earlier text in turn, in both namespaces.
    fn compare_matches(&self) -> Result<(), String> {
        let turn = self.ops as usize % self.earlier.len().max(1);
        let Some(text) = self.earlier.get(turn) else { return Ok(()) };
        for namespace in [0, 1].map(Namespace::new) {
            let got = self.engine.match_prefix(namespace, text).pages();
            agree("match_prefix", &got, &self.model.match_prefix(namespace, text))?;
            self.compare_hashes(namespace, text)?;
        }
        Ok(())
    }

    /// After every `drain_every` ops, drains the events and compares the index with the cached pages.
    pub(super) fn listen(&mut self) -> Result<(), String> {
        let shape = *self.engine.shape();
        let Some(hashing) = shape.hashing.filter(|_| shape.event_pages > 0) else { return Ok(()) };
        if !self.ops.is_multiple_of(self.drain_every.into()) {
            return Ok(());
        }
        if self.ops.is_multiple_of(64) {
            self.engine.restate_events();
        }
        let newest = self.engine.newest_step();
        let mut late = None;
        self.engine.drain_events(|event| {
            if let Event::Stored(stored) = event {
                late = late.or((stored.step > newest).then_some(stored.step));
            }
            self.index.apply(event);
        });
        agree("steps after which pages may be read", &late, &None)?;
        self.index.agrees(hashing, names, self.model.present(), self.model.present_cells())
    }

    /// Checks that the hashes of a text match the same pages as its tokens.
    fn compare_hashes(&self, namespace: Namespace, text: &[TokenId]) -> Result<(), String> {
        let shape = self.engine.shape();
        let Some(hashing) = shape.hashing else { return Ok(()) };
        if namespace == OTHER && !hashing.uses_names() {
            return Ok(());
        }
        let chain = hashing.chain(&names(namespace), text, shape.layout.page_size());
        let mut pages = Vec::new();
        let found = self.engine.match_hashed_pages(&chain, |piece| pages.extend_from_slice(piece));
        agree("match_hashes", &pages, &self.model.cached_pages(namespace, text))?;
        let on_device = (found.pages() - found.swap_pages()) as usize;
        agree("pages by hashes", &on_device, &pages.len())?;
        // Hashes that do not begin at the first page match nothing.
        let behind = self.engine.match_hashes(chain.get(1..).unwrap_or_default());
        agree("match_hashes from the second page", &behind.pages(), &0)
    }
}
