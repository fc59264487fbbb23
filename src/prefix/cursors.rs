//! Cursors in a list of idle nodes or idle cells, which is in the order of eviction.
//!
//! * H4. No node or cell older than a cursor has what the cursor looks for.
//!
//! Not here: the lists (`order.rs`, `cells.rs`).

use super::nodes::Sides;

/// The kind of entries or cells that a cursor looks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Seek {
    DevicePages,
    SwapOnly,
    Dirty,
}

impl Seek {
    pub const ALL: [Self; 3] = [Self::DevicePages, Self::SwapOnly, Self::Dirty];

    /// Returns whether a node of `entries` entries has what the cursor looks for.
    pub fn finds(self, Sides { device, swap_start }: Sides, entries: u32) -> bool {
        match self {
            Self::DevicePages => device > 0,
            Self::SwapOnly => device < entries,
            Self::Dirty => swap_start > 0,
        }
    }
}

/// For each [`Seek`], the oldest key of a list that may have what it looks for.
pub(super) struct Cursors<K> {
    pub(super) at: [Option<K>; 3],
    /// Number of keys that seeks have visited.
    #[cfg(test)]
    pub visits: u64,
}

impl<K: Copy + PartialEq> Cursors<K> {
    pub const START: Self = Self {
        at: [None; 3],
        #[cfg(test)]
        visits: 0,
    };

    /// Returns the oldest key that `has` what a cursor looks for, and moves the cursor there.
    pub fn seek(
        &mut self,
        seek: Seek,
        age: impl Fn(K) -> u64,
        younger: impl Fn(K) -> Option<K>,
        has: impl Fn(K) -> bool,
    ) -> Option<K> {
        let mut at = self.at[seek as usize];
        if seek == Seek::Dirty {
            // Dirty pages are on the device, so keys that evictions have passed have none.
            let passed = self.at[Seek::DevicePages as usize];
            at = at.zip(passed).map(|(a, b)| if age(a) < age(b) { b } else { a });
        }
        while let Some(key) = at {
            #[cfg(test)]
            (self.visits += 1);
            if has(key) {
                break;
            }
            at = younger(key);
        }
        self.at[seek as usize] = at;
        at
    }

    /// Adds the youngest key, which `has` what some cursors look for: cursors at the end of the list move to it.
    pub fn push(&mut self, key: K, has: impl Fn(Seek) -> bool) {
        for seek in Seek::ALL {
            let cursor = &mut self.at[seek as usize];
            if cursor.is_none() && has(seek) {
                *cursor = Some(key);
            }
        }
    }

    /// Adds the oldest key, which `has` what some cursors look for.
    pub fn push_oldest(&mut self, key: K, has: impl Fn(Seek) -> bool) {
        for seek in Seek::ALL.into_iter().filter(|seek| has(*seek)) {
            self.at[seek as usize] = Some(key);
        }
    }

    /// Moves cursors from a key that leaves the list to the next younger one.
    pub fn remove(&mut self, key: K, younger: Option<K>) {
        self.at.iter_mut().filter(|at| **at == Some(key)).for_each(|at| *at = younger);
    }

    /// Moves a cursor back to `key`, which has what the cursor looks for, from a younger key or from the end.
    pub fn move_back(&mut self, seek: Seek, key: K, age: impl Fn(K) -> u64) {
        if self.at[seek as usize].is_none_or(|at| age(key) < age(at)) {
            self.at[seek as usize] = Some(key);
        }
    }
}
