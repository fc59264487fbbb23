//! The pool of chunks: free chunks, and the number of rows that use each chunk.

use crate::memory::{Memory, OutOfMemory};

pub(super) struct ChunkPool {
    /// Number of rows that use each chunk.
    users: Vec<u32>,
    /// Free chunks that were in use before.
    returned: Vec<u32>,
    /// The first chunk that was never used; all later ones are free.
    fresh: u32,
}

impl ChunkPool {
    pub fn new(count: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self { users: memory.zeroed(count.into())?, returned: memory.reserved(count.into())?, fresh: 0 })
    }

    pub fn free_count(&self) -> u32 {
        self.users.len() as u32 - self.used_count()
    }

    pub fn used_count(&self) -> u32 {
        self.fresh - self.returned.len() as u32
    }

    /// Takes a chunk for one row.
    pub fn take(&mut self) -> u32 {
        let chunk = self.returned.pop().unwrap_or_else(|| {
            self.fresh += 1;
            self.fresh - 1
        });
        let users = self.users.get_mut(chunk as usize).expect("the caller checked the free chunks");
        assert!(*users == 0, "S5: a free chunk has no users");
        *users = 1;
        chunk
    }

    /// Adds a row that uses a chunk.
    pub fn share(&mut self, chunk: u32) {
        self.users[chunk as usize] += 1;
    }

    /// Removes a row that uses a chunk. A chunk without users becomes free. Returns whether it is free now.
    pub fn release(&mut self, chunk: u32) -> bool {
        let users = &mut self.users[chunk as usize];
        assert!(*users > 0, "S5: a row's chunk is in use");
        *users -= 1;
        let is_free = *users == 0;
        if is_free {
            self.returned.push(chunk);
        }
        is_free
    }

    /// Returns the number of users of each chunk, for audits.
    pub fn users(&self) -> &[u32] {
        &self.users
    }
}
