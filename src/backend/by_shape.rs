//! Values of a backend by shape, which here includes the dtype: groups of the same shape and dtype share a value.

use crate::layout::{GROUPS_MAX, PoolLayout};

/// One value for each shape of a pool, without allocation.
#[derive(Debug)]
pub(super) struct ByShape<T> {
    /// The value of each shape, at the index of its first group.
    values: [Option<T>; GROUPS_MAX],
    /// Index into `values` for each group.
    of_group: [usize; GROUPS_MAX],
}

impl<T> ByShape<T> {
    /// Makes a value for each shape, from the layout of the pool for the layers of that shape.
    pub fn new<E>(layout: &PoolLayout, mut make: impl FnMut(&PoolLayout) -> Result<T, E>) -> Result<Self, E> {
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
    pub fn of_group(&self, group: u32) -> &T {
        let place = self.of_group[group as usize];
        self.values[place].as_ref().expect("the first group of each shape has a value")
    }

    /// Returns the values of all shapes, group 0's first.
    pub fn all(&self) -> impl Iterator<Item = &T> {
        self.values.iter().flatten()
    }
}
