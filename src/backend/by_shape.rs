//! What a backend has once for each shape of a pool: groups of layers that store the same share it.

use crate::layout::{GROUPS_MAX, PoolLayout};

/// One value for each shape of a pool, without memory of its own.
#[derive(Debug)]
pub(super) struct ByShape<T> {
    /// Each shape's value at the place of its first group.
    values: [Option<T>; GROUPS_MAX],
    /// Each group's place among the values.
    of_group: [usize; GROUPS_MAX],
}

impl<T> ByShape<T> {
    /// Makes a value from the pool as each shape's layers store it.
    pub fn new<E>(
        layout: &PoolLayout,
        mut make: impl FnMut(&PoolLayout) -> Result<T, E>,
    ) -> Result<Self, E> {
        let mut all = Self { values: [const { None }; GROUPS_MAX], of_group: [0; GROUPS_MAX] };
        for group in 0..layout.groups().count() {
            let first = layout.first_alike(group);
            if first == group {
                all.values[group as usize] = Some(make(&layout.of_group(group))?);
            }
            all.of_group[group as usize] = first as usize;
        }
        Ok(all)
    }

    /// Returns the value of a group's shape.
    pub fn of(&self, group: u32) -> &T {
        let place = self.of_group[group as usize];
        self.values[place].as_ref().expect("the first group of each shape has a value")
    }

    /// Returns the values of all shapes, group 0's first.
    pub fn all(&self) -> impl Iterator<Item = &T> {
        self.values.iter().flatten()
    }
}
