//! Names of namespaces: adapters and salts, which enter the hashes of their pages.
//!
//! If two namespaces had the same names, equal tokens would have one hash although their K and V differ. So the names
//! that the recipe hashes must differ between any two namespaces.
//!
//! * T11. The table keeps a namespace's names until the namespace is forgotten and its names have no users. The users
//!   are sequences, fetches and first nodes of prefixes; the table counts them.

use std::collections::HashMap;
use std::sync::Arc;

use ahash::RandomState;

use super::{Hashing, PageHash};
use crate::error::Error;
use crate::id::Namespace;
use crate::memory::{Memory, OutOfMemory};

/// The names of a namespace in the hashes of its pages. The default namespace has none.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct NamespaceNames {
    /// Name of the adapter.
    pub lora: Option<String>,
    /// Path that the adapter was loaded from; vLLM hashes it after the name.
    pub lora_path: Option<String>,
    /// Salt that separates tenants.
    #[doc(alias = "cache_salt")]
    pub salt: Option<String>,
}

/// The names of a namespace, and the recipe's seed for them.
#[derive(Clone, Debug)]
#[cfg_attr(not(any(feature = "xxhash", feature = "sha256")), expect(dead_code, reason = "no recipe is compiled in"))]
pub(crate) struct Named {
    /// The names from the host.
    pub names: Arc<NamespaceNames>,
    /// The names that the recipe hashes; the others are `None`.
    pub hashed_names: NamespaceNames,
    pub seed: PageHash,
}

impl Named {
    pub fn new(hashing: Hashing, names: NamespaceNames) -> Self {
        let hashed_names = hashing.hashed_names(names.clone());
        let seed = hashing.seed(&hashed_names);
        Self { names: Arc::new(names), hashed_names, seed }
    }
}

/// A namespace with names.
struct Entry {
    named: Named,
    users: u64,
    is_forgotten: bool,
}

/// The names of all namespaces. Without a recipe, the table stays empty, and every namespace counts as named.
pub(crate) struct Names {
    hashing: Option<Hashing>,
    named: HashMap<Namespace, Entry, RandomState>,
    /// Namespaces by the names that the recipe hashes.
    owners: HashMap<NamespaceNames, Namespace, RandomState>,
}

impl Names {
    /// Creates the table, in which only the default namespace has an entry.
    pub fn new(hashing: Option<Hashing>, memory: &Memory) -> Result<Self, OutOfMemory> {
        let mut names = Self { hashing, named: HashMap::default(), owners: HashMap::default() };
        if hashing.is_none() || !memory.allocates() {
            return Ok(names);
        }
        let bytes = size_of::<Entry>() as u64;
        names.named.try_reserve(1).map_err(|_| OutOfMemory { bytes })?;
        names.owners.try_reserve(1).map_err(|_| OutOfMemory { bytes })?;
        let named = names.name(Namespace::default(), NamespaceNames::default());
        named.expect("no other namespace has names");
        Ok(names)
    }

    /// Returns the names of a namespace, even of a forgotten one.
    pub fn get(&self, namespace: Namespace) -> Option<&Named> {
        self.named.get(&namespace).map(|entry| &entry.named)
    }

    /// Returns whether a namespace has names and is not forgotten.
    pub fn is_named(&self, namespace: Namespace) -> bool {
        self.hashing.is_none() || self.named.get(&namespace).is_some_and(|entry| !entry.is_forgotten)
    }

    /// Names a namespace, until it is forgotten.
    ///
    /// # Errors
    /// [`Error::NamespaceNamed`], [`Error::NamesTaken`].
    pub fn name(&mut self, namespace: Namespace, names: NamespaceNames) -> Result<(), Error> {
        let Some(hashing) = self.hashing else { return Ok(()) };
        if let Some(before) = self.named.get_mut(&namespace) {
            if *before.named.names != names {
                return Err(Error::NamespaceNamed { namespace });
            }
            before.is_forgotten = false;
            return Ok(());
        }
        let named = Named::new(hashing, names);
        if let Some(&by) = self.owners.get(&named.hashed_names) {
            return Err(Error::NamesTaken { namespace, by });
        }
        self.owners.insert(named.hashed_names.clone(), namespace);
        self.named.insert(namespace, Entry { named, users: 0, is_forgotten: false });
        Ok(())
    }

    /// Marks a namespace as forgotten; its names are dropped once they have no users. The default namespace stays.
    ///
    /// # Errors
    /// [`Error::UnnamedNamespace`].
    pub fn forget(&mut self, namespace: Namespace) -> Result<(), Error> {
        if self.hashing.is_none() || namespace == Namespace::default() {
            return Ok(());
        }
        match self.named.get_mut(&namespace) {
            Some(entry) if !entry.is_forgotten => entry.is_forgotten = true,
            _ => return Err(Error::UnnamedNamespace { namespace }),
        }
        self.drop_unused(namespace);
        Ok(())
    }

    /// Adds a user of a namespace.
    #[inline]
    pub fn hold(&mut self, namespace: Namespace) {
        if self.hashing.is_some() {
            self.users_mut(namespace, |users| *users += 1);
        }
    }

    /// Removes a user of a namespace.
    #[inline]
    pub fn release(&mut self, namespace: Namespace) {
        if self.hashing.is_some() {
            self.users_mut(namespace, |users| *users -= 1);
            self.drop_unused(namespace);
        }
    }

    #[cold]
    fn users_mut(&mut self, namespace: Namespace, change: fn(&mut u64)) {
        change(&mut self.named.get_mut(&namespace).expect("T11: a used namespace has names").users);
    }

    /// Removes names that are forgotten and have no users.
    #[cold]
    fn drop_unused(&mut self, namespace: Namespace) {
        let entry = &self.named[&namespace];
        if entry.users == 0 && entry.is_forgotten {
            self.owners.remove(&entry.named.hashed_names);
            self.named.remove(&namespace);
        }
    }

    /// Checks T11, given the namespace of each user.
    pub fn check(&self, users: impl Iterator<Item = Namespace>) -> bool {
        if self.hashing.is_none() {
            return self.named.is_empty();
        }
        let mut counts: HashMap<_, u64> = HashMap::new();
        users.for_each(|namespace| *counts.entry(namespace).or_default() += 1);
        let counted = |(namespace, entry): (&Namespace, &Entry)| {
            let users = counts.get(namespace).copied().unwrap_or(0);
            entry.users == users && (users > 0 || !entry.is_forgotten)
        };
        self.named.iter().all(counted)
            && counts.keys().all(|namespace| self.named.contains_key(namespace))
            && self.named.len() == self.owners.len()
    }
}
