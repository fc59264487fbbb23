//! What of this process is measured: time that passed, and memory that it has.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Seconds since 1970, as messages have them.
pub fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// How long a call takes, added to `spent`, in seconds.
pub fn timed<T>(spent: &mut f64, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let answer = call();
    *spent += start.elapsed().as_secs_f64();
    answer
}

/// Returns the bytes of memory of this process, if the system reports them.
pub fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * 4096)
}
