//! A model, in plain maps, of a cache with host memory and a store. It serves one request at a time.
//!
//! A number identifies a page by its tokens and all tokens before them. A counter is the clock. Two sets contain the
//! idle pages on the device and those in host memory alone, in the order of their last use.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::id::TokenId;

/// Sizes of the tiers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Setting {
    /// Number of tokens of a page.
    pub page_size: usize,
    /// Number of pages of the device.
    pub device: usize,
    /// Number of host pages.
    pub host: usize,
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
    /// Tokens found in host memory.
    pub host_hit_tokens: u64,
    /// Tokens found in the store.
    pub store_hit_tokens: u64,
    /// Pages copied to host memory.
    pub saved_pages: u64,
    /// Pages copied to host memory only when they were evicted.
    pub forced_pages: u64,
    /// Pages copied to the device.
    pub loaded_pages: u64,
    /// Pages fetched from the store.
    pub fetched_pages: u64,
    /// Pages dropped from host memory to free a host page.
    pub host_evicted_pages: u64,
    /// Pages dropped from the device or from host memory that the store does not have.
    pub lost_pages: u64,
    /// Pages put into the store.
    pub put_pages: u64,
}

/// The media that have a page, and the time when its last request ended.
#[derive(Clone, Copy, Default)]
struct Held {
    device: bool,
    host: bool,
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
    /// Idle pages that only host memory has, oldest first.
    host_only: BTreeSet<(u64, u64)>,
    device_used: usize,
    host_used: usize,
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
            host_only: BTreeSet::new(),
            device_used: 0,
            host_used: 0,
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
        let host = (device..).take_while(|&at| is(self, at, |held| held.host)).count();
        path[..device + host].iter().for_each(|&name| self.lock(name));
        path[..device].iter().for_each(|&name| self.release_host(name));
        let matched = device + host;
        let fetched = match self.setting.store {
            true => path[matched..limit].iter().take_while(|name| self.fetch(**name)).count(),
            false => 0,
        };
        self.make_room(host + fetched);
        self.figures.loaded_pages += (host + fetched) as u64;
        for &name in &path[device..matched + fetched] {
            self.release_host(name);
            self.cached.get_mut(&name).expect("it is locked").device = true;
        }
        self.device_used += host + fetched;
        self.make_room(held - matched - fetched);
        let tokens = |pages| (pages * page_size) as u64;
        self.figures.device_hit_tokens += tokens(device);
        self.figures.host_hit_tokens += tokens(host);
        self.figures.store_hit_tokens += tokens(fetched);
        self.end(&path);
    }

    /// Makes all whole pages of a request cached and idle, deeper ones first, and puts them into the store, if any.
    /// Then saves the oldest idle pages ahead.
    fn end(&mut self, path: &[u64]) {
        for &name in path.iter().rev() {
            self.lock(name);
            self.release_host(name);
            self.clock += 1;
            let since = self.clock;
            let before = self.cached.insert(name, Held { device: true, host: false, since });
            self.device_used += usize::from(!before.is_some_and(|held| held.device));
            self.device.insert((since, name));
            if self.setting.store {
                self.figures.put_pages += u64::from(self.stored.insert(name));
            }
        }
        let oldest: Vec<_> = self.device.iter().take(self.setting.ahead).copied().collect();
        for (_, name) in oldest {
            if !self.cached[&name].host {
                if !self.take_host() {
                    break;
                }
                self.figures.saved_pages += 1;
                self.cached.get_mut(&name).expect("it is idle").host = true;
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
        self.host_only.remove(&(since, name));
    }

    fn release_host(&mut self, name: u64) {
        let Some(held) = self.cached.get_mut(&name) else { return };
        self.host_used -= usize::from(std::mem::take(&mut held.host));
    }

    /// Takes a free host page, or else that of the oldest idle page that only host memory has. Returns false if there
    /// is neither.
    fn take_host(&mut self) -> bool {
        if self.host_used == self.setting.host {
            let Some((_, name)) = self.host_only.pop_first() else { return false };
            self.host_used -= 1;
            self.figures.host_evicted_pages += 1;
            self.drop(name);
        }
        self.host_used += 1;
        true
    }

    fn drop(&mut self, name: u64) {
        self.cached.remove(&name);
        self.figures.lost_pages += u64::from(!self.stored.contains(&name));
    }

    /// Fetches a page for a request that uses it. Returns false if the store lacks the page, or if no host page can be
    /// taken.
    fn fetch(&mut self, name: u64) -> bool {
        let fetched = self.stored.contains(&name) && self.take_host();
        if fetched {
            self.cached.insert(name, Held { device: false, host: true, since: 0 });
            self.figures.fetched_pages += 1;
        }
        fetched
    }

    /// Evicts until `wanted` pages of the device are free.
    fn make_room(&mut self, wanted: usize) {
        while self.setting.device - self.device_used < wanted {
            let (since, name) = self.device.pop_first().expect("the request fits");
            self.device_used -= 1;
            if !self.cached[&name].host {
                if !self.take_host() {
                    self.drop(name);
                    continue;
                }
                self.figures.saved_pages += 1;
                self.figures.forced_pages += 1;
            }
            self.cached.insert(name, Held { device: false, host: true, since });
            self.host_only.insert((since, name));
        }
    }
}
