//! What a step takes whose rows share spans: the model that spans are accepted by, and CTAs dealt.
//!
//! `benches/gpu spans` compares it with what steps take, and fits its constants.

/// What a kernel takes, in nanoseconds, and bytes a nanosecond.
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
    /// Bytes of decode units, those without tokens too, that a multiprocessor works off.
    pub units: f64,
    /// A part of a sum that a span makes.
    pub part: f64,
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
    /// Items, of one kv head each.
    pub items: f64,
    /// Their tiles.
    pub tiles: f64,
    /// The longest item's tiles.
    pub longest: f64,
    /// Items as long as that.
    pub whole: f64,
    /// CTAs that work on spans.
    pub span_ctas: f64,
    /// Bytes of the tails' units.
    pub unit_bytes: f64,
    /// CTAs that work on tails.
    pub tail_ctas: f64,
    /// Parts that spans make of sums.
    pub parts: f64,
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
            tile: 2200.0,
            item: 3900.0,
            spans: 7400.0,
            tails: 9500.0,
            units: 100.0,
            part: 4.0,
            memory: 4100.0,
            flat: 7000.0,
            own: 6350.0,
            first: 3040.0,
            again: 6940.0,
        },
        Self {
            tile: 1850.0,
            item: 580.0,
            spans: 22_600.0,
            tails: 17_700.0,
            units: 58.0,
            part: 6.5,
            memory: 4400.0,
            flat: 10_200.0,
            own: 4700.0,
            first: 2710.0,
            again: 7840.0,
        },
    ];

    /// Of the kernels for any device, a whole multiprocessor's, by head_dim and place of the tail's kernel. Fitted to
    /// what H200s took of head_dim 64 and 256 flat, and to older forms of these kernels; of 128 products are those of
    /// the extend kernel.
    pub fn general(head_dim: u32, tails: usize) -> Self {
        let [narrow, of] = [Self::H200[0], Self::H200[tails]];
        let (tile, units, part, of_flat) = match head_dim {
            64 => (2200.0, 55.0, 3.0, [6500.0, 4950.0, 2430.0, 7490.0]),
            128 => (3700.0, 90.0, 5.0, [7000.0, 6350.0, 3040.0, 6940.0]),
            _ => (5100.0, 70.0, 9.0, [10_600.0, 5720.0, 2820.0, 6160.0]),
        };
        let [flat, own, first, again] = of_flat;
        let (units, part) = (units * of.units / narrow.units, part * of.part / narrow.part);
        Self { tile, units, part, flat, own, first, again, ..of }
    }

    /// The same of CTAs, so many of which share a multiprocessor.
    pub fn of_ctas(self, resident: u32) -> Self {
        let resident = f64::from(resident);
        Self { tile: self.tile * resident, units: self.units / resident, ..self }
    }

    /// A step that reads spans once is to be faster by this factor, so that the model's error seldom makes it slower.
    const MARGIN: f64 = 1.15;

    /// Nanoseconds until the multiprocessors for spans are done, and until those for tails are.
    pub fn sides(&self, work: &SpanWork) -> [f64; 2] {
        // Items go to whoever is free, longest first: the longest in turns of their own, then all others.
        let turns = (work.whole / work.span_ctas).ceil();
        let others = ((work.items / work.span_ctas).ceil() - turns).max(0.0);
        let short = (work.tiles - work.whole * work.longest) / (work.items - work.whole).max(1.0);
        let of = |turns: f64, tiles: f64| turns * (tiles * self.tile + self.item);
        let shared = (work.tiles * self.tile + work.items * self.item) / work.span_ctas;
        let spans = self.spans + shared.max(of(turns, work.longest) + of(others, short));
        [spans, self.tails + work.unit_bytes / (work.tail_ctas * self.units)]
    }

    /// Nanoseconds of a step that reads spans once.
    pub fn once(&self, work: &SpanWork) -> f64 {
        let [spans, tails] = self.sides(work);
        let bytes = self.tails + (work.own_bytes + work.span_bytes) / self.memory;
        spans.max(tails).max(bytes) + work.parts * self.part
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
    /// each multiprocessor, and make so many parts of sums of it.
    pub fn gain(&self, members: f64, bytes: f64, tiles: f64, parts: f64) -> f64 {
        let flat = bytes / self.first + (members - 1.0) * bytes / self.again;
        flat - (tiles * self.tile).max(bytes / self.memory) - parts * self.part
    }
}
