//! Random programs on a [`Tree`](crate::tree::Tree), compared with a naive map after each call. Tests and fuzzing share
//! them.

mod model;
mod rejected;

use std::collections::{BTreeMap, BTreeSet};

use crate::error::Error;
use crate::hash::{Hashing, Named, NamespaceNames};
use crate::id::{Handle, Namespace, PageId, TokenId};
use crate::tree::{Insertion, Tree, TreeConfig, TreeError, TreeSize};

use super::index::Index;
use super::rng::Rng;
use model::{Model, Prefix};

/// Number of namespaces of a program.
const NAMESPACES: u64 = 3;

/// Maximum number of pages of a prompt.
const PROMPT_PAGES: u64 = 10;

/// Counts of results, by name.
pub type Counts = BTreeMap<&'static str, u64>;

/// Runs a random program of at most `ops` operations, or until the bytes of `rng` end, and audits the tree after each.
/// Returns how often each result came.
///
/// # Panics
/// If the tree and the model disagree.
pub fn run(rng: Rng, ops: u64) -> Counts {
    let mut program = Program::new(rng);
    for _ in 0..ops {
        if program.rng.is_empty() {
            break;
        }
        program.call();
        program.check();
    }
    program.check_whole();
    program.counts
}

/// A host with a tree, and the model.
struct Program {
    rng: Rng,
    config: TreeConfig,
    tree: Tree,
    model: Model,
    free: Vec<PageId>,
    /// Built from events.
    index: Option<Index>,
    /// Namespaces that may be named, and those that are.
    namespaces: u64,
    named: BTreeSet<Namespace>,
    counts: Counts,
}

impl Program {
    fn new(mut rng: Rng) -> Self {
        let (pages, page_size) = (rng.pick(&[1, 2, 9, 24, 24, 60, 150]), rng.pick(&[1, 2, 16]));
        let hash_bits = rng.pick(&[u32::BITS, 31, 3]);
        let recipes = Hashing::ALL.len() as u64;
        let hashing = if recipes > 0 && rng.one_in(2) { Some(Hashing::ALL[rng.below(recipes) as usize]) } else { None };
        let event_pages = if hashing.is_some() { rng.pick(&[0, 4, 40, 1000]) } else { 0 };
        let config = TreeConfig { hashing, event_pages, prefault: rng.one_in(2), ..TreeConfig::new(pages, page_size) };
        // Some recipes ignore names, so they serve the default namespace alone.
        let hashes_names = |hashing| Named::new(hashing, names(Namespace::new(1))).hashed_names.salt.is_some();
        Self {
            rng,
            config,
            tree: Tree::with_hash_bits(config, hash_bits).expect("a valid config"),
            model: Model::new(page_size),
            free: (0..pages).map(PageId::new).collect(),
            index: (event_pages > 0).then(|| Index::new(page_size)),
            namespaces: if hashing.is_none_or(hashes_names) { NAMESPACES } else { 1 },
            named: BTreeSet::from([Namespace::default()]),
            counts: Counts::new(),
        }
    }

    fn count(&mut self, result: &'static str) {
        *self.counts.entry(result).or_default() += 1;
    }

    fn page_size(&self) -> usize {
        self.config.page_size as usize
    }

    fn call(&mut self) {
        match self.rng.weighted(&[16, 20, 14, 14, 16, 8, 3, 1, 3, 2, 4, 2]) {
            0 => self.match_prefix(),
            1 => self.insert(),
            2 => self.lock(),
            3 => self.unlock(),
            4 => self.extend(),
            5 => self.evict(),
            6 => self.evict_node(),
            7 => self.reset(),
            8 => self.drain(),
            9 => self.rename(),
            10 => self.reject(),
            _ => self.bad_handle(),
        }
    }

    /// Returns the tokens of some pages. Pages have few different contents, and some differ only in their last token.
    fn page_tokens(&mut self, pages: u64) -> Vec<TokenId> {
        let page_size = self.page_size();
        let mut tokens = Vec::new();
        for _ in 0..pages {
            let kind = self.rng.below(3) as u32;
            tokens.extend(vec![TokenId::new(kind / 2); page_size]);
            *tokens.last_mut().expect("a page has a token") = TokenId::new(kind);
        }
        tokens
    }

