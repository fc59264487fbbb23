//! Serves one request at a time without an engine, as an oracle for tests. Pages are entries of maps, recency is a
//! counter, and an eviction searches all pages. The engine must reach the same figures.
//!
//! Group 0 is represented like the other groups: it has one track, and its tail at a mark is the whole prefix.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use kvarena::TokenId;
use kvarena::layout::Reach;

use crate::request::Request;

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Figures {
    pub skipped: u64,
    pub hit_tokens: u64,
    /// Tokens that match in group 0; 0 if it is the only group.
    pub full_hit_tokens: u64,
    pub evicted_pages: u64,
    pub evicted_cells: u64,
    pub peak_pages: u32,
}

/// The pool, and the number of tokens in a step.
pub struct Setting {
    pub pages: usize,
    pub page_size: usize,
    pub step_tokens: usize,
    /// Reach and tracks of each group.
    pub groups: Vec<(Reach, usize)>,
}

/// The time of pages in use. It is later than that of any idle page.
const IN_USE: u64 = u64::MAX;

/// Serves requests one at a time, with an exact page-level LRU.
pub fn naive(requests: &[Request], setting: &Setting) -> Figures {
    let mut oracle =
        Oracle { setting, names: HashMap::new(), cached: BTreeMap::new(), clock: 0, figures: Figures::default() };
    requests.iter().for_each(|request| oracle.serve(request));
    oracle.figures
}

struct Oracle<'a> {
    setting: &'a Setting,
    /// The number of each page, by its parent's number (0 is the root) and its tokens.
    names: HashMap<(u64, Vec<TokenId>), u64>,
    /// The time at which a cached page became idle, by the page's number and group. Outside group 0 an entry is a cell.
    cached: BTreeMap<(u64, usize), u64>,
    clock: u64,
    figures: Figures,
}

/// A request that is served.
struct Served {
    /// The number of each whole page.
    path: Vec<u64>,
    /// Pages of the prompt that may match, and those that match in group 0.
    limit: usize,
    full: usize,
    published: usize,
    /// Pages of each group so far, released ones included.
    places: usize,
    /// Private pages, by group and place.
    own: BTreeSet<(usize, usize)>,
}

