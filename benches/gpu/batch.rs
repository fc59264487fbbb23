//! Batches over random pages, without an engine, and random numbers that are in the memory of both host and device.

use cust::sys;
use kvarena::backend::cuda::{DeviceBuffer, Gpu};
use kvarena::testkit::rng::Rng;
use kvarena::testkit::spans::Spans;
use kvarena::{
    BatchPlan, BatchRow, Capacity, KvDtype, KvShape, LayerId, Layout, PageId, PlaneName, PoolConfig, PoolLayout, RowId,
    SlotId, SlotMapping, StepId, TableShape, TableWrite, TokenId,
};

use crate::Outcome;

/// Returns the config of a pool of bf16, with 8 heads of 128.
pub fn pool(layers: u32, page_size: u32, slots: u32, layout: Layout) -> PoolConfig {
    let (shape, dtype, capacity) = (KvShape::heads(8, 128), KvDtype::Bf16, Capacity::Pages(slots / page_size));
    PoolConfig { layers, shape, dtype, page_size, capacity, layout, ..PoolConfig::default() }
}

/// Returns the shape of page tables for 256 sequences of up to 131,072 tokens, and 5,000,000 tokens in all.
pub fn table(page_size: u32) -> TableShape {
    TableShape::new(page_size, 256, 131_072, 5_000_000).expect("a valid table")
}

/// Returns `count` distinct numbers below `bound`, in random order.
pub fn distinct(rng: &mut Rng, count: usize, bound: u32) -> Vec<u32> {
    let mut all: Vec<u32> = (0..bound).collect();
    for i in 0..count {
        let other = i + rng.below((all.len() - i) as u64) as usize;
        all.swap(i, other);
    }
    all.truncate(count);
    all
}

/// The spans of a batch, which may be nested. `spans` has the rows and the number of tokens of each span, parents
/// first. `own` has the number of each row's other tokens.
pub struct Forest {
    pub spans: Vec<(std::ops::Range<usize>, u32)>,
    pub own: Vec<u32>,
}

impl Forest {
    /// Returns rows that share no tokens.
    pub fn alone(own: impl IntoIterator<Item = u32>) -> Self {
        Self { spans: Vec::new(), own: own.into_iter().collect() }
    }

    /// Draws random pages. Returns those of each row.
    fn pages(&self, layout: &PoolLayout, rng: &mut Rng) -> Vec<Vec<u32>> {
        let size = layout.page_size();
        let lens = self.own.iter().chain(self.spans.iter().map(|span| &span.1));
        let count: u32 = lens.map(|len| len.div_ceil(size)).sum();
        let mut free = distinct(rng, count as usize, layout.page_count()).into_iter();
        let mut draw = |count: u32| -> Vec<u32> { free.by_ref().take(count as usize).collect() };
        let spans: Vec<Vec<u32>> = self.spans.iter().map(|span| draw(span.1 / size)).collect();
        let row = |(row, own): (usize, &u32)| {
            let shared = self.spans.iter().zip(&spans).filter(|(span, _)| span.0.contains(&row));
            let mut pages: Vec<u32> = shared.flat_map(|(_, pages)| pages.iter().copied()).collect();
            pages.extend(draw(own.div_ceil(size)));
            pages
        };
        self.own.iter().enumerate().map(row).collect()
    }

    /// Returns the number of tokens, each counted once.
    pub fn tokens(&self) -> u64 {
        let spans = self.spans.iter().map(|span| span.1);
        self.own.iter().copied().chain(spans).map(u64::from).sum()
    }
}

/// One step, with its arrays.
pub struct Batch {
    step: u64,
    pub rows: Vec<BatchRow>,
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
    pub slots: Vec<i32>,
    writes: Vec<TableWrite>,
    /// Pages of each sequence.
    pub pages: Vec<Vec<u32>>,
    shared: Spans,
}

impl Batch {
    /// Returns a step of sequences that share the spans of a forest. `new_lens` has each row's number of new tokens.
    /// Pages are random. Spans must have whole pages.
    pub fn forest(
        step: u64,
        layout: &PoolLayout,
        table: &TableShape,
        forest: &Forest,
        new_lens: &[u32],
        rng: &mut Rng,
    ) -> Self {
        let size = layout.page_size();
        let tables = forest.pages(layout, rng);
        let around = |row: usize| forest.spans.iter().filter(move |span| span.0.contains(&row)).map(|span| span.1);
        let lens = forest.own.iter().zip(new_lens).enumerate();
        let lens: Vec<(u32, u32)> = lens.map(|(row, (own, new))| (*new, around(row).sum::<u32>() + own)).collect();
        let whole = |(pages, &(new, len)): (&Vec<u32>, &(u32, u32))| -> Vec<PageId> {
            pages[..((len - new) / size) as usize].iter().copied().map(PageId::new).collect()
        };
        let whole: Vec<_> = tables.iter().zip(&lens).map(whole).collect();
        let whole: Vec<&[PageId]> = whole.iter().map(Vec::as_slice).collect();
        let shared = Spans::of(&whole, size);
        let lens = lens.as_slice();
        let mut batch = Self {
            shared,
            step,
            rows: Vec::new(),
            tokens: Vec::new(),
            positions: Vec::new(),
            slots: Vec::new(),
            writes: Vec::new(),
            pages: Vec::new(),
        };
        let mut leaf = 0;
        for (i, &(extend_len, kv_len)) in lens.iter().enumerate() {
            let row = RowId::new(i as u32);
            let pages = tables[i].clone();
            for (index, &value) in pages.iter().enumerate() {
                let index = index as u32;
                if index.is_multiple_of(table.leaf_pages) {
                    let write = TableWrite { index: table.directory_word(row, index), value: leaf };
                    batch.writes.push(write);
                    leaf += 1;
                }
                batch.writes.push(TableWrite { index: table.page_word(leaf - 1, index), value });
            }
            let qo_start = batch.positions.len() as u32;
            batch.rows.push(BatchRow { row, qo_start, extend_len, kv_len });
            for position in kv_len - extend_len..kv_len {
                batch.positions.push(position);
                let page = pages[(position / size) as usize];
                batch.slots.push((page * size + position % size) as i32);
                batch.tokens.push(TokenId::PENDING);
            }
            batch.pages.push(pages);
        }
        batch
    }

