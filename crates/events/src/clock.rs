//! Wall-clock time, and the resident memory of this process.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the seconds since 1970, the time format of messages.
pub fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Returns the resident memory of this process in bytes, on systems with `/proc`.
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = resident.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}