    /// Returns a prompt of whole pages: often the beginning of a cached one, and new pages.
    fn prompt(&mut self) -> Prefix {
        let namespace = Namespace::new(self.rng.below(self.namespaces));
        let handles: Vec<Handle> = self.model.names().keys().copied().collect();
        let mut prompt = self.model.prefix(namespace, &[]);
        if !handles.is_empty() && !self.rng.one_in(4) {
            let known = &self.model.names()[&self.rng.pick(&handles)].prefix;
            (prompt.namespace, prompt.tokens) = (known.namespace, known.tokens.clone());
            if self.rng.one_in(3) {
                let pages = self.rng.below((prompt.tokens.len() / self.page_size()) as u64 + 1);
                prompt.tokens.truncate(pages as usize * self.page_size());
            }
        }
        let more = self.rng.below(4);
        let more = self.page_tokens(more);
        prompt.tokens.extend(more);
        prompt.tokens.truncate(PROMPT_PAGES as usize * self.page_size());
        prompt
    }

    /// Returns a handle that named a prefix at some time, or the default one.
    fn handle(&mut self) -> Handle {
        let valid: Vec<Handle> = self.model.names().keys().copied().collect();
        match self.rng.below(8) {
            0 => Handle::default(),
            1 if !self.model.gone.is_empty() => self.rng.pick(&self.model.gone),
            _ if valid.is_empty() => Handle::default(),
            _ => self.rng.pick(&valid),
        }
    }

    fn match_prefix(&mut self) {
        let mut prompt = self.prompt();
        let rest = self.rng.below(self.page_size() as u64);
        prompt.tokens.extend(vec![TokenId::new(1); rest as usize]);
        let longest = self.model.longest(&prompt);
        let want = self.model.pages(&longest);
        let found = self.tree.find(prompt.namespace, &prompt.tokens);
        assert_eq!(found as usize, want.len(), "find");
        if let Some(hashing) = self.config.hashing {
            let chain = hashing.chain(&names(prompt.namespace), &prompt.tokens, self.config.page_size);
            assert_eq!(self.tree.find_hashes(&chain) as usize, want.len(), "find_hashes");
        }
        let mut pages = vec![PageId::new(7)];
        let matched = self.tree.match_prefix(prompt.namespace, &prompt.tokens, &mut pages);
        assert_eq!((pages[0], &pages[1..]), (PageId::new(7), &want[..]), "the matched pages are appended");
        assert_eq!(matched.pages as usize, want.len());
        self.model.touch(&longest);
        self.model.returned(&longest, matched.handle);
        self.count(if want.is_empty() { "match none" } else { "match" });
    }

    /// Returns the pages of a call that inserts a prompt after its first `known` pages: any page ids, then free pages.
    /// Returns `None` if too few pages are free.
    fn pages_for(&mut self, known: usize, new: usize) -> Option<Vec<PageId>> {
        let mut pages: Vec<_> = (0..known).map(|_| PageId::new(self.rng.below(1 << 8) as u32)).collect();
        for _ in 0..new {
            if self.free.is_empty() {
                self.free.extend(pages.drain(known..));
                return None;
            }
            let at = self.rng.below(self.free.len() as u64) as usize;
            pages.push(self.free.swap_remove(at));
        }
        Some(pages)
    }

    fn insert(&mut self) {
        let prompt = self.prompt();
        let known = self.model.longest(&prompt).tokens.len() / self.page_size();
        let count = prompt.tokens.len() / self.page_size();
        let Some(pages) = self.pages_for(known, count - known) else { return self.count("no page is free") };
        let result = self.tree.insert(prompt.namespace, &prompt.tokens, &pages);
        if self.config.hashing.is_some() && !self.named.contains(&prompt.namespace) {
            assert_eq!(result, Err(TreeError::UnnamedNamespace { namespace: prompt.namespace }));
            self.free.extend(&pages[known..]);
            return self.count("insert unnamed");
        }
        let Insertion { handle, known: had } = result.expect("the call is valid");
        assert_eq!(had as usize, known, "known pages");
        self.model.attach(&prompt, &pages[known..]);
        self.model.touch(&prompt);
        self.model.returned(&prompt, handle);
        self.count(if known == count { "insert none" } else { "insert" });
    }

