//! Baseline: the simplest cache. Every page is an entry of a `BTreeMap` keyed by its parent and its tokens, another
//! `BTreeMap` orders idle pages by age, and a `Vec` contains the free pages. Eviction is exact LRU.

use std::collections::BTreeMap;

use kvarena::TokenId;

use crate::Cache;

/// Parent of the first page of each prompt.
const ROOT: u32 = u32::MAX;

type Key = (u32, Box<[u32]>);

struct Tree {
    page_size: usize,
    children: BTreeMap<Key, u32>,
    by_age: BTreeMap<u64, u32>,
    /// Key and age of each cached page.
    pages: Vec<Option<(Key, u64)>>,
    free: Vec<u32>,
    clock: u64,
}

pub fn new(pages: usize, page_size: u32) -> Box<dyn Cache> {
    Box::new(Tree {
        page_size: page_size as usize,
        children: BTreeMap::new(),
        by_age: BTreeMap::new(),
        pages: vec![None; pages],
        free: (0..pages as u32).rev().collect(),
        clock: 0,
    })
}

impl Tree {
    fn evict(&mut self) {
        let (_, page) = self.by_age.pop_first().expect("a page is idle");
        let (key, _) = self.pages[page as usize].take().expect("the page is cached");
        self.children.remove(&key);
        self.free.push(page);
    }
}

impl Cache for Tree {
    fn name(&self) -> &'static str {
        "BTreeMap, LRU"
    }

    fn hit(&mut self, tokens: &[TokenId], out: &mut Vec<u32>) -> usize {
        let mut parent = ROOT;
        for page in tokens.chunks_exact(self.page_size) {
            let key = (parent, TokenId::as_raw(page).into());
            let Some(&found) = self.children.get(&key) else { break };
            out.push(found);
            parent = found;
        }
        out.len()
    }

    fn cycle(&mut self, tokens: &[TokenId]) -> usize {
        let mut path = Vec::new();
        let matched = self.hit(tokens, &mut path);
        for &page in &path {
            let (_, age) = self.pages[page as usize].as_ref().expect("the page is cached");
            self.by_age.remove(age);
        }
        for page in tokens.chunks_exact(self.page_size).skip(matched) {
            if self.free.is_empty() {
                self.evict();
            }
            let id = self.free.pop().expect("a page is free");
            let key: Key = (path.last().copied().unwrap_or(ROOT), TokenId::as_raw(page).into());
            self.children.insert(key.clone(), id);
            self.pages[id as usize] = Some((key, 0));
            path.push(id);
        }
        for &page in path.iter().rev() {
            self.clock += 1;
            self.by_age.insert(self.clock, page);
            self.pages[page as usize].as_mut().expect("the page is cached").1 = self.clock;
        }
        matched
    }
}
