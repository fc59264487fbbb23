//! Models the time of a step whose rows share spans, to accept spans and divide CTAs.
//!
//! `benches/gpu spans` compares the model with measured times and fits its constants.

/// Constants of a kernel, in nanoseconds and in bytes per nanosecond. [`SpanCosts::of_ctas`] converts `tile` and
/// `units` from a multiprocessor to a CTA.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SpanCosts {
    /// Time of a tile of products on a multiprocessor.
    pub tile: f64,
    /// Fixed time of spans.
    pub spans: f64,
    /// Fixed time of suffixes.
    pub suffixes: f64,
    /// Bandwidth of a multiprocessor over decode units. Units without tokens count as full units.
    pub units: f64,
    /// Memory bandwidth if spans are read once.
    pub memory: f64,
    /// Fixed time of a step that reads each row separately.
    pub flat: f64,
    /// Bandwidth of rows' own tokens if each row reads separately.
    pub own: f64,
    /// Bandwidth of the first read of a span if each row reads separately.
    pub first: f64,
    /// Bandwidth of each later read of a span, which the L2 cache partly serves.
    pub again: f64,
}

/// The work of a step, whose time the model predicts.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct SpanWork {
    /// Number of tiles of each CTA that works on spans.
    pub work_tiles: f64,
    /// Bytes of the units of suffixes.
    pub unit_bytes: f64,
    /// Number of CTAs that work on suffixes.
    pub suffix_ctas: f64,
    /// Bytes of K and V of the suffixes.
    pub own_bytes: f64,
    /// Bytes of K and V of the spans, each counted once.
    pub span_bytes: f64,
    /// Bytes of K and V if each row reads separately.
    pub row_bytes: f64,
}

impl SpanCosts {
    /// Constants for H200s and head_dim 128, for suffixes of 8 and of 16 query rows.
    pub const H200: [Self; 2] = [
        Self {
            tile: 2180.0,
            spans: 13_400.0,
            suffixes: 6500.0,
            units: 86.0,
            memory: 3520.0,
            flat: 7000.0,
            own: 4600.0,
            first: 3000.0,
            again: 6940.0,
        },
        Self {
            tile: 2570.0,
            spans: 16_000.0,
            suffixes: 25_100.0,
            units: 60.0,
            memory: 3000.0,
            flat: 10_200.0,
            own: 4640.0,
            first: 2690.0,
            again: 7830.0,
        },
    ];

    /// Returns the constants of the kernels for any device, per multiprocessor, by head_dim and index of the suffix's
    /// kernel.
    ///
    /// Constants of head_dim 64, and of separate reads at 256, are fitted to measurements on an H200. At 128 and 256,
    /// `tile` and `units` are fitted to older forms of these kernels, and the others are those of [`Self::H200`].
    pub fn general(head_dim: u32, place: usize) -> Self {
        let narrow = Self::H200[0];
        let as_128 = [narrow.spans, narrow.suffixes, narrow.memory];
        let (tile, units, [spans, suffixes, memory], of_flat) = match head_dim {
            64 => (2425.0, 63.0, [8840.0, 7900.0, 3850.0], [6500.0, 4200.0, 2430.0, 7490.0]),
            128 => (3700.0, 90.0, as_128, [7000.0, 4600.0, 3000.0, 6940.0]),
            _ => (6000.0, 60.0, as_128, [10_600.0, 4400.0, 2820.0, 6160.0]),
        };
        let [flat, own, first, again] = of_flat;
        let all = Self { tile, spans, suffixes, units, memory, flat, own, first, again };
        if place == 0 { all } else { all.of_wide_suffixes() }
    }

    /// Returns the constants for suffixes of 16 query rows, which are slower than suffixes of 8 by the ratio in
    /// [`Self::H200`].
    fn of_wide_suffixes(self) -> Self {
        let [narrow, wide] = Self::H200;
        Self {
            spans: self.spans * wide.spans / narrow.spans,
            suffixes: self.suffixes * wide.suffixes / narrow.suffixes,
            units: self.units * wide.units / narrow.units,
            memory: self.memory * wide.memory / narrow.memory,
            ..self
        }
    }

    /// Returns the constants per CTA, for `resident` CTAs on a multiprocessor.
    pub fn of_ctas(self, resident: u32) -> Self {
        let resident = f64::from(resident);
        Self { tile: self.tile * resident, units: self.units / resident, ..self }
    }

    /// Returns the constants of the fp8 kernels, per multiprocessor, fitted to measurements on an H200. Suffixes of 16
    /// query rows of head_dim 64 and 256 are scaled by the ratio of the 16-bit kernels.
    pub fn over_fp8(head_dim: u32, place: usize) -> Self {
        let (tile, of_spans, units, of_flat) = match (head_dim, place) {
            (64, _) => (3110.0, [9800.0, 7230.0, 4600.0], 30.8, [7690.0, 2660.0, 2520.0, 5280.0]),
            (128, 0) => (5500.0, [12e3, 12e3, 4900.0], 51.6, [8280.0, 4200.0, 3050.0, 7020.0]),
            (128, _) => (5410.0, [38.6e3, 25.1e3, 3000.0], 56.6, [10.8e3, 4200.0, 2920.0, 6210.0]),
            _ => (7060.0, [15.8e3, 10.6e3, 4000.0], 30.2, [14.3e3, 4260.0, 3400.0, 5430.0]),
        };
        let ([spans, suffixes, memory], [flat, own, first, again]) = (of_spans, of_flat);
        let all = Self { tile, spans, suffixes, units, memory, flat, own, first, again };
        if place == 0 || head_dim == 128 { all } else { all.of_wide_suffixes() }
    }

    /// Minimum predicted speedup for reading spans once, so that an error of the model seldom makes a step slower.
    const MARGIN: f64 = 1.2;

    /// Returns the nanoseconds of the CTAs for spans, and of those for suffixes.
    pub fn sides(&self, work: &SpanWork) -> [f64; 2] {
        let suffixes = self.suffixes + work.unit_bytes / (work.suffix_ctas * self.units);
        [self.spans + work.work_tiles * self.tile, suffixes]
    }

    /// Returns the nanoseconds of a step that reads spans once. Spans, suffixes and memory slow each other down if they
    /// take about as long.
    pub fn once(&self, work: &SpanWork) -> f64 {
        let [spans, suffixes] = self.sides(work);
        let bytes = self.suffixes + (work.own_bytes + work.span_bytes) / self.memory;
        let fourth = |x: f64| (x * x) * (x * x);
        (fourth(spans) + fourth(suffixes) + fourth(bytes)).sqrt().sqrt()
    }

    /// Returns the nanoseconds of a step that reads each row separately.
    pub fn flat(&self, work: &SpanWork) -> f64 {
        let again = work.row_bytes - work.own_bytes - work.span_bytes;
        self.flat + work.own_bytes / self.own + work.span_bytes / self.first + again / self.again
    }

    /// Returns whether reading spans once makes the step faster by more than the margin.
    pub fn is_better_once(&self, work: &SpanWork) -> bool {
        self.once(work) * Self::MARGIN < self.flat(work)
    }

    /// Returns the nanoseconds saved if `members` rows read a span of `bytes` bytes once, with `tiles` tiles on each
    /// CTA.
    pub fn gain(&self, members: f64, bytes: f64, tiles: f64) -> f64 {
        let flat = bytes / self.first + (members - 1.0) * bytes / self.again;
        flat - (tiles * self.tile).max(bytes / self.memory)
    }
}
