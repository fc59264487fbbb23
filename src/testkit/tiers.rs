//! A model, in plain maps, of a cache with swap memory and a store. It serves one request at a time.
//!
//! A number identifies a page by its tokens and all tokens before them. A counter is the clock. Two sets contain the
//! idle pages on the device and those in swap memory alone, in the order of their last use.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::id::TokenId;

/// Sizes of the tiers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Setting {
    /// Number of tokens of a page.
    pub page_size: usize,
    /// Number of pages of the device.
    pub device: usize,
    /// Number of swap pages.
    pub swap: usize,
    /// Number of the oldest idle device pages that the model saves ahead after each request.
    pub ahead: usize,
    /// Whether an unlimited store receives every page.
    pub store: bool,
}

/// The totals of a run. Hits are in tokens, moves in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Figures {
    /// Number of requests that do not fit the device even alone.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub skipped: u64,
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
    /// Pages dropped from the device or from swap memory that the store does not have.
    pub lost_pages: u64,
    /// Pages put into the store.
    pub put_pages: u64,
}

/// The media that have a page, and the time when its last request ended.
#[derive(Clone, Copy, Default)]
struct Held {
    device: bool,
    swap: bool,
    /// 0 while a request uses the page.
    since: u64,
}

/// The tiers of one server.
pub struct Tiers {
    setting: Setting,
    /// The number of each page, by the number of the page before it (0 for none) and its tokens.
    names: HashMap<(u64, Vec<TokenId>), u64>,
    cached: HashMap<u64, Held>,
    /// Idle pages on the device, oldest first.
    device: BTreeSet<(u64, u64)>,
    /// Idle pages that only swap memory has, oldest first.
    swap_only: BTreeSet<(u64, u64)>,
    device_used: usize,
    swap_used: usize,
    stored: HashSet<u64>,
    clock: u64,
    figures: Figures,
}

impl Tiers {
    /// Creates empty tiers.
    pub fn new(setting: Setting) -> Self {
        Self {
            setting,
            names: HashMap::new(),
            cached: HashMap::new(),
            device: BTreeSet::new(),
            swap_only: BTreeSet::new(),
            device_used: 0,
            swap_used: 0,
            stored: HashSet::new(),
            clock: 0,
            figures: Figures::default(),
        }
    }

    /// Returns the totals so far.
    pub fn figures(&self) -> Figures {
        self.figures
    }

    /// Serves a request: the first `prompt_len` tokens are the prompt; the others are the output, which also has K and
    /// V.
    pub fn serve(&mut self, tokens: &[TokenId], prompt_len: usize) {
        let page_size = self.setting.page_size;
        let (limit, held) = ((prompt_len - 1) / page_size, tokens.len().div_ceil(page_size));
        if held > self.setting.device {
            self.figures.skipped += 1;
            return;
        }
        let path = self.path(tokens);
        let is =
            |tiers: &Self, at: usize, on: fn(&Held) -> bool| at < limit && tiers.cached.get(&path[at]).is_some_and(on);
        let device = (0..).take_while(|&at| is(self, at, |held| held.device)).count();
        let swap = (device..).take_while(|&at| is(self, at, |held| held.swap)).count();
        path[..device + swap].iter().for_each(|&name| self.lock(name));
        path[..device].iter().for_each(|&name| self.release_swap(name));
        let matched = device + swap;
        let fetched = if self.setting.store {
            path[matched..limit].iter().take_while(|name| self.fetch(**name)).count()
        } else {
            0
        };
        self.make_room(swap + fetched);
        self.figures.loaded_pages += (swap + fetched) as u64;
        for &name in &path[device..matched + fetched] {
            self.release_swap(name);
            self.cached.get_mut(&name).expect("it is locked").device = true;
        }
        self.device_used += swap + fetched;
        self.make_room(held - matched - fetched);
        let tokens = |pages| (pages * page_size) as u64;
        self.figures.device_hit_tokens += tokens(device);
        self.figures.swap_hit_tokens += tokens(swap);
        self.figures.store_hit_tokens += tokens(fetched);
        self.end(&path);
    }

    /// Makes all whole pages of a request cached and idle, deeper ones first, and puts them into the store, if any.
    /// Then saves the oldest idle pages ahead.
    fn end(&mut self, path: &[u64]) {
        for &name in path.iter().rev() {
            self.lock(name);
            self.release_swap(name);
            self.clock += 1;
            let since = self.clock;
            let before = self.cached.insert(name, Held { device: true, swap: false, since });
            self.device_used += usize::from(!before.is_some_and(|held| held.device));
            self.device.insert((since, name));
            if self.setting.store {
                self.figures.put_pages += u64::from(self.stored.insert(name));
            }
        }
        let oldest: Vec<_> = self.device.iter().take(self.setting.ahead).copied().collect();
        for (_, name) in oldest {
            if !self.cached[&name].swap {
                if !self.take_swap() {
                    break;
                }
                self.figures.saved_pages += 1;
                self.cached.get_mut(&name).expect("it is idle").swap = true;
            }
        }
    }

    fn path(&mut self, tokens: &[TokenId]) -> Vec<u64> {
        let mut before = 0;
        let number = |page: &[TokenId]| {
            let new = self.names.len() as u64 + 1;
            before = *self.names.entry((before, page.to_vec())).or_insert(new);
            before
        };
        tokens.chunks_exact(self.setting.page_size).map(number).collect()
    }

    /// Marks a page as used, if it is cached.
    fn lock(&mut self, name: u64) {
        let Some(held) = self.cached.get_mut(&name) else { return };
        let since = std::mem::take(&mut held.since);
        self.device.remove(&(since, name));
        self.swap_only.remove(&(since, name));
    }

    fn release_swap(&mut self, name: u64) {
        let Some(held) = self.cached.get_mut(&name) else { return };
        self.swap_used -= usize::from(std::mem::take(&mut held.swap));
    }

    /// Takes a free swap page, or else that of the oldest idle page that only swap memory has. Returns false if there
    /// is neither.
    fn take_swap(&mut self) -> bool {
        if self.swap_used == self.setting.swap {
            let Some((_, name)) = self.swap_only.pop_first() else { return false };
            self.swap_used -= 1;
            self.figures.swap_evicted_pages += 1;
            self.drop(name);
        }
        self.swap_used += 1;
        true
    }

    fn drop(&mut self, name: u64) {
        self.cached.remove(&name);
        self.figures.lost_pages += u64::from(!self.stored.contains(&name));
    }

    /// Fetches a page for a request that uses it. Returns false if the store lacks the page, or if no swap page can be
    /// taken.
    fn fetch(&mut self, name: u64) -> bool {
        let fetched = self.stored.contains(&name) && self.take_swap();
        if fetched {
            self.cached.insert(name, Held { device: false, swap: true, since: 0 });
            self.figures.fetched_pages += 1;
        }
        fetched
    }

    /// Evicts until `wanted` pages of the device are free.
    fn make_room(&mut self, wanted: usize) {
        while self.setting.device - self.device_used < wanted {
            let (since, name) = self.device.pop_first().expect("the request fits");
            self.device_used -= 1;
            if !self.cached[&name].swap {
                if !self.take_swap() {
                    self.drop(name);
                    continue;
                }
                self.figures.saved_pages += 1;
                self.figures.forced_pages += 1;
            }
            self.cached.insert(name, Held { device: false, swap: true, since });
            self.swap_only.insert((since, name));
        }
    }
}
