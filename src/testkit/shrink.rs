//! Makes a failing list of ops small, and prints it as the literal of a regression test.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What an op list does: nothing, or how it fails. A panic counts as a failure.
pub fn failure(run: impl FnOnce() -> Result<(), String>) -> Option<String> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(done) => done.err(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied());
            Some(format!("panic: {}", text.unwrap_or("of another type")))
        }
    }
}

/// Drops ops while the rest still fails: halves first, then ever smaller runs, until no single op can go.
pub fn shrink<T: Clone>(ops: &[T], fails: impl Fn(&[T]) -> bool) -> Vec<T> {
    let mut ops = ops.to_vec();
    let mut run = ops.len().div_ceil(2);
    while run > 0 {
        let before = ops.len();
        let mut at = 0;
        while at < ops.len() {
            let mut fewer = ops.clone();
            fewer.drain(at..(at + run).min(ops.len()));
            if fails(&fewer) {
                ops = fewer;
            } else {
                at += run;
            }
        }
        // A single op that could go may let another go.
        run = if run > 1 || ops.len() == before { run / 2 } else { 1 };
    }
    ops
}

/// The ops as lines of a Rust array.
pub fn literal<T: Debug>(ops: &[T]) -> String {
    ops.iter().map(|op| format!("    {op:?},\n")).collect()
}
