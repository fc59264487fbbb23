//! What a step takes whose rows share spans: the model that spans are accepted by, and CTAs dealt.
//!
//! `benches/gpu spans` compares it with what steps take, and fits its constants.

/// What a kernel takes, in nanoseconds, and bytes a nanosecond.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SpanCosts {
    /// A multiprocessor's tile of products.
    pub tile: f64,
    /// What spans take beside their tiles.
    pub spans: f64,
    /// What tails take beside their units.
    pub tails: f64,
    /// Bytes of decode units, those without tokens too, that a multiprocessor works off.
    pub units: f64,
    /// Bytes from memory where spans are read once.
    pub memory: f64,
    /// A step that reads each row by itself, beside its bytes.
    pub flat: f64,
    /// Its bytes of tokens that are a row's own.
    pub own: f64,
    /// Its bytes of spans, the first time that they are read.
    pub first: f64,
    /// The same, each time after that: from the L2 cache as far as they are there.
    pub again: f64,
}

/// What a step's time is made of.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct SpanWork {
    /// Tiles of each CTA that works on spans.
    pub work_tiles: f64,
    /// Bytes of the tails' units.
    pub unit_bytes: f64,
    /// CTAs that work on tails.
    pub tail_ctas: f64,
    /// Bytes of K and V of the tails.
    pub own_bytes: f64,
    /// Bytes of K and V of the spans, each counted once.
    pub span_bytes: f64,
    /// Bytes of K and V where each row reads by itself.
    pub row_bytes: f64,
}

impl SpanCosts {
    /// Of H200s and rows of 128, by the query rows that a tail's kernel has room for: 8, and 16.
    pub const H200: [Self; 2] = [
        Self {
            tile: 2180.0,
            spans: 13_400.0,
            tails: 6500.0,
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
            tails: 25_100.0,
            units: 60.0,
            memory: 3000.0,
            flat: 10_200.0,
            own: 4640.0,
            first: 2690.0,
            again: 7830.0,
        },
    ];

    /// Of the kernels for any device, a whole multiprocessor's, by head_dim and place of the tail's kernel. Fitted to
    /// what H200s took of head_dim 64, and of 256 flat, else to older forms of these kernels; of 128 products are those
    /// of the extend kernel.
    pub fn general(head_dim: u32, place: usize) -> Self {
        let narrow = Self::H200[0];
        let as_128 = [narrow.spans, narrow.tails, narrow.memory];
        let (tile, units, [spans, tails, memory], of_flat) = match head_dim {
            64 => (2425.0, 63.0, [8840.0, 7900.0, 3850.0], [6500.0, 4200.0, 2430.0, 7490.0]),
            128 => (3700.0, 90.0, as_128, [7000.0, 4600.0, 3000.0, 6940.0]),
            _ => (6000.0, 60.0, as_128, [10_600.0, 4400.0, 2820.0, 6160.0]),
        };
        let [flat, own, first, again] = of_flat;
        let all = Self { tile, spans, tails, units, memory, flat, own, first, again };
        if place == 0 { all } else { all.of_wide_tails() }
    }

    /// The same of tails of 16 query rows, which are slower than those of 8 as they are of [`Self::H200`].
    fn of_wide_tails(self) -> Self {
        let [narrow, wide] = Self::H200;
        Self {
            spans: self.spans * wide.spans / narrow.spans,
            tails: self.tails * wide.tails / narrow.tails,
            units: self.units * wide.units / narrow.units,
            memory: self.memory * wide.memory / narrow.memory,
            ..self
        }
    }

    /// The same of CTAs, so many of which share a multiprocessor.
    pub fn of_ctas(self, resident: u32) -> Self {
        let resident = f64::from(resident);
        Self { tile: self.tile * resident, units: self.units / resident, ..self }
    }

    /// Of the kernels over fp8, a whole multiprocessor's: fitted to what H200s took, but for tails of 16 query rows of
    /// head_dim 64 and 256, which are taken to be slower as they are of 16 bits.
    pub fn over_fp8(head_dim: u32, place: usize) -> Self {
        let (tile, of_spans, units, of_flat) = match (head_dim, place) {
            (64, _) => (3110.0, [9800.0, 7230.0, 4600.0], 30.8, [7690.0, 2660.0, 2520.0, 5280.0]),
            (128, 0) => (5500.0, [12e3, 12e3, 4900.0], 51.6, [8280.0, 4200.0, 3050.0, 7020.0]),
            (128, _) => (5410.0, [38.6e3, 25.1e3, 3000.0], 56.6, [10.8e3, 4200.0, 2920.0, 6210.0]),
            _ => (7060.0, [15.8e3, 10.6e3, 4000.0], 30.2, [14.3e3, 4260.0, 3400.0, 5430.0]),
        };
        let ([spans, tails, memory], [flat, own, first, again]) = (of_spans, of_flat);
        let all = Self { tile, spans, tails, units, memory, flat, own, first, again };
        if place == 0 || head_dim == 128 { all } else { all.of_wide_tails() }
    }

    /// A step that reads spans once is to be faster by this factor, so that the model's error seldom makes it slower.
    const MARGIN: f64 = 1.2;

    /// Nanoseconds until the multiprocessors for spans are done, and until those for tails are.
    pub fn sides(&self, work: &SpanWork) -> [f64; 2] {
        let tails = self.tails + work.unit_bytes / (work.tail_ctas * self.units);
        [self.spans + work.work_tiles * self.tile, tails]
    }

    /// Nanoseconds of a step that reads spans once: both sides and what memory gives hinder one another where they take
    /// about as long.
    pub fn once(&self, work: &SpanWork) -> f64 {
        let [spans, tails] = self.sides(work);
        let bytes = self.tails + (work.own_bytes + work.span_bytes) / self.memory;
        let fourth = |x: f64| (x * x) * (x * x);
        (fourth(spans) + fourth(tails) + fourth(bytes)).sqrt().sqrt()
    }

    /// Nanoseconds of a step that reads each row by itself.
    pub fn flat(&self, work: &SpanWork) -> f64 {
        let again = work.row_bytes - work.own_bytes - work.span_bytes;
        self.flat + work.own_bytes / self.own + work.span_bytes / self.first + again / self.again
    }

    /// Whether the step is better read once.
    pub fn is_better_once(&self, work: &SpanWork) -> bool {
        self.once(work) * Self::MARGIN < self.flat(work)
    }

    /// Nanoseconds gained where `members` rows read a span of so many bytes once, with so many tiles of products for
    /// each multiprocessor.
    pub fn gain(&self, members: f64, bytes: f64, tiles: f64) -> f64 {
        let flat = bytes / self.first + (members - 1.0) * bytes / self.again;
        flat - (tiles * self.tile).max(bytes / self.memory)
    }
}
