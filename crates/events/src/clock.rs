//! Wall-clock time, and the resident memory of this process.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Returns the seconds since 1970, the time format of messages.
pub fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Adds the duration of a call to `spent`, in seconds. Returns the result of the call.
pub fn timed<T>(spent: &mut f64, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let answer = call();
    *spent += start.elapsed().as_secs_f64();
    answer
}

/// Returns the resident memory of this process in bytes, on systems with `/proc`.
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = resident.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}
