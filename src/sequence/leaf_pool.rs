//! The pool of leaves: free leaves, and the number of rows that use each leaf.

use crate::memory::{Memory, OutOfMemory};

pub(super) struct LeafPool {
    /// Number of rows that use each leaf.
    users: Vec<u32>,
    /// Free leaves that were in use before.
    returned: Vec<u32>,
    /// The first leaf that was never used; all later ones are free.
    fresh: u32,
}

impl LeafPool {
    pub fn new(count: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self { users: memory.zeroed(count.into())?, returned: memory.reserved(count.into())?, fresh: 0 })
    }

    pub fn free_count(&self) -> u32 {
        self.users.len() as u32 - self.used_count()
    }

    pub fn used_count(&self) -> u32 {
        self.fresh - self.returned.len() as u32
    }

    /// Takes a leaf for one row.
    pub fn take(&mut self) -> u32 {
        let leaf = self.returned.pop().unwrap_or_else(|| {
            self.fresh += 1;
            self.fresh - 1
        });
        let users = self.users.get_mut(leaf as usize).expect("the caller checked the free leaves");
        assert!(*users == 0, "S5: a free leaf has no users");
        *users = 1;
        leaf
    }

    /// Adds a row that uses a leaf.
    pub fn share(&mut self, leaf: u32) {
        self.users[leaf as usize] += 1;
    }

    /// Removes a row that uses a leaf. A leaf without users becomes free. Returns whether it is free now.
    pub fn release(&mut self, leaf: u32) -> bool {
        let users = &mut self.users[leaf as usize];
        assert!(*users > 0, "S5: a row's leaf is in use");
        *users -= 1;
        let is_free = *users == 0;
        if is_free {
            self.returned.push(leaf);
        }
        is_free
    }

    /// Returns the number of users of each leaf, for audits.
    pub fn users(&self) -> &[u32] {
        &self.users
    }
}
