//! The pool, and stores of new K and V.
//!
//! ```text
//! given     memory that the host allocated, and its checks
//! memory    the memory of a pool; addresses and strides of its planes
//! pages     the pieces of whole pages
//! pool      K and V of one shape, by layer
//! rows      stores rows unchanged
//! fp8       quantises rows to fp8, and stores them; also computes and stores scales by token
//! scales    static scales, or the planes of scales by token
//! rope      normalises and rotates rows, and stores them in unquantised pools; `fp8` stores them in others
//! labels    stores channels of K in the label plane; computes the scores of a selection
//! ```
//!
//! `moves` copies whole pages.

pub(super) mod fp8;
pub(super) mod given;
pub(super) mod labels;
pub(super) mod memory;
pub(super) mod pages;
pub(super) mod pool;
pub(super) mod rope;
pub(super) mod rows;
mod scales;
