//! A model, in plain maps, of a cache with groups of layers, states, swap memory and a store. It serves one request at
//! a time.
//!
//! A number identifies a page by its tokens and all tokens before them. A counter is the clock, and an eviction
//! searches all pages. Group 0 is like the other groups: it has one track, and its tail at a mark is the whole prefix.
//! Outside group 0, an item is a cell.

mod states;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use crate::id::TokenId;
use crate::layout::Reach;

/// Sizes of the tiers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setting {
    /// Number of tokens of a page.
    pub page_size: usize,
    /// Maximum number of tokens of a step.
    pub step_tokens: usize,
    /// Reach and tracks of each group; for a state, its pages.
    pub groups: Vec<(Reach, usize)>,
    /// Number of tokens before a prompt's end at which its state is cached.
    pub state_margin: usize,
    /// Minimum number of tokens from a hit to that place.
    pub state_gap: usize,
    /// Whether a state that was hit is never superseded.
    pub keep_used_states: bool,
    /// Number of pages of the device.
    pub device: usize,
    /// Number of swap pages.
    pub swap: usize,
    /// Number of the oldest idle device pages that the model saves ahead after each request.
    pub ahead: usize,
    /// Whether an unlimited store receives every page.
    pub store: bool,
    /// Number of pages of group 0 in a record of the store.
    pub record_pages: usize,
}

/// The totals of a run. Hits are in tokens, moves in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Figures {
    /// Number of requests that do not fit the device even alone.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub skipped: u64,
    /// Tokens of the hits.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub hit_tokens: u64,
    /// Tokens that match in group 0; 0 if it is the only group.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub full_hit_tokens: u64,
    /// Pages of group 0 evicted from the device.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub evicted_pages: u64,
    /// Cells evicted from the device.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub evicted_cells: u64,
    /// Maximum number of pages in use after a plan.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub peak_pages: u32,
    /// Tokens found on the device.
    pub device_hit_tokens: u64,
    /// Tokens found in swap memory.
    #[cfg_attr(feature = "serde", serde(rename = "host_hit_tokens"))]
    pub swap_hit_tokens: u64,
    /// Tokens found in the store.
    pub store_hit_tokens: u64,
    /// Pages copied to swap memory.
    pub saved_pages: u64,
    /// Pages copied to swap memory only when they were evicted.
    pub forced_pages: u64,
    /// Pages copied to the device.
    pub loaded_pages: u64,
    /// Pages fetched from the store.
    pub fetched_pages: u64,
    /// Pages dropped from swap memory to free a swap page.
    #[cfg_attr(feature = "serde", serde(rename = "host_evicted_pages"))]
    pub swap_evicted_pages: u64,
    /// Pages dropped from the device or from swap memory that the store does not have; 0 without swap memory.
    pub lost_pages: u64,
    /// Pages put into the store.
    pub put_pages: u64,
}

/// Group and number of a page of group 0, or of a cell.
type Key = (usize, u64);

/// The media that have an item, and the time when its last user left it.
#[derive(Clone, Copy, Default)]
struct Item {
    device: bool,
    swap: bool,
    stored: bool,
    /// 0 while a request uses the item.
    since: u64,
}

/// A request that is served.
struct Served {
    /// The number of each whole page.
    path: Vec<u64>,
    /// The numbers of pages at which the request keeps its tails, and whether another prompt went on differently there.
    marks: BTreeMap<usize, bool>,
    /// Whether the request has a state of its own.
    has_state: bool,
    /// The cell whose state the next step reads, and whether a later state of the request supersedes it.
    reads: Option<u64>,
    supersedes: bool,
    published: usize,
    /// Pages of each group so far, released ones included.
    places: usize,
    /// Private pages, by group and place.
    own: BTreeSet<(usize, usize)>,
}

/// The tiers of one server.
pub struct Tiers {
    setting: Setting,
    /// The number of each page, by the number of the page before it (0 for none) and its tokens.
    names: HashMap<(u64, Vec<TokenId>), u64>,
    items: BTreeMap<Key, Item>,
    /// Numbers of device pages and of swap pages that are not free.
    device_used: usize,
    swap_used: usize,
    stored: BTreeSet<Key>,
    clock: u64,
    /// The time at which the last superseded state became idle: before all others.
    past: u64,
    /// Pages with a state where prompts went on differently.
    junctions: BTreeSet<u64>,
    figures: Figures,
}

