//! The macro that declares an enum together with its texts.

use std::fmt;

/// A number and its noun: `1 page`, `2 pages`.
pub(crate) struct Count<N>(pub(crate) N, pub(crate) &'static str);

impl<N: fmt::Display + From<u8> + PartialEq> fmt::Display for Count<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.0 == N::from(1) { "" } else { "s" };
        write!(f, "{} {}{plural}", self.0, self.1)
    }
}

/// Declares an enum that is `Clone`, and its `Display`. Each variant is followed by `=>` and the arguments of
/// `format!`, which can use its fields. Fields with clear names need no documentation.
macro_rules! displayed {
    (
        $(#[$meta:meta])*
        pub enum $name:ident {
            $(
                $(#[$about:meta])*
                $variant:ident
                $({ $($(#[$note:meta])* $field:ident: $kind:ty),+ $(,)? })?
                $(($inner:ident: $inner_kind:ty))?
                => $text:literal $(, $argument:expr)*;
            )+
        }
    ) => {
        $(#[$meta])*
        pub enum $name {
            $(
                $(#[$about])*
                $variant $({ $($(#[$note])* #[allow(missing_docs)] $field: $kind),+ })? $(($inner_kind))?,
            )+
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                #[allow(unused_variables)] // Some texts omit a field.
                match Clone::clone(self) {
                    $(Self::$variant $({ $($field),+ })? $(($inner))? => write!(f, $text $(, $argument)*),)+
                }
            }
        }
    };
}

pub(crate) use displayed;
