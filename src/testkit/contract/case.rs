//! Random cases: the shape of a pool and its rows.

use half::slice::HalfFloatSliceExt;
use half::vec::HalfFloatVecExt;
use half::{bf16, f16};

use crate::backend::Attend;
use crate::id::LayerId;
use crate::layout::{
    Capacity, Dtype, Groups, KvDtype, KvScales, KvShape, LabelChannels, Layout, Plane, PlaneName, PlaneOrder,
    PoolConfig, PoolLayout, Reach, Scaling, TableShape,
};
use crate::testkit::quantised;
use crate::testkit::rng::Rng;

/// Maximum size of a random pool in bytes; every comparison reads the whole pool.
const POOL_BYTES: u64 = 8 << 20;

/// A shape for the check of a backend.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The pool.
    pub layout: PoolLayout,
    /// Its page tables.
    pub table: TableShape,
    /// Maximum number of open steps.
    pub max_steps: u32,
    /// Number of query heads of one kv head.
    pub group_size: u32,
    /// Element type of the rows of k and v.
    pub kv_rows: Dtype,
    /// Element type of q and of the output.
    pub q_rows: Dtype,
    /// Maximum number of tokens of a sequence.
    pub max_len: u32,
    /// Maximum number of new tokens of a row.
    pub extend_max: u32,
    /// Seed of static scales; `None` without them.
    pub scale_seed: Option<u64>,
    /// Seed of the label channels, if the pool has labels.
    pub label_seed: u64,
}

impl Case {
    /// Returns the case with the shape of a layer's group, and the same number of query heads for each kv head.
    pub fn of(&self, layer: LayerId) -> Self {
        self.of_group(self.layout.place(layer).group)
    }

    /// Returns the case with the shape of a group.
    pub fn of_group(&self, group: u32) -> Self {
        Self { layout: self.layout.of_group(group), ..*self }
    }

