//! The kernels that are compiled before the first step: all that a host uses, and no others.

use kvarena::backend::cuda::{Cuda, CudaError, CudaOptions, CudaStream, DeviceBuffer, Gpu, Prepare};
use kvarena::backend::{Backend, OpenBackend};
use kvarena::config::StepBounds;
use kvarena::layout::{Dtype, LabelChannels, PoolLayout, Scaling, TableShape};
use kvarena::plan::{PlanSize, SlotMapping};
use kvarena::testkit::contract::{Case, Filter, check_backend, check_cases, check_served, check_sparse_backend};
use kvarena::testkit::padded::padded;
use kvarena::{
    Attend, Capacity, Engine, Extend, KvDtype, KvShape, LayerId, Namespace, PoolConfig, SeqKey, StepScratch, TokenId,
};

use crate::on_gpu::{OnGpu, OnGpuOptions};
use crate::plans::{FIRST, plan_of};
use crate::{device, gpu, seeds};

/// Options of a backend on its own device handle. `open` prepares it for all calls of a random program, so it may
/// compile no kernel later.
struct Prepared {
    options: OnGpuOptions,
    attend: Attend,
    lists: bool,
}

impl Prepared {
    fn new(case: &Case, lists: bool) -> Self {
        let gpu = device(0).expect("the device exists");
        let options = OnGpuOptions::with_all_spans(&gpu).for_case(case);
        Self { options, attend: case.attend(), lists }
    }
}

impl OpenBackend for Prepared {
    type Backend = OnGpu;

    fn open(self, layout: &PoolLayout, table: &TableShape, bounds: impl Into<StepBounds>) -> Result<OnGpu, CudaError> {
        let mut backend = self.options.open(layout, table, bounds)?;
        let (attend, lists) = ([self.attend], [(self.attend, 1)]);
        let lists = if self.lists { &lists[..] } else { &[] };
        let work = Prepare { lists, trees: true, compactions: true, ..Prepare::new(&attend) };
        backend.cuda.prepare(&work)?;
        backend.is_prepared = true;
        Ok(backend)
    }
}

/// Random programs over every kind of pool.
#[test]
fn nothing_is_compiled_after_prepare() {
    let Some(_gpu) = gpu() else { return };
    let options = |case: &Case| Prepared::new(case, false);
    let few = seeds(10);
    let few = few.start..few.end.min(few.start + 10);
    println!("{}", check_backend(options, few.start..few.start + 2 * (few.end - few.start)));
    println!("{}", check_cases(&Filter::SPANS, options, few.clone()));
    println!("{}", check_cases(&Filter::SHORT_SPANS, options, few.clone()));
    println!("{}", check_cases(&Filter::FP8_SPANS, options, few.clone()));
    println!("{}", check_cases(&Filter::SHORT, options, few.clone()));
    let two = few.start..few.end.min(few.start + 2);
    println!("{}", check_cases(&Filter::LATENT, options, two.clone()));
    println!("{}", check_cases(&Filter::LATENT_FP8, options, two.clone()));
    println!("{}", check_served(false, options, two, |_| {}));
    let with_lists = |case: &Case| Prepared::new(case, true);
    println!("{}", check_sparse_backend(&Filter::LABELS, with_lists, few));
}

/// Opens a backend over a small pool. `labels` is 0, or 2 if the pool has two kv heads.
fn open(gpu: &Gpu, dtype: KvDtype, shape: KvShape, labels: u32) -> Cuda {
    let config = PoolConfig {
        layers: 1,
        shape,
        dtype,
        scaling: if dtype.is_quantised() { Scaling::ByToken } else { Scaling::Static },
        label_channels: labels,
        capacity: Capacity::Pages(4),
        ..PoolConfig::default()
    };
    let channels = || LabelChannels::new(1, 2, labels, [0, 1].repeat(2)).expect("the channels ascend");
    let options = CudaOptions {
        rows: Some(if dtype.is_quantised() { Dtype::Bf16 } else { dtype.rows() }),
        labels: (labels > 0).then(channels),
        ..CudaOptions::new(gpu)
    };
    let table = TableShape::new(4, 2, 64, 64).expect("a small table");
    options
        .open(&config.layout().expect("a small pool"), &table, StepBounds { steps: 2, tokens: 64 })
        .expect("a small pool")
}

/// Returns the names of the loaded kernels, without `attend_` and `bf16_`. Omits the kernels that load a plan or store.
fn compiled(dtype: KvDtype, shape: KvShape, work: &Prepare<'_>) -> Vec<String> {
    let gpu = device(0).expect("the device exists");
    let labels = if work.lists.is_empty() { 0 } else { 2 };
    open(&gpu, dtype, shape, labels).prepare(work).expect("a served shape");
    let mut names: Vec<_> = gpu.kernels().into_iter().map(str::to_owned).collect();
    names.retain(|name| name != "load_plan" && !name.starts_with("store_"));
    names.iter_mut().for_each(|name| *name = name.replace("attend_", "").replace("bf16_", ""));
    names.sort();
    names
}

