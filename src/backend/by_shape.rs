//! What a backend has once for each shape of a pool: groups of layers that store the same share it.

use crate::layout::{GROUPS_MAX, PoolLayout};

/// One value for each shape of a pool.
#[derive(Debug)]
pub(super) struct ByShape<T> {
    /// Group 0's first.
    list: Vec<T>,
    /// Each group's place in the list.
    of_group: [usize; GROUPS_MAX],
}

impl<T> ByShape<T> {
    /// Makes a value from the pool as each shape's layers store it.
    pub fn new<E>(
        layout: &PoolLayout,
        mut make: impl FnMut(&PoolLayout) -> Result<T, E>,
    ) -> Result<Self, E> {
        let mut all = Self { list: vec![make(&layout.of_group(0))?], of_group: [0; GROUPS_MAX] };
        for group in 1..layout.groups().count() {
            let index = match layout.first_alike(group) {
                first if first < group => all.of_group[first as usize],
                _ => {
                    all.list.push(make(&layout.of_group(group))?);
                    all.list.len() - 1
                }
            };
            all.of_group[group as usize] = index;
        }
        Ok(all)
    }

    /// Returns the value of a group's shape.
    pub fn of(&self, group: u32) -> &T {
        &self.list[self.of_group[group as usize]]
    }

    /// Returns the values of all shapes, group 0's first.
    pub fn all(&self) -> &[T] {
        &self.list
    }
}
