//! The pool, and stores of new K and V.
//!
//! ```text
//! pool      memory of K and V, by layer
//! rows      unchanged rows           -> pool
//! fp8       rows as bytes of fp8     -> pool, with scales
//! rope      rows rotated in place    -> pool, or the stores above
//! labels    channels of K            -> the label plane; scores of a selection
//! ```
//!
//! `moves` copies whole pages.

pub(super) mod fp8;
pub(super) mod labels;
pub(super) mod pool;
pub(super) mod rope;
pub(super) mod rows;
mod scales;