    fn lock(&mut self) {
        let handle = self.handle();
        let result = self.tree.lock(handle);
        if handle == Handle::default() {
            assert_eq!(result, Ok(()));
        } else if self.model.names().contains_key(&handle) {
            assert_eq!(result, Ok(()), "the handle is valid");
            self.model.lock(handle);
            self.count("lock");
        } else {
            assert_eq!(result, Err(TreeError::Gone { handle }));
            self.count("lock gone");
        }
    }

    fn unlock(&mut self) {
        let handle = self.handle();
        let mut freed = Vec::new();
        let result = self.tree.unlock(handle, &mut freed);
        if handle == Handle::default() {
            assert_eq!(result, Ok(()));
            return;
        }
        let want = match self.model.names().get(&handle) {
            None => Err(TreeError::Gone { handle }),
            Some(name) if name.locks == 0 => Err(TreeError::NotLocked { handle }),
            Some(_) => Ok(()),
        };
        assert_eq!(result, want, "unlock");
        if want.is_err() {
            assert!(freed.is_empty());
            return self.count("unlock rejected");
        }
        let want = self.model.unlock(handle);
        self.count(if want.is_empty() { "unlock" } else { "unlock after a reset" });
        self.take_back(freed, want);
    }

    /// Compares returned pages, in any order, and adds them to the free pages.
    fn take_back(&mut self, mut pages: Vec<PageId>, mut want: Vec<PageId>) {
        pages.sort_unstable();
        want.sort_unstable();
        assert_eq!(pages, want, "the returned pages");
        self.free.extend(pages);
    }

    fn extend(&mut self) {
        let handle = self.handle();
        let more = self.rng.below(4);
        let tokens = self.page_tokens(more);
        let Some(name) = self.model.names().get(&handle) else {
            let want = match handle == Handle::default() {
                true => TreeError::NotLocked { handle },
                false => TreeError::Gone { handle },
            };
            let pages = vec![PageId::new(0); more as usize];
            return self.rejected(want, |tree| tree.extend(handle, &tokens, &pages).map(|_| ()));
        };
        let (from, locks) = (name.prefix.clone(), name.locks);
        let mut prompt = from.clone();
        prompt.tokens.extend(&tokens);
        let known = (self.model.longest(&prompt).tokens.len() - from.tokens.len()) / self.page_size();
        let Some(pages) = self.pages_for(known, more as usize - known) else { return self.count("no page is free") };
        let result = self.tree.extend(handle, &tokens, &pages);
        if locks == 0 {
            assert_eq!(result, Err(TreeError::NotLocked { handle }));
            self.free.extend(&pages[known..]);
            return self.count("extend unlocked");
        }
        let Insertion { handle: end, known: had } = result.expect("the call is valid");
        assert_eq!(had as usize, known, "known pages");
        self.model.extend(handle, &prompt, &pages[known..], end);
        let grown = !self.model.names().contains_key(&handle);
        self.count(if grown { "extend in place" } else { "extend" });
    }

    fn evict(&mut self) {
        let TreeSize { evictable, .. } = self.tree.size();
        let wanted = self.rng.below(u64::from(evictable) + 2) as u32;
        if wanted > evictable {
            let want = TreeError::NotEvictable { wanted, evictable };
            return self.rejected(want, |tree| tree.evict(wanted, &mut Vec::new()));
        }
        let mut pages = Vec::new();
        self.tree.evict(wanted, &mut pages).expect("they are evictable");
        let want = self.model.evict(wanted as usize);
        self.take_back(pages, want);
        self.count("evict");
    }