/// Each kind of prepared work adds its kernels.
#[test]
fn only_kernels_of_the_prepared_work_are_loaded() {
    let Some(gpu) = gpu() else { return };
    let hopper = gpu.capability() == 90;
    let (bf16, fp8, heads) = (KvDtype::Bf16, KvDtype::Fp8E4M3, KvShape::heads(2, 128));
    let attend = [Attend::new(16, 128)];
    let least = Prepare { extend: false, spans: false, copies: false, ..Prepare::new(&attend) };
    let of = |work: &Prepare<'_>| compiled(bf16, heads, work);
    assert_eq!(of(&least), ["decode_d128_r8"]);
    assert_eq!(of(&Prepare { copies: true, ..least }), ["copy_pages", "decode_d128_r8"]);
    assert_eq!(of(&Prepare { compactions: true, ..least }), ["compact_slots", "decode_d128_r8"]);
    let shared = if hopper { "shared_d128_r8_sm90a" } else { "shared_d128_r8" };
    assert_eq!(of(&Prepare { spans: true, ..least }), ["decode_d128_r8", shared]);
    let extend = if hopper { "extend_d128_sm90a" } else { "extend_d128" };
    let wide = if hopper { "decode_d128_r64_sm90a" } else { "decode_d128_r16" };
    // Rows of two tokens, with 8 query heads for a kv head; and prompts, which have any number of tokens.
    for work in [Prepare { decode_tokens: 2, ..least }, Prepare { extend: true, ..least }] {
        let mut both = [wide, "decode_d128_r8", extend];
        both.sort_unstable();
        assert_eq!(of(&work), both);
    }
    let trees = compiled(fp8, heads, &Prepare { trees: true, ..least });
    let own = ["decode_fp8_d128_r8", "extend_fp8_d128", "extend_fp8_token_d128_sm90a"];
    assert_eq!(trees, if hopper { &own[..] } else { &own[..2] });
    // If all layers read lists, decode over whole rows is not compiled.
    let lists = [(attend[0], 16)];
    let sparse = of(&Prepare { lists: &lists, attend: &[], ..least });
    assert_eq!(sparse, ["resolve_selection", "score_labels_bf16", "select_top", "selected_d128_r8"]);
    let latent = KvShape::Latent { rank: 512, rope: 64 };
    let all = compiled(bf16, latent, &Prepare { attend: &[Attend::latent(16, 0.1)], ..least });
    assert!(all.iter().all(|name| name.starts_with("latent_")), "{all:?}");
}

/// Modules that a step compiles, or another backend on the same device handle, are counted until the next `prepare`.
#[test]
fn unprepared_kernels_are_counted() {
    let Some(gpu) = gpu() else { return };
    let gpu = Gpu::new(gpu.ordinal()).expect("the device exists");
    let mut cuda = open(&gpu, KvDtype::Bf16, KvShape::heads(2, 128), 0);
    assert_eq!(cuda.modules_after_prepare(), 0);
    let attend = [Attend::new(2, 128)];
    let decodes = Prepare { extend: false, spans: false, ..Prepare::new(&attend) };
    cuda.prepare(&decodes).expect("a served shape");
    assert_eq!(cuda.modules_after_prepare(), 0);
    // A group of 16 heads needs another decode kernel than a group of one.
    let wide = Attend::new(32, 128);
    let plan = plan_of(1, &[FIRST], &[0], SlotMapping::I32(&[0]));
    let q = DeviceBuffer::of(&gpu, &[0_u16; 32 * 128]).expect("small");
    let mut out = DeviceBuffer::new(&gpu, q.bytes()).expect("small");
    cuda.begin(&plan).expect("a valid plan");
    let outs = out.rows_mut(0, None);
    cuda.attend(&plan, LayerId::new(0), &wide, q.rows(0, None), outs, None).expect("it is served");
    cuda.synchronize().expect("it ran");
    assert!(cuda.modules_after_prepare() > 0);
    cuda.prepare(&decodes).expect("a served shape");
    assert_eq!(cuda.modules_after_prepare(), 0);
    let before = gpu.module_count();
    assert!(before > 0);
    let mut other = open(&gpu, KvDtype::Bf16, KvShape::heads(2, 128), 0);
    other.prepare(&Prepare::new(&attend)).expect("a served shape");
    let more = gpu.module_count() - before;
    assert!(more > 0);
    assert_eq!((cuda.modules_after_prepare(), other.modules_after_prepare()), (more, 0));
    cuda.prepare(&decodes).expect("a served shape");
    assert_eq!(cuda.modules_after_prepare(), 0);
}