/// The first time of the clock.
const BEGIN: u64 = 1 << 32;

impl Tiers {
    /// Creates empty tiers.
    pub fn new(setting: Setting) -> Self {
        Self {
            setting,
            names: HashMap::new(),
            items: BTreeMap::new(),
            device_used: 0,
            swap_used: 0,
            stored: BTreeSet::new(),
            clock: BEGIN,
            past: BEGIN,
            junctions: BTreeSet::new(),
            figures: Figures::default(),
        }
    }

    /// Returns the totals so far.
    pub fn figures(&self) -> Figures {
        self.figures
    }

    /// Replaces the server by a new one. The store stays.
    pub fn restart(&mut self) {
        self.items.clear();
        self.junctions.clear();
        (self.device_used, self.swap_used) = (0, 0);
    }

    /// Serves a request: the first `prompt_len` tokens are the prompt; the others are the output, which also has K and
    /// V.
    pub fn serve(&mut self, tokens: &[TokenId], prompt_len: usize) {
        let Setting { page_size, step_tokens, device, ahead, .. } = self.setting;
        if self.most_pages(tokens.len()) > device {
            self.figures.skipped += 1;
            return;
        }
        let (path, limit) = (self.path(tokens), (prompt_len - 1) / page_size);
        let full = self.full(&path, limit);
        let local = self.hit(&path, full);
        let on_device = path[..local].iter().take_while(|name| self.items[&(0, **name)].device).count();
        if self.setting.store {
            self.fetch(&path, limit, local);
        }
        let tokens_of = |pages: usize| (pages * page_size) as u64;
        self.figures.full_hit_tokens += if self.setting.groups.len() > 1 { tokens_of(full) } else { 0 };
        let full = self.full(&path, limit);
        let hit = self.hit(&path, full);
        self.figures.hit_tokens += tokens_of(hit);
        self.figures.device_hit_tokens += tokens_of(on_device);
        self.figures.swap_hit_tokens += tokens_of(local - on_device);
        // A fetch that fails may drop cells of the hit.
        let growth = tokens_of(hit).wrapping_sub(tokens_of(local));
        self.figures.store_hit_tokens = self.figures.store_hit_tokens.wrapping_add(growth);
        let used = self.tails(&path, hit);
        used.iter().for_each(|key| self.acquire(key));
        self.load(&used);
        let (marks, supersedes) = self.marks(&path, [hit, full, limit], prompt_len);
        let reads = path[..hit].last().copied().filter(|_| self.state().is_some());
        let mut request = Served {
            path,
            marks,
            has_state: false,
            reads,
            supersedes,
            published: hit,
            places: hit,
            own: BTreeSet::new(),
        };
        let mut stored = hit * page_size;
        while stored < tokens.len() {
            let mark = request.marks.keys().map(|mark| mark * page_size).find(|&end| end > stored);
            let mark = mark.filter(|_| self.state().is_some()).unwrap_or(usize::MAX);
            stored = tokens.len().min(stored.saturating_add(step_tokens)).min(mark);
            self.compute(&mut request, stored);
        }
        let path = self.end(request);
        while self.clean() < ahead
            && let Some(dirty) = self.oldest(|item| item.device && !item.swap)
            && self.save(&dirty)
        {}
        if self.setting.store {
            self.put(&path);
        }
    }