    /// Returns a step that stores one new token in each of these slots, for benches without attention.
    pub fn stores(step: u64, slots: &[u32]) -> Self {
        let count = slots.len() as u32;
        // kv_len 0 marks padding, so kernels do not read the tables.
        let row = BatchRow { row: RowId::new(0), qo_start: 0, extend_len: count, kv_len: 0 };
        Self {
            step,
            rows: vec![row],
            tokens: vec![TokenId::PENDING; slots.len()],
            positions: vec![0; slots.len()],
            slots: slots.iter().map(|&slot| slot as i32).collect(),
            writes: Vec::new(),
            pages: Vec::new(),
            shared: Spans::default(),
        }
    }

    /// Replaces the batch's pages by random pages below `bound`, which is at least the number of the batch's pages.
    pub fn move_below(&mut self, bound: u32, layout: &PoolLayout, rng: &mut Rng) {
        let size = layout.page_size();
        let mut free = distinct(rng, bound as usize, bound).into_iter();
        let mut moved = vec![None; layout.page_count() as usize];
        let mut new_place = |page: u32| *moved[page as usize].get_or_insert_with(|| free.next().expect("a page"));
        self.pages.iter_mut().flatten().for_each(|page| *page = new_place(*page));
        for slot in &mut self.slots {
            *slot = (new_place(*slot as u32 / size) * size) as i32 + *slot % size as i32;
        }
        let first = table(size).page_word(0, 0);
        let words = self.writes.iter_mut().filter(|write| write.index >= first);
        words.for_each(|write| write.value = new_place(write.value));
    }

    pub fn plan(&self) -> BatchPlan<'_> {
        BatchPlan {
            track_slots: SlotMapping::I32(&[]),
            step: StepId::new(self.step),
            rows: &self.rows,
            tokens: &self.tokens,
            positions: &self.positions,
            slot_mapping: SlotMapping::I32(&self.slots),
            table_writes: &self.writes,
            shared: self.shared.plan(),
            masks: &[],
        }
    }
}

/// A long list of random bf16 numbers, repeated to fill device memory: element `i` of filled memory is `at(i)`.
pub struct Noise {
    host: Vec<u16>,
    device: DeviceBuffer,
}

impl Noise {
    pub fn new(gpu: &Gpu) -> Outcome<Self> {
        let mut rng = Rng::new(42);
        // No large power of two divides the length, so different pages have different numbers.
        let len = 24_000_008;
        let mut number = || {
            // Nearly normal, as the sum of four uniform numbers.
            let bits = rng.bits();
            let sum: u32 = (0..4).map(|i| (bits >> (16 * i)) as u32 & 0xffff).sum();
            half::bf16::from_f32((sum as f32 / 65_536.0 - 2.0) * 1.7).to_bits()
        };
        let host: Vec<u16> = (0..len).map(|_| number()).collect();
        let device = DeviceBuffer::of(gpu, &host)?;
        Ok(Self { host, device })
    }

    pub fn at(&self, element: u64) -> f32 {
        half::bf16::from_bits(self.host[(element % self.host.len() as u64) as usize]).to_f32()
    }

    /// Returns one kv head of K or V at a slot of a filled pool.
    pub fn stored(&self, pool: &PoolLayout, plane: PlaneName, layer: LayerId, slot: SlotId, head: u32) -> Vec<f64> {
        let row = pool.row(plane, layer, slot).expect("the pool has it");
        let at = row.start / 2 + u64::from(head * pool.head_dim());
        (at..at + u64::from(pool.head_dim())).map(|i| self.at(i).into()).collect()
    }

    /// Fills device memory.
    pub fn fill(&self, target: &DeviceBuffer) -> Outcome<()> {
        self.fill_from(target, 0)
    }

    /// Fills the memory from byte `begin` on with copies of the list.
    pub fn fill_from(&self, target: &DeviceBuffer, begin: u64) -> Outcome<()> {
        let mut at = begin;
        while at < target.bytes() {
            let bytes = (target.bytes() - at).min(self.device.bytes());
            // SAFETY: both ranges are inside their buffers.
            let result = unsafe { sys::cuMemcpyDtoD_v2(target.address() + at, self.device.address(), bytes as usize) };
            assert_eq!(result as u32, 0, "cuMemcpyDtoD");
            at += bytes;
        }
        // SAFETY: takes no pointers.
        assert_eq!(unsafe { sys::cuCtxSynchronize() } as u32, 0, "cuCtxSynchronize");
        Ok(())
    }

    /// Returns new device memory, filled.
    pub fn buffer(&self, gpu: &Gpu, bytes: u64) -> Outcome<DeviceBuffer> {
        let buffer = DeviceBuffer::new(gpu, bytes)?;
        self.fill(&buffer)?;
        Ok(buffer)
    }
}