    /// Returns one case for each group, with the shape of the group.
    pub fn groups(&self) -> impl Iterator<Item = Self> + use<'_> {
        (0..self.layout.groups().count()).map(|group| self.of_group(group))
    }

    /// Returns the number of query heads.
    pub fn q_heads(&self) -> u32 {
        self.group_size * self.layout.kv_heads()
    }

    /// Returns the static scales of the backend, if any.
    pub fn scales(&self) -> Option<KvScales> {
        let (layers, heads) = (self.layout.layers(), self.layout.most_kv_heads());
        self.scale_seed.map(|seed| quantised::scales(layers, heads, seed))
    }

    /// Returns the label channels of the backend, if any.
    pub fn labels(&self) -> Option<LabelChannels> {
        let channels = self.layout.label_channels();
        (channels > 0).then(|| {
            let mut rng = Rng::new(self.label_seed);
            let (layers, heads) = (self.layout.layers(), self.layout.kv_heads());
            let head = || some_of(&mut rng, self.layout.head_dim(), channels);
            let values = std::iter::repeat_with(head).take((layers * heads) as usize);
            let values = values.flatten().collect();
            LabelChannels::new(layers, heads, channels, values).expect("they ascend")
        })
    }

    /// Returns the number of elements of one stored row of k and of v; 0 for v of latent rows.
    pub fn kv_widths(&self) -> [usize; 2] {
        self.layout.store_widths()
    }

    /// Returns the number of elements of one row of q.
    pub fn q_width(&self) -> usize {
        self.q_heads() as usize * self.layout.head_dim() as usize
    }

    /// Returns the number of elements of one output row.
    pub fn out_width(&self) -> usize {
        self.q_heads() as usize * self.layout.value_dim() as usize
    }

    /// Returns plain attention for the shape.
    pub fn attend(&self) -> Attend {
        match self.layout.shape() {
            // The rows compress heads of another length.
            KvShape::Latent { rank, rope } => Attend::latent(self.q_heads(), 1.0 / ((rank / 4 + rope) as f32).sqrt()),
            _ => Attend::new(self.q_heads(), self.layout.head_dim()),
        }
    }

    /// Returns plain attention for a layer, with the reach of its group.
    pub fn attend_of(&self, layer: LayerId) -> Attend {
        let group = self.layout.place(layer).group;
        let plain = self.of_group(group).attend();
        match self.layout.groups().reach(group) {
            Reach::Window(size) => Attend { window: Some(size), ..plain },
            Reach::Chunk(size) => Attend { chunk: Some(size), ..plain },
            _ => plain,
        }
    }

    /// Returns a random shape of at most [`POOL_BYTES`], with one group of layers or with several.
    pub(super) fn random(rng: &mut Rng, in_groups: bool) -> Self {
        loop {
            let case = Self::any(rng, in_groups);
            if case.layout.total_bytes() <= POOL_BYTES {
                return case;
            }
        }
    }

    /// Returns the case of a small pool with many kv heads. It has few tokens, because a token can take megabytes.
    pub(super) fn of_many_heads(rng: &mut Rng, kv_heads: u32) -> Self {
        let rows = rng.pick(&[Dtype::F16, Dtype::Bf16]);
        let (max_len, page_size) = (3, rng.pick(&[1, 2]));
        let table_rows = if kv_heads < 8192 { 2 } else { 1 };
        let config = PoolConfig {
            layers: 1,
            shape: KvShape::heads(kv_heads, 64),
            dtype: if rng.one_in(2) { KvDtype::Fp8E4M3 } else { rows.into() },
            page_size,
            capacity: Capacity::Pages(table_rows * u32::div_ceil(max_len, page_size)),
            layout: rng.pick(&[Layout::LayerFirst, Layout::PageFirst]),
            ..PoolConfig::default()
        };
        let tokens = u64::from(table_rows * max_len);
        Self {
            layout: config.layout().expect("a valid pool"),
            table: TableShape::new(page_size, table_rows, max_len, tokens).expect("a small table"),
            max_steps: 1,
            group_size: 1,
            kv_rows: rows,
            q_rows: rows,
            max_len,
            extend_max: 2,
            scale_seed: None,
            label_seed: 0,
        }
    }

    fn any(rng: &mut Rng, in_groups: bool) -> Self {
        let dtypes = [Dtype::F32, Dtype::F16, Dtype::Bf16];
        let dtype = rng.pick(&dtypes);
        let rows = rng.pick(&[dtype, dtype, Dtype::F32, Dtype::F16, Dtype::Bf16]);
        // Only small products, so that a run takes little time.
        let (kv_heads, group_size, head_dim) = loop {
            let heads = (
                rng.pick(&[1, 2, 2, 3, 4, 8]),
                rng.pick(&[1, 1, 2, 3, 4, 5, 7, 8, 16]),
                rng.pick(&[8, 16, 20, 32, 64, 64, 80, 96, 128, 128, 256]),
            );
            if heads.0 * heads.1 * heads.2 <= 2048 {
                break heads;
            }
        };
        let page_size = rng.pick(&[1, 2, 3, 7, 16, 16, 64, 256, 257, 341, 512, 1024]);
        let max_len = rng.pick(&[9, 40, 40, 150, 150, 700, 2500]);
        let table_rows = if rng.one_in(4) { rng.within(7, 40) } else { rng.within(1, 6) } as u32;
        let pages = table_rows * u32::div_ceil(max_len, page_size) + rng.below(5) as u32;
        let config = PoolConfig {
            layers: rng.within(1, 3) as u32,
            groups: Groups::ONE,
            shape: KvShape::heads(kv_heads, head_dim),
            dtype: dtype.into(),
            scaling: Scaling::Static,
            label_channels: if rng.one_in(3) { rng.pick(&[1, 2, 5, 8, 8, 16]).min(head_dim) } else { 0 },
            page_size,
            capacity: Capacity::Pages(pages),
            layout: rng.pick(&[Layout::LayerFirst, Layout::PageFirst]),
            swap_pages: 5,
            stage_pages: 2,
            ..PoolConfig::default()
        };
        let config = if in_groups { with_groups(&config, rng) } else { config };
        let config = if rng.one_in(4) { with_fp8(&config, rng) } else { config };
        let (config, group_size) = if rng.one_in(6) { latent(&config, rng) } else { (config, group_size) };
        let own = in_groups && rng.one_in(2);
        let config = if own { with_shapes(&config, rows, rng) } else { config };
        let plain = config.layout().expect("a valid pool");
        let mut dtypes = (0..plain.groups().count()).map(|group| plain.of_group(group).dtype());
        let given = dtypes.any(KvDtype::is_quantised) && config.scaling == Scaling::Static;
        let tokens = u64::from(table_rows * max_len);
        let max_steps = rng.within(1, 3) as u32;
        let table = TableShape::of(&plain, table_rows, max_len, tokens);
        Self {
            layout: if rng.one_in(4) { with_spare_plane(&config) } else { plain },
            table: table.expect("a small table"),
            max_steps,
            group_size,
            kv_rows: rows,
            q_rows: rows,
            max_len,
            extend_max: u32::MAX,
            scale_seed: (given && !rng.one_in(8)).then(|| rng.bits()),
            label_seed: rng.bits(),
        }
    }
}