    /// Takes the pages of a step that stores the first `stored` tokens, and publishes whole pages.
    fn compute(&mut self, request: &mut Served, stored: usize) {
        let page_size = self.setting.page_size;
        let new = request.places..stored.div_ceil(page_size);
        request.places = new.end;
        for group in [0].into_iter().chain(self.limited()) {
            let pages = new.len() * self.setting.groups[group].1;
            self.make_room(pages);
            self.device_used += pages;
            request.own.extend(new.clone().map(|place| (group, place)));
        }
        let state = self.state().filter(|_| !request.has_state).map_or(0, |group| self.setting.groups[group].1);
        self.make_room(state);
        self.device_used += state;
        request.has_state = self.state().is_some();
        let used = self.items.iter().filter(|(_, item)| item.since == 0).map(|(key, _)| key.0);
        let used = used.chain(request.own.iter().map(|own| own.0)).chain(self.state());
        let used: usize = used.map(|group| self.setting.groups[group].1).sum();
        self.figures.peak_pages = self.figures.peak_pages.max(used as u32);
        let before = request.published;
        while request.published < stored / page_size {
            request.published += 1;
            let published = request.published;
            self.publish(request, 0, published - 1..published);
            if request.marks.contains_key(&published) {
                self.keep_tails(request, published);
            }
        }
        for group in self.limited() {
            let past = self.first(group, before)..self.first(group, request.published);
            self.give_back(request, group, past);
        }
        self.keep_state(request, stored);
    }

    /// Ends a request. Returns its path.
    fn end(&mut self, mut request: Served) -> Vec<u64> {
        let (published, places) = (request.published, request.places);
        match self.state() {
            // The last item ends behind the last mark.
            Some(group) => self.device_used -= self.setting.groups[group].1,
            None => self.keep_tails(&mut request, published),
        }
        for group in self.limited() {
            self.give_back(&mut request, group, self.first(group, published)..places);
        }
        self.device_used -= request.own.len();
        request.path.iter().rev().for_each(|&name| self.release(&(0, name)));
        request.path
    }

    /// Turns private pages into items in use. A private page is freed if the device has the item.
    fn publish(&mut self, request: &mut Served, group: usize, places: Range<usize>) {
        for place in places {
            if !request.own.remove(&(group, place)) {
                continue;
            }
            let key = (group, request.path[place]);
            self.acquire(&key);
            let item = self.items.entry(key).or_default();
            if item.device {
                self.device_used -= self.setting.groups[group].1;
            }
            item.device = true;
            self.drop_swap(&key);
        }
    }

    fn keep_tails(&mut self, request: &mut Served, mark: usize) {
        for group in self.limited() {
            self.publish(request, group, self.first(group, mark)..mark);
        }
    }

    /// Frees private pages, and leaves items in use.
    fn give_back(&mut self, request: &mut Served, group: usize, places: Range<usize>) {
        for place in places {
            if request.own.remove(&(group, place)) {
                self.device_used -= self.setting.groups[group].1;
            } else {
                self.release(&(group, request.path[place]));
            }
        }
    }

    /// Loads the items in use that are in swap memory alone.
    fn load(&mut self, used: &[Key]) {
        let waiting: Vec<_> = used.iter().filter(|key| !self.items[key].device).collect();
        let pages = waiting.iter().map(|key| self.size(key)).sum();
        self.make_room(pages);
        self.device_used += pages;
        self.figures.loaded_pages += pages as u64;
        for key in waiting {
            self.items.get_mut(key).expect("it is used").device = true;
            self.drop_swap(key);
        }
    }

    /// Fetches what the longest prefix of this server and of the store lacks, if it is longer than the hit. With one
    /// group, pages may be lacking; with more groups, nothing arrives then.
    fn fetch(&mut self, path: &[u64], limit: usize, hit: usize) {
        let (mut end, unit) = (self.full(path, limit), self.setting.record_pages);
        let next = |end: usize| (end / unit + 1) * unit;
        while next(end) <= limit && self.stored.contains(&(0, path[next(end) - 1])) {
            end = next(end);
        }
        let is_here = |key: &Key| self.items.contains_key(key) || key.0 > 0 && self.stored.contains(key);
        let cells = |pages: &usize| self.tails(path, *pages).into_iter().filter(|key| key.0 > 0);
        let to = (0..=end).rev().find(|pages| cells(pages).all(|key| is_here(&key))).expect("the empty prefix is here");
        if to <= hit {
            return;
        }
        let mut tails: Vec<_> = path[..to].iter().map(|&name| (0, name)).collect();
        tails.extend(cells(&to));
        tails.iter().for_each(|key| self.acquire(key));
        let lacking: Vec<_> = tails.iter().filter(|key| !self.items.contains_key(key)).collect();
        let taken = lacking.iter().take_while(|key| self.take_swap_pages(key)).count();
        let arrived = if self.setting.groups.len() > 1 && taken < lacking.len() { 0 } else { taken };
        for key in &lacking[arrived..taken] {
            self.swap_used -= self.size(key);
        }
        for key in &lacking[..arrived] {
            self.items.insert(**key, Item { device: false, swap: true, stored: true, since: 0 });
            self.figures.fetched_pages += self.size(key) as u64;
        }
        // Cells become idle first, the last place of each group first; then pages, the deepest first.
        for group in (1..self.setting.groups.len()).chain([0]) {
            let own = tails.iter().rev().filter(|key| key.0 == group && self.items.contains_key(key));
            own.collect::<Vec<_>>().into_iter().for_each(|key| self.release(key));
        }
    }

