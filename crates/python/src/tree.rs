//! `kvarena.Tree`: the prefix tree alone, over slots that the caller owns.

use kvarena::tree::{Insertion, Tree as Core, TreeConfig};
use kvarena::{Error, PageId};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::arguments::{Count, HandleArg, Id, Ints, handle_int, pages};
use crate::array::Array;
use crate::errors::{of_config, of_core, of_tree};
use crate::events::{self, Names};
use crate::long::{LONG_PAGES, LONG_TOKENS, run};

/// The cached prefixes of an engine that has its own allocator, page tables and memory.
///
/// A radix tree over whole pages. The caller gives the slots of computed tokens by `insert` and `extend`, and gets
/// them back by `evict`, `reset` and `unlock`. A slot is `page * page_size + offset`; slots come in whole pages.
///
/// A handle is an int that names the end of a prefix. It survives splits and other evictions, holds no lock by itself,
/// and is never used again for another prefix. 0 names the empty prefix.
///
///     tree = Tree(pages=1024)
///     handle, known = tree.insert(tokens, slots)  # the caller keeps its own slots of the first `known` tokens
///     handle, length = tree.match(prompt[:-1])    # the model must compute the last token
///     tree.lock(handle)                           # before the next evict
///     slots = tree.slots(handle)
///
/// An error leaves the tree unchanged. One thread at a time may call a tree; a second one gets RuntimeError.
#[pyclass(module = "kvarena")]
pub struct Tree {
    core: Core,
    page_size: u32,
    /// Whether slots are integers of 64 bits.
    wide: bool,
    pages: Vec<PageId>,
}

impl Tree {
    /// Returns the slots of the pages that a call appended to `self.pages`.
    fn take_slots(&mut self) -> Array {
        let slots = slots_of(&self.pages, self.page_size, self.wide);
        self.pages.clear();
        slots
    }

    fn inserted(&self, insertion: Insertion) -> (u128, u64) {
        (handle_int(insertion.handle), u64::from(insertion.known) * u64::from(self.page_size))
    }
}

/// Returns the slots of pages, in order.
fn slots_of(pages: &[PageId], page_size: u32, wide: bool) -> Array {
    let count = pages.len() * page_size as usize;
    if wide {
        let mut slots = Vec::with_capacity(count);
        for page in pages {
            let first = i64::from(page.raw()) * i64::from(page_size);
            slots.extend(first..first + i64::from(page_size));
        }
        return Array::new(slots);
    }
    let mut slots = Vec::with_capacity(count);
    for page in pages {
        let first = page.raw() * page_size;
        slots.extend((first..first + page_size).map(|slot| slot as i32));
    }
    Array::new(slots)
}