    fn evict_node(&mut self) {
        let mut pages = Vec::new();
        let evictable = self.tree.size().evictable;
        let Some(handle) = self.tree.evict_node(&mut pages) else {
            assert_eq!(evictable, 0, "something is evictable");
            return;
        };
        assert!(!pages.is_empty(), "a node has pages");
        self.model.evicted_node(pages.len(), handle);
        let want = self.model.evict(pages.len());
        self.take_back(pages, want);
        assert_eq!(self.tree.lock(handle), Err(TreeError::Gone { handle }));
        self.count("evict node");
    }

    fn reset(&mut self) {
        let mut pages = Vec::new();
        self.tree.reset(&mut pages);
        let want = self.model.reset();
        self.take_back(pages, want);
        let is_used = self.model.cached_count() > 0;
        self.count(if is_used { "reset under locks" } else { "reset" });
    }

    /// Drains events, after a restatement or not.
    fn drain(&mut self) {
        let (Some(index), Some(hashing)) = (&mut self.index, self.config.hashing) else { return };
        let restated = self.rng.one_in(3);
        if restated {
            self.tree.restate_events();
            *index = Index::new(self.config.page_size);
        }
        self.tree.drain_events(|event| index.apply(event));
        let cached = self.model.present().map(|prefix| (prefix.namespace, &prefix.tokens[..], [true, false]));
        index.agrees(hashing, names, cached, std::iter::empty()).expect("the events since the last drain");
        self.count(if restated { "drain restated" } else { "drain" });
    }

    /// Names or forgets a namespace.
    fn rename(&mut self) {
        let namespace = Namespace::new(self.rng.below(self.namespaces));
        if !self.named.contains(&namespace) {
            assert_eq!(self.tree.name_namespace(namespace, names(namespace)), Ok(()));
            self.named.insert(namespace);
            self.count("name");
        } else if self.rng.one_in(4) {
            assert_eq!(self.tree.forget_namespace(namespace), Ok(()));
            if namespace != Namespace::default() {
                self.named.remove(&namespace);
            }
            self.count("forget");
        } else if self.config.hashing.is_some() {
            let other = NamespaceNames { lora: Some("other".to_owned()), ..NamespaceNames::default() };
            assert_eq!(self.tree.name_namespace(namespace, other), Err(Error::NamespaceNamed { namespace }));
        }
    }

    /// Compares sizes and a handle, and audits the tree.
    fn check(&mut self) {
        let size = self.tree.size();
        let protected = self.model.protected_count();
        assert_eq!(size.protected as usize, protected, "protected pages");
        assert_eq!(size.total() as usize, self.model.cached_count(), "cached pages");
        assert_eq!(size.total_tokens(), u64::from(size.total()) * u64::from(self.config.page_size));
        assert_eq!(size.total() as usize + self.free.len(), self.config.pages as usize, "no page is lost");
        let handle = self.handle();
        assert_eq!(Handle::from_raw(handle.to_raw()), handle, "a handle survives its raw form");
        self.check_handle(handle);
        self.tree.verify().unwrap_or_else(|broken| panic!("{broken}\n{}", self.tree));
    }

    fn check_handle(&self, handle: Handle) {
        let mut pages = Vec::new();
        let result = self.tree.pages_of(handle, &mut pages);
        let Some(name) = self.model.names().get(&handle) else {
            let is_default = handle == Handle::default();
            assert_eq!(result, if is_default { Ok(0) } else { Err(TreeError::Gone { handle }) });
            return;
        };
        let want = self.model.pages(&name.prefix);
        assert_eq!((result, &pages), (Ok(want.len() as u32), &want), "pages_of");
    }

    /// Compares all handles and prefixes.
    fn check_whole(&mut self) {
        self.model.names().keys().chain(&self.model.gone).for_each(|&handle| self.check_handle(handle));
        for prefix in self.model.present() {
            let pages = prefix.tokens.len() / self.page_size();
            assert_eq!(self.tree.find(prefix.namespace, &prefix.tokens) as usize, pages, "find");
        }
    }
}

/// Returns the names of a namespace.
fn names(namespace: Namespace) -> NamespaceNames {
    let salt = (namespace != Namespace::default()).then(|| format!("salt {}", namespace.raw()));
    NamespaceNames { salt, ..NamespaceNames::default() }
}
