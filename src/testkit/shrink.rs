//! Shrinks a failing list of ops, and prints it as the literal of a regression test.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Returns the failure of a run, if it fails. A panic counts as a failure.
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

/// Removes ops while the rest still fails: first halves, then shorter runs, until removing any single op ends the
/// failure.
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
        run = if run > 1 || ops.len() == before { run / 2 } else { 1 };
    }
    ops
}

/// Returns the ops as lines of a Rust array.
pub fn literal<T: Debug>(ops: &[T]) -> String {
    ops.iter().map(|op| format!("    {op:?},\n")).collect()
}