#[pymethods]
impl Tree {
    /// Creates an empty tree for slots below `pages * page_size`, and allocates all its memory.
    ///
    /// `hashing` is the recipe of page hashes: "dynamo", "nano_vllm", "minivllm", "vllm_sha256_cbor" or
    /// "sglang_sha256". `event_pages` is the capacity of the event buffer, and needs `hashing`. Slots are int32 if all
    /// fit, else int64; `wide_slots` makes them int64. `prefault` touches the memory now.
    #[new]
    #[pyo3(signature = (pages, page_size=Count(1), *, hashing=None, event_pages=Count(0), wide_slots=false,
               prefault=true),
           text_signature = "(pages, page_size=1, *, hashing=None, event_pages=0, wide_slots=False, prefault=True)")]
    fn new(
        py: Python<'_>,
        pages: Count,
        page_size: Count,
        hashing: Option<&str>,
        event_pages: Count,
        wide_slots: bool,
        prefault: bool,
    ) -> PyResult<Self> {
        let hashing = hashing.map(events::recipe).transpose()?;
        let config =
            TreeConfig { hashing, event_pages: event_pages.0, prefault, ..TreeConfig::new(pages.0, page_size.0) };
        let core = py.detach(|| Core::new(config)).map_err(of_config)?;
        let wide = wide_slots || u64::from(pages.0) * u64::from(page_size.0) > 1 << 31;
        Ok(Self { core, page_size: page_size.0, wide, pages: Vec::new() })
    }

    /// Returns the number of tokens of the longest cached prefix. Changes nothing, not even recency.
    #[pyo3(signature = (tokens, namespace=Id(0)), text_signature = "($self, tokens, namespace=0)")]
    fn find(&self, tokens: &Bound<'_, PyAny>, namespace: Id) -> PyResult<u64> {
        let ints = Ints::new("tokens", tokens)?;
        Ok(u64::from(self.core.find(namespace.namespace(), ints.tokens())) * u64::from(self.page_size))
    }

    /// Returns the handle and the length of the longest cached prefix, and makes it the most recently used.
    ///
    /// The length is that of whole pages. Lock the handle before the next `evict`, and leave out a prompt's last token.
    #[pyo3(name = "match", signature = (tokens, namespace=Id(0)), text_signature = "($self, tokens, namespace=0)")]
    fn match_prefix(&mut self, tokens: &Bound<'_, PyAny>, namespace: Id) -> PyResult<(u128, u64)> {
        let (py, mut ints) = (tokens.py(), Ints::new("tokens", tokens)?);
        let Self { core, pages, .. } = self;
        pages.clear();
        let long = ints.as_slice().len() > LONG_TOKENS;
        if long {
            ints = ints.owned();
        }
        let matched = run(py, long, || core.match_prefix(namespace.namespace(), ints.tokens(), pages));
        Ok((handle_int(matched.handle), u64::from(matched.pages) * u64::from(self.page_size)))
    }

    /// Returns the slots of a handle's prefix, in order.
    fn slots(&mut self, handle: HandleArg) -> PyResult<Array> {
        self.pages.clear();
        self.core.pages_of(handle.0, &mut self.pages).map_err(of_tree)?;
        Ok(self.take_slots())
    }

    /// Inserts a prefix of whole pages from its start. Returns its handle, and the number of leading tokens that the
    /// tree already had.
    ///
    /// The tree takes the slots after these tokens, and the caller keeps its own slots for them.
    #[pyo3(signature = (tokens, slots, namespace=Id(0)), text_signature = "($self, tokens, slots, namespace=0)")]
    fn insert(&mut self, tokens: &Bound<'_, PyAny>, slots: &Bound<'_, PyAny>, namespace: Id) -> PyResult<(u128, u64)> {
        let (ints, pages, long) = self.pair(tokens, slots)?;
        let core = &mut self.core;
        let inserted = run(tokens.py(), long, || core.insert(namespace.namespace(), ints.tokens(), pages.pages()));
        Ok(self.inserted(inserted.map_err(of_tree)?))
    }

    /// Inserts whole pages after a locked prefix, and moves one of its locks to their end. Returns the new handle and
    /// the number of leading tokens of the call that the tree already had.
    ///
    /// The old handle may be gone: if no other call has returned it and no prefix continues it, its node grows.
    fn extend(
        &mut self,
        handle: HandleArg,
        tokens: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
    ) -> PyResult<(u128, u64)> {
        let (ints, pages, long) = self.pair(tokens, slots)?;
        let core = &mut self.core;
        let inserted = run(tokens.py(), long, || core.extend(handle.0, ints.tokens(), pages.pages()));
        Ok(self.inserted(inserted.map_err(of_tree)?))
    }

    /// Locks a prefix: it stays cached until as many calls of `unlock`.
    fn lock(&mut self, handle: HandleArg) -> PyResult<()> {
        self.core.lock(handle.0).map_err(of_tree)
    }

    /// Releases one lock of a prefix. Returns the slots that return to the caller: none, except after a `reset`.
    fn unlock(&mut self, handle: HandleArg) -> PyResult<Option<Array>> {
        self.pages.clear();
        self.core.unlock(handle.0, &mut self.pages).map_err(of_tree)?;
        Ok((!self.pages.is_empty()).then(|| self.take_slots()))
    }

    /// Evicts the least recently used pages, and returns their slots: `tokens` tokens, rounded up to whole pages.
    ///
    /// Raises OutOfPages if locks protect the others.
    fn evict(&mut self, py: Python<'_>, tokens: Count) -> PyResult<Array> {
        let count = tokens.0.div_ceil(self.page_size);
        self.pages.clear();
        let Self { core, pages, .. } = self;
        run(py, count as usize > LONG_PAGES, || core.evict(count, pages)).map_err(of_tree)?;
        Ok(self.take_slots())
    }

    /// Evicts the least recently used pages back to where a prefix branches. Returns the handle of their end, which is
    /// gone now, and their slots; None if nothing is evictable.
    fn evict_node(&mut self) -> Option<(u128, Array)> {
        self.pages.clear();
        let handle = self.core.evict_node(&mut self.pages)?;
        Some((handle_int(handle), self.take_slots()))
    }

    /// Invalidates all prefixes. Returns the slots of those without a lock; each last `unlock` returns the others.
    fn reset(&mut self, py: Python<'_>) -> Array {
        self.pages.clear();
        let long = self.core.size().evictable as usize > LONG_PAGES;
        let Self { core, pages, .. } = self;
        run(py, long, || core.reset(pages));
        self.take_slots()
    }

    /// The number of tokens that `evict` can return now.
    #[getter]
    fn evictable(&self) -> u64 {
        self.core.size().evictable_tokens()
    }

    /// The number of tokens of locked prefixes.
    #[getter]
    fn protected(&self) -> u64 {
        self.core.size().protected_tokens()
    }

    /// The number of tokens of a page.
    #[getter]
    fn page_size(&self) -> u32 {
        self.page_size
    }

    /// Checks all tables, for tests. Raises RuntimeError with the broken invariant. O(capacity).
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.core.verify()).map_err(events::broken)
    }

    /// Names a namespace in the hashes of its pages. Call it before the namespace's first `insert`.
    #[pyo3(signature = (namespace, *, lora=None, lora_path=None, salt=None))]
    fn name_namespace(
        &mut self,
        namespace: Id,
        lora: Option<String>,
        lora_path: Option<String>,
        salt: Option<String>,
    ) -> PyResult<()> {
        let names = Names { lora, lora_path, salt };
        self.core.name_namespace(namespace.namespace(), names).map_err(of_core)
    }

    /// Forgets the names of a namespace. `insert` rejects it from then on.
    fn forget_namespace(&mut self, namespace: Id) -> PyResult<()> {
        self.core.forget_namespace(namespace.namespace()).map_err(|error: Error| of_core(error))
    }

    /// Returns the number of tokens of the longest cached prefix of a chain of page hashes, from ints or 32 bytes each.
    fn find_hashes(&self, chain: &Bound<'_, PyAny>) -> PyResult<u64> {
        Ok(u64::from(self.core.find_hashes(&events::chain(chain)?)) * u64::from(self.page_size))
    }

    /// Returns the changes of the cache since the last drain, as tuples in order.
    ///
    /// ("stored", medium, namespace, parent, hashes, tokens), ("removed", medium, hashes) or ("cleared",).
    fn drain_events<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        events::list(py, |sink| self.core.drain_events(sink))
    }

    /// Makes the next `drain_events` return the whole cache.
    fn restate_events(&mut self) {
        self.core.restate_events();
    }

    /// Returns the sizes, then a line for each namespace and each node.
    fn __str__(&self) -> String {
        self.core.to_string()
    }
}

impl Tree {
    /// Reads tokens and slots, and returns whether the call is a long one.
    fn pair(&self, tokens: &Bound<'_, PyAny>, slots: &Bound<'_, PyAny>) -> PyResult<(Ints, Ints, bool)> {
        let (ints, pages) = (Ints::new("tokens", tokens)?, pages(slots, self.page_size)?);
        match ints.as_slice().len() > LONG_TOKENS {
            true => Ok((ints.owned(), pages.owned(), true)),
            false => Ok((ints, pages, false)),
        }
    }
}
