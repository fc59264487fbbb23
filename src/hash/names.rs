//! What namespaces are called outside: numbers here, adapters and salts there.
//!
//! Two namespaces that a recipe cannot tell apart would give equal tokens one hash, though their K and V differ. So
//! none may be called what another one is called, as far as the recipe listens.
//!
//! Not here: how names enter a hash.

use std::collections::HashMap;

use ahash::RandomState;

use super::{Hashing, PageHash};
use crate::error::Error;
use crate::id::Namespace;
use crate::memory::OutOfMemory;

/// What a namespace is called by those who know prefixes by hashes. None at all: the default namespace.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct NamespaceNames {
    /// The adapter's name.
    pub lora: Option<String>,
    /// Where the adapter was loaded from; vLLM hashes it beside its name.
    pub lora_path: Option<String>,
    /// What keeps a tenant apart.
    #[doc(alias = "cache_salt")]
    pub salt: Option<String>,
}

/// Names, with what a recipe computes from them once.
#[derive(Clone, Debug)]
#[cfg_attr(
    not(any(feature = "xxhash", feature = "sha256")),
    expect(dead_code, reason = "there are none")
)]
pub(crate) struct Named {
    /// As the host gave them.
    pub names: NamespaceNames,
    /// As far as they enter.
    pub entering: NamespaceNames,
    pub seed: PageHash,
}

impl Named {
    pub fn new(hashing: Hashing, names: NamespaceNames) -> Self {
        let entering = hashing.entering(names.clone());
        let seed = hashing.seed(&entering);
        Self { names, entering, seed }
    }
}

/// The names of all namespaces.
pub(crate) struct Names {
    hashing: Hashing,
    named: HashMap<Namespace, Named, RandomState>,
    /// By what enters.
    owners: HashMap<NamespaceNames, Namespace, RandomState>,
}

impl Names {
    /// The default namespace has none.
    pub fn new(hashing: Hashing) -> Result<Self, OutOfMemory> {
        let mut names = Self { hashing, named: HashMap::default(), owners: HashMap::default() };
        let bytes = size_of::<Named>() as u64;
        names.named.try_reserve(1).map_err(|_| OutOfMemory { bytes })?;
        names.owners.try_reserve(1).map_err(|_| OutOfMemory { bytes })?;
        let named = names.name(Namespace::default(), NamespaceNames::default());
        named.expect("nobody else has names");
        Ok(names)
    }

    /// A namespace's names, if it has been given any.
    pub fn get(&self, namespace: Namespace) -> Option<&Named> {
        self.named.get(&namespace)
    }

    /// Calls a namespace something, once and for all.
    ///
    /// # Errors
    /// [`Error::NamespaceNamed`], [`Error::NamesTaken`].
    pub fn name(&mut self, namespace: Namespace, names: NamespaceNames) -> Result<(), Error> {
        if let Some(before) = self.named.get(&namespace) {
            let same = before.names == names;
            return if same { Ok(()) } else { Err(Error::NamespaceNamed { namespace }) };
        }
        let named = Named::new(self.hashing, names);
        if let Some(&by) = self.owners.get(&named.entering) {
            return Err(Error::NamesTaken { namespace, by });
        }
        self.owners.insert(named.entering.clone(), namespace);
        self.named.insert(namespace, named);
        Ok(())
    }
}
