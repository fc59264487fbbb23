//! The macro that declares access lists.

/// Declares the access list of a system: a struct with `&` of the tables that it reads and `&mut` of those that it
/// writes. Its `from` borrows them from a [`World`](crate::world::World), which the caller's file imports.
macro_rules! access {
    ($(#[$doc:meta])* struct $name:ident of &$($world:ident)+ { $($table:ident: &$($kind:ident)+,)+ }) => {
        $(#[$doc])*
        pub(crate) struct $name<'w> {
            $(pub $table: &'w $($kind)+,)+
        }

        impl<'w> From<&'w $($world)+> for $name<'w> {
            #[inline]
            fn from(world: &'w $($world)+) -> Self {
                let World { $($table,)+ .. } = world;
                Self { $($table),+ }
            }
        }
    };
}

pub(crate) use access;