/// Returns a prepared engine of 8 sequences that share 32 positions.
fn engine_of_spans(gpu: &Gpu, work: &Prepare<'_>) -> (Engine<Cuda>, Vec<SeqKey>) {
    let config = PoolConfig {
        layers: 1,
        shape: KvShape::heads(2, 128),
        dtype: KvDtype::Bf16,
        page_size: 16,
        capacity: Capacity::Pages(64),
        ..PoolConfig::default()
    };
    // The default stream cannot be captured.
    let stream = Some(CudaStream::new(gpu).expect("a stream"));
    let options = CudaOptions { stream, all_spans: true, ..CudaOptions::new(gpu) };
    let mut engine = Engine::new(config, options).expect("a small pool");
    let prompt: Vec<TokenId> = (0..33).map(TokenId::new).collect();
    let mut scratch = StepScratch::new();
    let admitted = (0..8).map(|_| {
        let seq = engine.admit(Namespace::default(), &prompt, 0).expect("it fits");
        let len = 33 - engine.cached_len(seq).expect("it is live");
        let step = engine.plan_batch(&mut scratch, &[Extend { seq, len }]).expect("it fits").step();
        engine.commit(step).expect("it is open");
        engine.complete(step).expect("it is committed");
        seq
    });
    let admitted = admitted.collect();
    engine.backend_mut().prepare(work).expect("kernels support it");
    (engine, admitted)
}

/// Padding that is too long for the suffix of a span goes to the extend kernel, so `prepare` compiles it.
#[test]
fn padding_beside_spans_is_written_by_a_kernel_loaded_for_it() {
    let Some(_gpu) = gpu() else { return };
    let gpu = device(0).expect("the device exists");
    let attend = [Attend::new(8, 128)];
    let work = Prepare { extend: false, copies: false, ..Prepare::new(&attend) };
    let (mut engine, admitted) = engine_of_spans(&gpu, &work);
    for &seq in &admitted {
        engine.append(seq, &[1, 2, 3].map(TokenId::new)).expect("it is live");
    }
    let items: Vec<Extend> = admitted.iter().map(|&seq| Extend { seq, len: 3 }).collect();
    let (mut scratch, mut padding) = (StepScratch::new(), StepScratch::new());
    let plan = engine.plan_batch(&mut scratch, &items).expect("it fits");
    assert!(!plan.shared.spans.is_empty());
    let plan = padded(&plan, &mut padding, PlanSize { rows: 9, tokens: 32 });
    let backend = engine.backend_mut();
    backend.stage(&plan).expect("it fits");
    const MARK: u16 = 0x3f80;
    let q = DeviceBuffer::of(&gpu, &vec![0_u16; 32 * 1024]).expect("small");
    let mut out = DeviceBuffer::of(&gpu, &vec![MARK; 32 * 1024]).expect("small");
    let (rows, outs) = (q.rows(0, None), out.rows_mut(0, None));
    backend.attend(&plan, LayerId::new(0), &attend[0], rows, outs, None).expect("it is served");
    backend.synchronize().expect("it ran");
    let out = out.read::<u16>(0, 32 * 1024).expect("the buffer is readable");
    let kept = out.chunks(1024).position(|row| row.iter().all(|&x| x == MARK));
    assert_eq!(kept, None, "every row is written");
}

/// `begin` stages a plan that is padded from the start, so `stage` needs neither kernels nor an upload.
#[test]
fn padded_steps_of_several_tokens_need_nothing_more() {
    let Some(_gpu) = gpu() else { return };
    let gpu = device(0).expect("the device exists");
    let attend = [Attend::new(8, 128)];
    let work = Prepare { extend: false, decode_tokens: 2, ..Prepare::new(&attend) };
    let (mut engine, admitted) = engine_of_spans(&gpu, &work);
    for &seq in &admitted {
        engine.append(seq, &[1, 2].map(TokenId::new)).expect("it is live");
    }
    let items: Vec<Extend> = admitted[..4].iter().map(|&seq| Extend { seq, len: 2 }).collect();
    let (mut scratch, size) = (StepScratch::new(), PlanSize { rows: 8, tokens: 16 });
    let plan = engine.plan_padded(&mut scratch, &items, &[], size).expect("it fits");
    let sent = engine.backend().uploaded_bytes();
    engine.backend_mut().stage(&plan).expect("it fits");
    assert_eq!(engine.backend().uploaded_bytes(), sent);
    assert_eq!(engine.backend().modules_after_prepare(), 0);
    // A capture compiles no kernel.
    let stream = engine.backend().stream().clone();
    let all = Prepare { compactions: true, ..work };
    let captured = stream.capture(|| engine.backend_mut().prepare(&all));
    assert!(matches!(captured, Err(CudaError::NotPrepared)), "{captured:?}");
}