impl Oracle<'_> {
    fn serve(&mut self, request: &Request) {
        let Setting { pages, page_size, step_tokens, ref groups } = *self.setting;
        let (mut tokens, mut output) = (Vec::new(), Vec::new());
        request.write_prompt(&mut tokens);
        let limit = (tokens.len() - 1) / page_size;
        request.write_stored_output(&mut output);
        tokens.extend(output);
        if self.most_pages(tokens.len()) > pages {
            self.figures.skipped += 1;
            return;
        }
        let path = self.path(&tokens);
        // The last token of the prompt is never matched. At the match, each group must have the pages that the next
        // token reads.
        let is_cached = |group, place: usize| self.cached.contains_key(&(path[place], group));
        let full = (0..limit).take_while(|&place| is_cached(0, place)).count();
        let is_hit = |mark: &usize| {
            let has = |group| (self.first(group, *mark)..*mark).all(|at| is_cached(group, at));
            (0..groups.len()).all(has)
        };
        let hit = (0..=full).rev().find(is_hit).expect("the empty prefix is a hit");
        self.figures.hit_tokens += (hit * page_size) as u64;
        if groups.len() > 1 {
            self.figures.full_hit_tokens += (full * page_size) as u64;
        }
        for group in 0..groups.len() {
            for &name in &path[self.first(group, hit)..hit] {
                self.cached.insert((name, group), IN_USE);
            }
        }
        let mut request = Served { path, limit, full, published: hit, places: hit, own: BTreeSet::new() };
        let mut stored = hit * page_size;
        while stored < tokens.len() {
            stored = tokens.len().min(stored.saturating_add(step_tokens));
            self.compute(&mut request, stored);
        }
        let Served { published, places, .. } = request;
        self.keep_tails(&mut request, published);
        for group in 1..groups.len() {
            self.give_back(&mut request, group, self.first(group, published)..places);
        }
        // The deepest page is the oldest.
        for &name in request.path.iter().rev() {
            self.clock += 1;
            self.cached.insert((name, 0), self.clock);
        }
    }

    /// Takes the pages of a step that stores the first `stored` tokens, and publishes whole pages.
    fn compute(&mut self, request: &mut Served, stored: usize) {
        let Setting { page_size, ref groups, .. } = *self.setting;
        let more = request.places..stored.div_ceil(page_size);
        request.places = more.end;
        let of_group = |group| more.clone().map(move |place| (group, place));
        let new: Vec<_> = (0..groups.len()).flat_map(of_group).collect();
        self.make_room(self.cost(&new) + self.cost(&request.own));
        request.own.extend(new);
        let used = self.cached.iter().filter(|&(_, &since)| since == IN_USE);
        let used: usize = used.map(|(&(_, group), _)| groups[group].1).sum();
        let in_use = (used + self.cost(&request.own)) as u32;
        self.figures.peak_pages = self.figures.peak_pages.max(in_use);
        let before = request.published;
        while request.published < stored / page_size {
            request.published += 1;
            let published = request.published;
            self.publish(request, 0, published - 1..published);
            if published == request.full || published == request.limit {
                self.keep_tails(request, published);
            }
        }
        for group in 1..groups.len() {
            let past = self.first(group, before)..self.first(group, request.published);
            self.give_back(request, group, past);
        }
    }

    /// Returns the maximum number of pages that a request has, summed over the groups.
    fn most_pages(&self, tokens: usize) -> usize {
        let Setting { page_size, step_tokens, ref groups, .. } = *self.setting;
        let all = tokens.div_ceil(page_size);
        let most = |&(reach, tracks): &(Reach, usize)| match reach {
            Reach::Window(size) | Reach::Chunk(size) => {
                let behind = size as usize - 1;
                let ahead = step_tokens + page_size - 1;
                tracks * all.min((behind + ahead).div_ceil(page_size) + 1)
            }
            _ => all,
        };
        groups.iter().map(most).sum()
    }

    /// Returns the number of each whole page of `tokens`. A new page gets the next number.
    fn path(&mut self, tokens: &[TokenId]) -> Vec<u64> {
        let mut parent = 0;
        let pages = tokens.chunks_exact(self.setting.page_size);
        let name = |page: &[TokenId]| {
            let new = self.names.len() as u64 + 1;
            parent = *self.names.entry((parent, page.to_vec())).or_insert(new);
            parent
        };
        pages.map(name).collect()
    }

    /// Returns the index of the first page that the token after a mark reads in a group.
    fn first(&self, group: usize, mark: usize) -> usize {
        let (position, (reach, _)) = (mark * self.setting.page_size, self.setting.groups[group]);
        let first = match reach {
            Reach::Window(size) => (position + 1).saturating_sub(size as usize),
            Reach::Chunk(size) => position / size as usize * size as usize,
            _ => 0,
        };
        first / self.setting.page_size
    }

    fn cost<'a>(&self, own: impl IntoIterator<Item = &'a (usize, usize)>) -> usize {
        own.into_iter().map(|&(group, _)| self.setting.groups[group].1).sum()
    }

    /// Evicts until at least `wanted` pages are not cached.
    fn make_room(&mut self, wanted: usize) {
        let tracks = |group: usize| self.setting.groups[group].1;
        let cached: usize = self.cached.keys().map(|&(_, group)| tracks(group)).sum();
        let mut left = self.setting.pages - cached;
        while left < wanted {
            let oldest = self.cached.iter().min_by_key(|&(_, &since)| since);
            let (&(name, group), &since) = oldest.expect("pages are cached");
            assert_ne!(since, IN_USE, "a page is idle");
            // Cells belong to cached pages of group 0, and are evicted with them.
            let groups = if group == 0 { 0..self.setting.groups.len() } else { group..group + 1 };
            for group in groups {
                let Some(since) = self.cached.remove(&(name, group)) else { continue };
                assert_ne!(since, IN_USE, "its cells are idle");
                left += tracks(group);
                match group {
                    0 => self.figures.evicted_pages += 1,
                    _ => self.figures.evicted_cells += 1,
                }
            }
        }
    }

    /// Turns private pages into cached pages in use. A private page is freed if the same page is cached already.
    fn publish(&mut self, request: &mut Served, group: usize, places: Range<usize>) {
        for place in places {
            if request.own.remove(&(group, place)) {
                self.cached.insert((request.path[place], group), IN_USE);
            }
        }
    }

    fn keep_tails(&mut self, request: &mut Served, mark: usize) {
        for group in 1..self.setting.groups.len() {
            self.publish(request, group, self.first(group, mark)..mark);
        }
    }

    /// Frees private pages, and makes cached pages idle.
    fn give_back(&mut self, request: &mut Served, group: usize, places: Range<usize>) {
        for place in places {
            if !request.own.remove(&(group, place)) {
                self.clock += 1;
                self.cached.insert((request.path[place], group), self.clock);
            }
        }
    }
}