/// Returns the pool with 2 to 5 layers in several groups, and the same number of pages for each track.
pub(super) fn with_groups(config: &PoolConfig, rng: &mut Rng) -> PoolConfig {
    let layers = rng.within(2, 5) as u32;
    let count = rng.within(2, layers.min(4).into());
    let limited = (1..count).map(|_| {
        if rng.one_in(3) {
            Reach::Chunk(rng.pick(&[1, 8, 16, 32, 64, 256, 2048]))
        } else {
            Reach::Window(rng.pick(&[1, 2, 5, 17, 33, 64, 100, 1000]))
        }
    });
    let reaches: Vec<_> = std::iter::once(Reach::All).chain(limited).collect();
    let groups = loop {
        let layers: Vec<_> = (0..layers).map(|_| rng.below(count) as u8).collect();
        if let Ok(groups) = Groups::new(&reaches, &layers) {
            break groups;
        }
    };
    let config = PoolConfig { layers, groups, ..*config };
    let tracks = config.layout().expect("a valid pool").tracks();
    let Capacity::Pages(pages) = config.capacity else { return config };
    PoolConfig { capacity: Capacity::Pages(pages * tracks), ..config }
}

/// Returns the same pool with own shapes for the groups after group 0, and the same number of pages for each track.
/// Kernels support the groups' shapes if they support the pool's.
pub(super) fn with_shapes(config: &PoolConfig, rows: Dtype, rng: &mut Rng) -> PoolConfig {
    let mut groups = config.groups;
    for group in 1..groups.count() {
        let (shape, dtype) = match config.shape {
            KvShape::Heads { kv_heads, head_dim } => {
                let served = [64, 128, 256].contains(&head_dim);
                let dims = if served { [64, 128, 256] } else { [8, 20, 96] };
                let heads = rng.pick(&[1, 2, kv_heads]);
                let dtype = rng.pick(&[config.dtype, rows.into(), KvDtype::Fp8E4M3]);
                (KvShape::heads(heads, rng.pick(&dims)), dtype)
            }
            // Latent rows only have scales by token, and kernels support one length.
            shape => (shape, config.dtype),
        };
        groups = groups.with_shape(group, shape, dtype).expect("the group exists");
    }
    let mut own = PoolConfig { groups, layout: Layout::PageFirst, ..*config };
    let mut shapes = (1..groups.count()).filter_map(|group| groups.shape(group));
    if !config.dtype.is_quantised() && shapes.any(|own| own.dtype.is_some_and(KvDtype::is_quantised)) {
        own.scaling = rng.pick(&[Scaling::Static, Scaling::ByToken]);
    }
    let [before, after] = [config, &own].map(|config| config.layout().expect("a valid pool"));
    let Capacity::Pages(pages) = config.capacity else { return own };
    let pages = pages.div_ceil(before.tracks()) * after.tracks();
    PoolConfig { capacity: Capacity::Pages(pages), ..own }
}

/// Returns the same pool with latent rows, and a number of query heads.
fn latent(config: &PoolConfig, rng: &mut Rng) -> (PoolConfig, u32) {
    let scaling = match config.dtype {
        KvDtype::Fp8E4M3 => Scaling::ByToken,
        _ => Scaling::Static,
    };
    let (rank, rope, heads) = match rng.below(2) {
        // The shape that kernels support.
        0 => (512, 64, rng.pick(&[1, 2, 3, 8, 16, 17, 32, 40, 64, 128])),
        _ => (rng.pick(&[1, 8, 16, 20, 70]), rng.pick(&[1, 4, 8, 16, 30]), rng.within(1, 9) as u32),
    };
    let shape = KvShape::Latent { rank, rope };
    (PoolConfig { shape, scaling, label_channels: 0, ..*config }, heads)
}

