//! Calls about the cache and its tiers.

use pyo3::prelude::*;
use pyo3::types::PyList;

use super::Engine;
use crate::arguments::{Count, Id, Ints};
use crate::errors::{of_core, of_engine};
use crate::events::{self, Names};

#[pymethods]
impl Engine {
    /// Returns the number of tokens of a prompt that are cached now: whole pages, without its last token. Changes
    /// nothing.
    #[pyo3(signature = (tokens, namespace=Id(0)), text_signature = "($self, tokens, namespace=0)")]
    fn find(&self, tokens: &Bound<'_, PyAny>, namespace: Id) -> PyResult<u64> {
        let ints = Ints::new("tokens", tokens)?;
        let found = self.get()?.match_prefix(namespace.namespace(), ints.tokens());
        Ok(u64::from(found.pages()) * u64::from(self.page_size()))
    }

    /// The number of pages that any call can take: free and evictable ones without those that are promised.
    #[getter]
    fn available(&self) -> u32 {
        self.core.available()
    }

    /// Returns the number of available pages after the completion of a step.
    fn available_after(&self, step: Id) -> u32 {
        self.core.available_after(step.step())
    }

    /// Invalidates all cached prefixes, such as after a change of weights.
    fn reset(&mut self) -> PyResult<()> {
        self.get_mut()?.reset();
        Ok(())
    }

    /// Saves up to `pages` idle pages to swap memory ahead of their eviction, oldest first. Returns their number.
    fn save_ahead(&mut self, pages: Count) -> PyResult<u32> {
        self.get_mut()?.save_ahead(pages.0).map_err(of_engine)
    }

    /// Loads the pages that sequences wait for from swap memory, before their first plan.
    fn load(&mut self, seqs: Vec<Id>) -> PyResult<()> {
        let seqs: Vec<_> = seqs.into_iter().map(Id::seq).collect();
        self.get_mut()?.load(&seqs).map_err(of_engine)
    }

    /// Returns whether loads of a sequence are not complete.
    fn is_loading(&mut self, seq: Id) -> PyResult<bool> {
        self.get_mut()?.is_loading(seq.seq()).map_err(of_engine)
    }

    /// Names a namespace in the hashes of its pages, as `Tree.name_namespace`.
    #[pyo3(signature = (namespace, *, lora=None, lora_path=None, salt=None),
           text_signature = "($self, namespace, *, lora=None, lora_path=None, salt=None)")]
    fn name_namespace(
        &mut self,
        namespace: Id,
        lora: Option<String>,
        lora_path: Option<String>,
        salt: Option<String>,
    ) -> PyResult<()> {
        let names = Names { lora, lora_path, salt };
        self.get_mut()?.name_namespace(namespace.namespace(), names).map_err(of_core)
    }

    /// Forgets the names of a namespace, as `Tree.forget_namespace`.
    fn forget_namespace(&mut self, namespace: Id) -> PyResult<()> {
        self.get_mut()?.forget_namespace(namespace.namespace()).map_err(of_core)
    }

    /// Returns the number of tokens of the longest cached prefix of a chain of page hashes.
    fn find_hashes(&self, chain: &Bound<'_, PyAny>) -> PyResult<u64> {
        Ok(u64::from(self.get()?.match_hashes(&events::chain(chain)?).pages()) * u64::from(self.page_size()))
    }

    /// Returns the changes of the cache since the last drain, as `Tree.drain_events`.
    fn drain_events<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let core = self.get_mut()?;
        events::list(py, |sink| core.drain_events(sink))
    }

    /// Makes the next `drain_events` return the whole cache.
    fn restate_events(&mut self) -> PyResult<()> {
        self.get_mut()?.restate_events();
        Ok(())
    }
}