    /// Puts the records of a path that the store lacks.
    fn put(&mut self, path: &[u64]) {
        let unit = self.setting.record_pages;
        for record in path.chunks_exact(unit) {
            let last = (0, record[unit - 1]);
            if self.items.get(&last).is_some_and(|item| !item.stored) {
                self.put_record(last, unit);
                for name in record {
                    self.items.get_mut(&(0, *name)).expect("it is before the last one").stored = true;
                }
            }
        }
        for key in (1..self.setting.groups.len()).flat_map(|group| path.iter().map(move |&name| (group, name))) {
            if self.items.get(&key).is_some_and(|item| !item.stored) {
                self.put_record(key, self.size(&key));
                self.items.get_mut(&key).expect("just seen").stored = true;
            }
        }
    }

    fn put_record(&mut self, key: Key, pages: usize) {
        if self.stored.insert(key) {
            self.figures.put_pages += pages as u64;
        }
    }

    /// Returns the maximum number of pages that a request has, summed over the groups.
    fn most_pages(&self, tokens: usize) -> usize {
        let Setting { page_size, step_tokens, ref groups, .. } = self.setting;
        let all = tokens.div_ceil(page_size);
        let most = |&(reach, tracks): &(Reach, usize)| match reach {
            Reach::Window(size) | Reach::Chunk(size) => {
                let span = (size as usize - 1).saturating_add(step_tokens).saturating_add(page_size - 1);
                tracks * all.min(span.div_ceil(page_size) + 1)
            }
            Reach::State => 2 * tracks,
            _ => all,
        };
        groups.iter().map(most).sum()
    }

    /// Returns the number of each whole page of `tokens`. A new page gets the next number.
    fn path(&mut self, tokens: &[TokenId]) -> Vec<u64> {
        let mut before = 0;
        let number = |page: &[TokenId]| {
            let new = self.names.len() as u64 + 1;
            before = *self.names.entry((before, page.to_vec())).or_insert(new);
            before
        };
        tokens.chunks_exact(self.setting.page_size).map(number).collect()
    }

    /// Returns the index of the first page that the token after a mark reads in a group.
    fn first(&self, group: usize, mark: usize) -> usize {
        let (position, (reach, _)) = (mark * self.setting.page_size, self.setting.groups[group]);
        let first = match reach {
            Reach::Window(size) => (position + 1).saturating_sub(size as usize),
            Reach::Chunk(size) => position / size as usize * size as usize,
            Reach::State => position.saturating_sub(1),
            _ => 0,
        };
        first / self.setting.page_size
    }

    /// Returns the pages and cells that the token after a mark reads.
    fn tails(&self, path: &[u64], mark: usize) -> Vec<Key> {
        let groups = 0..self.setting.groups.len();
        groups.flat_map(|group| path[self.first(group, mark)..mark].iter().map(move |&name| (group, name))).collect()
    }

    /// Returns how many pages of group 0 are cached, at most `limit`.
    fn full(&self, path: &[u64], limit: usize) -> usize {
        path[..limit].iter().take_while(|name| self.items.contains_key(&(0, **name))).count()
    }

    /// Returns the number of pages of the longest prefix whose tails are cached, at most `full`.
    fn hit(&self, path: &[u64], full: usize) -> usize {
        let is_hit = |mark: &usize| self.tails(path, *mark).iter().all(|key| self.items.contains_key(key));
        (0..=full).rev().find(is_hit).expect("the empty prefix is a hit")
    }

    /// Returns the number of pages of an item.
    fn size(&self, key: &Key) -> usize {
        self.setting.groups[key.0].1
    }