/// Returns `count` numbers below `end`, ascending.
fn some_of(rng: &mut Rng, end: u32, count: u32) -> Vec<u32> {
    let mut left = count;
    let taken = |&x: &u32| {
        let taken = rng.below(u64::from(end - x)) < u64::from(left);
        left -= u32::from(taken);
        taken
    };
    (0..end).filter(taken).collect()
}

/// Returns the same pool in fp8, with either kind of scales.
fn with_fp8(config: &PoolConfig, rng: &mut Rng) -> PoolConfig {
    let scaling = rng.pick(&[Scaling::Static, Scaling::ByToken]);
    PoolConfig { dtype: KvDtype::Fp8E4M3, scaling, ..*config }
}

/// Returns the layout of a pool with an additional plane, whose pieces have another size. Only moves of pages and slots
/// may change this plane.
///
/// # Panics
/// If the config is invalid.
pub fn with_spare_plane(config: &PoolConfig) -> PoolLayout {
    let layout = config.layout().expect("a valid pool");
    let (heads, order) = (layout.kv_heads(), PlaneOrder::ByPage);
    let spare = Plane { name: PlaneName::Spare, heads, elements: 1, dtype: KvDtype::F32, order };
    let planes = [layout.planes(), &[spare]].concat();
    config.layout_with(&planes).expect("a valid pool")
}

/// Rows of numbers that `dtype` represents exactly.
#[derive(Clone, Debug)]
pub struct HostRows {
    /// Element type in the backend.
    pub dtype: Dtype,
    /// Number of elements of one row.
    pub width: usize,
    /// Number of elements from one row to the next. The elements between rows are NaN.
    pub stride: usize,
    /// `rows * stride` numbers.
    pub values: Vec<f32>,
}

impl HostRows {
    /// Returns `rows` rows of random numbers, packed or strided.
    pub(super) fn random(rng: &mut Rng, dtype: Dtype, rows: usize, width: usize) -> Self {
        // Kernels may require strides that are multiples of 16 bytes.
        let stride = width.next_multiple_of(8) + 8 * rng.pick(&[0, 0, 1, 5]);
        let stride = if rng.one_in(2) { width } else { stride };
        let size = rng.pick(&[0.3, 1.0, 3.0]);
        let mut values = vec![f32::NAN; rows * stride];
        for row in values.chunks_exact_mut(stride.max(1)) {
            row[..width].fill_with(|| size * normal(rng));
            round_all(dtype, &mut row[..width]);
        }
        Self { dtype, width, stride, values }
    }

    /// Returns row `i`, without the elements between rows.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.values[i * self.stride..i * self.stride + self.width]
    }
}

/// Returns an approximately normally distributed number.
fn normal(rng: &mut Rng) -> f32 {
    // The sum of four uniform numbers of 16 bits.
    let bits = rng.bits();
    let sum: u64 = (0..4).map(|i| bits >> (16 * i) & 0xffff).sum();
    (sum as f32 / (1 << 16) as f32 - 2.0) * 1.7
}

/// Rounds to the nearest number of `dtype`, ties to even.
pub fn round(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// Rounds each number to the nearest number of `dtype`, ties to even.
fn round_all(dtype: Dtype, values: &mut [f32]) {
    match dtype {
        Dtype::F32 => {}
        Dtype::F16 => Vec::<f16>::from_f32_slice(values).convert_to_f32_slice(values),
        Dtype::Bf16 => Vec::<bf16>::from_f32_slice(values).convert_to_f32_slice(values),
    }
}

/// Returns the bytes of numbers in `dtype`, rounded to nearest, ties to even.
pub fn bytes(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => bytemuck::cast_slice(values).to_vec(),
        Dtype::F16 => bytemuck::cast_slice(&Vec::<f16>::from_f32_slice(values)).to_vec(),
        Dtype::Bf16 => bytemuck::cast_slice(&Vec::<bf16>::from_f32_slice(values)).to_vec(),
    }
}

/// Returns half the distance from 1 to the next number of `dtype`: the relative error of rounding.
pub fn rounding(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 2_f64.powi(-24),
        Dtype::F16 => 2_f64.powi(-11),
        Dtype::Bf16 => 2_f64.powi(-8),
    }
}
