//! The GPU backend. Under construction.