    /// Marks an item as used, if it is cached. A used item on the device has no swap pages.
    fn acquire(&mut self, key: &Key) {
        let Some(item) = self.items.get_mut(key) else { return };
        if std::mem::take(&mut item.since) > 0 && item.device {
            self.drop_swap(key);
        }
    }

    fn release(&mut self, key: &Key) {
        self.clock += 1;
        self.items.get_mut(key).expect("a used item is cached").since = self.clock;
    }

    fn drop_swap(&mut self, key: &Key) {
        let size = self.size(key);
        let item = self.items.get_mut(key).expect("it is cached");
        self.swap_used -= if std::mem::take(&mut item.swap) { size } else { 0 };
    }

    /// Returns the number of pages of idle items on the device that also have swap pages.
    fn clean(&self) -> usize {
        let clean = self.items.iter().filter(|(_, item)| item.device && item.swap);
        clean.map(|(key, _)| self.size(key)).sum()
    }

    /// Returns the item that has been idle for the longest time, among those for which `is_one` is true.
    fn oldest(&self, is_one: impl Fn(&Item) -> bool) -> Option<Key> {
        let idle = self.items.iter().filter(|(_, item)| item.since > 0 && is_one(item));
        idle.min_by_key(|(_, item)| item.since).map(|(key, _)| *key)
    }

    /// Removes an idle item, and with a page of group 0 its cells.
    fn remove(&mut self, key: &Key) {
        if key.0 == 0 {
            for group in 1..self.setting.groups.len() {
                let cell = (group, key.1);
                if self.items.contains_key(&cell) {
                    self.remove(&cell);
                }
            }
        }
        self.drop_swap(key);
        if self.state() == Some(key.0) {
            self.junctions.remove(&key.1);
        }
        let (item, size) = (self.items.remove(key).expect("it is cached"), self.size(key));
        assert!(item.since > 0, "the item is idle");
        self.figures.lost_pages += if item.stored || self.setting.swap == 0 { 0 } else { size as u64 };
        if item.device {
            self.leave_device(key);
        }
    }

    /// Counts an item that leaves the device.
    fn leave_device(&mut self, key: &Key) {
        self.device_used -= self.size(key);
        let evicted = if key.0 == 0 { &mut self.figures.evicted_pages } else { &mut self.figures.evicted_cells };
        *evicted += 1;
    }

    /// Takes a free swap page, or one of the oldest items that only swap memory has. Returns false if there is none.
    fn take_swap(&mut self) -> bool {
        while self.swap_used == self.setting.swap {
            let Some(oldest) = self.oldest(|item| !item.device) else { return false };
            let before = self.swap_used;
            self.remove(&oldest);
            self.figures.swap_evicted_pages += (before - self.swap_used) as u64;
        }
        self.swap_used += 1;
        true
    }

    /// Takes swap pages for all pages of an item, or for none.
    fn take_swap_pages(&mut self, key: &Key) -> bool {
        let size = self.size(key);
        let taken = (0..size).take_while(|_| self.take_swap()).count();
        self.swap_used -= if taken < size { taken } else { 0 };
        taken == size
    }

    /// Saves an idle item of the device. Returns false if swap pages are lacking, or if taking one has removed the
    /// item.
    fn save(&mut self, key: &Key) -> bool {
        for taken in 0..self.size(key) {
            let has_page = self.take_swap();
            if !has_page || !self.items.contains_key(key) {
                self.swap_used -= taken + usize::from(has_page);
                return false;
            }
        }
        self.items.get_mut(key).expect("just seen").swap = true;
        self.figures.saved_pages += self.size(key) as u64;
        true
    }

    /// Evicts until `wanted` pages of the device are free.
    fn make_room(&mut self, wanted: usize) {
        while self.setting.device - self.device_used < wanted {
            let oldest = self.oldest(|item| item.device).expect("the request fits");
            if !self.items[&oldest].swap {
                if !self.save(&oldest) {
                    if self.items.contains_key(&oldest) {
                        self.remove(&oldest);
                    }
                    continue;
                }
                self.figures.forced_pages += self.size(&oldest) as u64;
            }
            self.items.get_mut(&oldest).expect("it is cached").device = false;
            self.leave_device(&oldest);
        }
    }
}
