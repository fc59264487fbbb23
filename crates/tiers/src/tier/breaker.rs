//! When a store is left alone, and how fast it is written. The caller passes the time.

use std::time::{Duration, Instant};

/// Number of failures in a row that stop a store.
const FAILURES_MAX: u32 = 5;
const FIRST_STOP: Duration = Duration::from_secs(1);
const LONGEST_STOP: Duration = Duration::from_secs(60);
/// Puts may be ahead of the rate by this time.
const BURST: Duration = Duration::from_millis(50);

/// Stops the calls of a store that fails: for 1 s, then twice as long after each failed trial, up to 60 s.
#[derive(Debug, Default)]
pub(super) struct Breaker {
    failures: u32,
    stop: Option<Stop>,
}

#[derive(Clone, Copy, Debug)]
struct Stop {
    until: Instant,
    delay: Duration,
    /// Whether a call tests the store.
    is_tried: bool,
}

impl Breaker {
    /// Returns whether a call may be made. After the end of a stop, one call tests the store.
    pub fn allows(&mut self, now: Instant) -> bool {
        let Some(stop) = &mut self.stop else { return true };
        let allows = now >= stop.until;
        if allows {
            *stop = Stop { until: now + stop.delay, is_tried: true, ..*stop };
        }
        allows
    }

    /// Returns the end of a stop that lasts.
    pub fn stopped(&self, now: Instant) -> Option<Instant> {
        self.stop.map(|stop| stop.until).filter(|&until| now < until)
    }

    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Counts a failure. `is_final` stops the store at once. Failures of calls that began before the stop have no
    /// effect.
    pub fn failed(&mut self, now: Instant, is_final: bool) {
        match &mut self.stop {
            None => {
                self.failures += 1;
                if self.failures >= FAILURES_MAX || is_final {
                    self.stop = Some(Stop { until: now + FIRST_STOP, delay: FIRST_STOP, is_tried: false });
                }
            }
            Some(stop) if stop.is_tried => {
                let delay = (stop.delay * 2).min(LONGEST_STOP);
                *stop = Stop { until: now + delay, delay, is_tried: false };
            }
            Some(_) => {}
        }
    }
}

/// A maximum rate of bytes.
#[derive(Debug)]
pub(super) struct Rate {
    bytes_per_second: Option<u64>,
    /// The time at which all bytes so far are due.
    due: Option<Instant>,
}

impl Rate {
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second, due: None }
    }

    /// Takes bytes, or returns the time after which to try again.
    pub fn take(&mut self, bytes: u64, now: Instant) -> Result<(), Duration> {
        let Some(rate) = self.bytes_per_second else { return Ok(()) };
        let due = self.due.unwrap_or(now).max(now);
        let ahead = due - now;
        if ahead > BURST {
            return Err(ahead - BURST);
        }
        self.due = Some(due + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stops_double_and_one_call_tests_the_store() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        for _ in 0..4 {
            breaker.failed(start, false);
            assert!(breaker.allows(start));
        }
        breaker.succeeded();
        (0..5).for_each(|_| breaker.failed(start, false));
        let mut end = 1.0;
        for delay in [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0] {
            breaker.failed(at(end - 0.5), false); // a call from before the stop
            assert_eq!((breaker.allows(at(end - 0.1)), breaker.stopped(at(end - 0.1))), (false, Some(at(end))));
            assert_eq!([breaker.allows(at(end)), breaker.allows(at(end))], [true, false]);
            breaker.failed(at(end), false);
            end += delay;
        }
        assert!(breaker.allows(at(end)));
        breaker.succeeded();
        assert!(breaker.allows(at(end)) && breaker.stopped(at(end)).is_none());
        breaker.failed(at(end), true);
        assert!(!breaker.allows(at(end)));
    }

    #[test]
    fn bytes_take_their_time() {
        let (mut rate, start) = (Rate::new(Some(1000)), Instant::now());
        assert_eq!(rate.take(500, start), Ok(()));
        assert_eq!(rate.take(500, start), Err(Duration::from_millis(450)));
        assert_eq!(rate.take(500, start + Duration::from_millis(450)), Ok(()));
        assert!(rate.take(1, start + Duration::from_millis(900)).is_err());
        assert_eq!(Rate::new(None).take(u64::MAX, start), Ok(()));
    }
}
