//! What a step takes whose rows share spans: the model that spans are accepted by, and multiprocessors dealt.
//!
//! `benches/gpu spans` fits its constants and compares it with what steps take.

/// What an H200 takes, in nanoseconds, and bytes a nanosecond.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SpanCosts {
    /// A multiprocessor's tile of products.
    pub tile: f64,
    /// An item beside its tiles.
    pub item: f64,
    /// What items take before the first and after the last.
    pub spans: f64,
    /// What tails take beside their units.
    pub tails: f64,
    /// Bytes from memory.
    pub memory: f64,
    /// Bytes where several read the same, from the L2 cache.
    pub cache: f64,
    /// Bytes of decode units, those without tokens too, that a multiprocessor works off.
    pub units: f64,
    /// A step that reads each row by itself, beside its bytes.
    pub flat: f64,
}

/// What a step's time is made of.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct SpanWork {
    /// Items one after another on a multiprocessor.
    pub waves: f64,
    /// Tiles of an item.
    pub tiles: f64,
    /// Bytes of the tails' units.
    pub unit_bytes: f64,
    /// Multiprocessors that work on tails.
    pub tail_ctas: f64,
    /// Bytes of K and V, those of spans that are read once counted once.
    pub bytes: f64,
    /// Bytes of K and V where each row reads by itself.
    pub row_bytes: f64,
}

impl SpanCosts {
    /// Measured by hand with `benches/gpu shared`, 32 query and 8 kv heads of 128.
    pub const H200: Self = Self {
        tile: 2050.0,
        item: 5500.0,
        spans: 7000.0,
        tails: 5000.0,
        memory: 4400.0,
        cache: 8400.0,
        units: 48.0,
        flat: 4000.0,
    };

    /// Nanoseconds of a step that reads spans once.
    pub fn once(&self, work: &SpanWork) -> f64 {
        let spans = self.spans + work.waves * (work.tiles * self.tile + self.item);
        let tails = self.tails + work.unit_bytes / (work.tail_ctas * self.units);
        spans.max(tails).max(self.tails + work.bytes / self.memory)
    }

    /// Nanoseconds of a step that reads each row by itself.
    pub fn flat(&self, work: &SpanWork) -> f64 {
        self.flat + (work.bytes / self.memory).max(work.row_bytes / self.cache)
    }
}
