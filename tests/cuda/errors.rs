//! Calls that the backend rejects, each with its error.

use kvarena::backend::Operand;
use kvarena::backend::cuda::{Cuda, CudaError, CudaOptions, CudaStream, DeviceBuffer, Gpu, Prepare};
use kvarena::{
    Attend, Backend, BatchPlan, BatchRow, Capacity, ConfigError, Dtype, KvDtype, KvScales, KvShape, LayerId,
    OpenBackend, PageCopy, PageId, PlanError, PoolConfig, RowId, ScaleError, Scaling, SlotId, SlotMapping, StepBounds,
    StepEnd, StepId, TableWrite,
};

use crate::plans::{self, FIRST, plan_of, small_table};
use crate::{device, gpu};

/// Returns a plan of one token of one sequence.
fn plan<'a>(step: u64, rows: &'a [BatchRow], slots: &'a [i32]) -> BatchPlan<'a> {
    plan_of(step, rows, &[0], SlotMapping::I32(slots))
}

fn open(gpu: &Gpu, dtype: KvDtype, head_dim: u32) -> Cuda {
    let capacity = Capacity::Pages(8);
    let config = PoolConfig { dtype, shape: KvShape::heads(1, head_dim), capacity, ..PoolConfig::default() };
    let bounds = StepBounds { steps: 2, tokens: 4 };
    plans::open(CudaOptions::new(gpu), config, &small_table(), bounds)
}

#[test]
fn a_missing_device_is_an_error() {
    let Some(_) = gpu() else { return };
    let error = Gpu::new(99).expect_err("there is no device 99");
    assert_eq!(error, CudaError::NoDevice { ordinal: 99 });
}

/// `KVARENA_GPU_ERROR` names the expected error of this machine: see `tests/cuda/fake_driver/run.sh`.
#[test]
fn an_unsupported_machine_is_an_error_with_its_cause() {
    let error = Gpu::new(0).err();
    match std::env::var("KVARENA_GPU_ERROR") {
        Ok(wanted) => assert_eq!(format!("{error:?}"), wanted),
        Err(_) => assert!(!matches!(error, Some(CudaError::Driver { .. })), "{error:?}"),
    }
}

#[test]
fn too_large_a_pool_is_out_of_memory() {
    let Some(gpu) = gpu() else { return };
    let bytes = 1 << 50;
    let error = DeviceBuffer::new(&gpu, bytes).expect_err("a petabyte");
    assert_eq!(error, CudaError::OutOfMemory { bytes });
}

#[test]
fn free_memory_less_a_reserve_is_a_pool() {
    let Some(gpu) = gpu() else { return };
    let free = gpu.free_memory().expect("a driver");
    let pool = |reserve| {
        let capacity = Capacity::Bytes(free.saturating_sub(reserve));
        PoolConfig { capacity, ..PoolConfig::default() }.layout()
    };
    let layout = pool(free - (64 << 20)).expect("64 MiB");
    let rest = (64 << 20) - layout.total_bytes();
    assert!(rest < layout.page_bytes(), "{rest} bytes are left");
    let table = small_table();
    let cuda = CudaOptions::new(&gpu).open(&layout, &table, 2).expect("a small pool");
    assert_eq!(cuda.pool().bytes(), layout.total_bytes());
    assert!(matches!(pool(free + 1), Err(ConfigError::Budget { bytes: 0, .. })));
}

#[test]
fn scales_and_rows_that_are_not_the_pools_are_refused() {
    let Some(gpu) = gpu() else { return };
    let table = small_table();
    let open = |dtype, scaling, heads, rows| {
        let capacity = Capacity::Pages(4);
        let shape = KvShape::heads(2, 64);
        let config = PoolConfig { shape, dtype, scaling, capacity, ..PoolConfig::default() };
        let layers = config.layers;
        let scales = KvScales::new(layers, heads, vec![0.5; 2 * (layers * heads) as usize]);
        let scales = (heads > 0).then(|| scales.expect("sound scales"));
        let options = CudaOptions { scales, rows, ..CudaOptions::new(&gpu) };
        options.open(&config.layout().expect("a pool"), &table, 2).map(|cuda| cuda.rows())
    };
    let fp8 = KvDtype::Fp8E4M3;
    assert_eq!(open(fp8, Scaling::Static, 2, None), Ok(Dtype::Bf16));
    assert_eq!(open(fp8, Scaling::ByToken, 0, Some(Dtype::F32)), Ok(Dtype::F32));
    assert_eq!(open(KvDtype::F16, Scaling::Static, 0, Some(Dtype::F16)), Ok(Dtype::F16));
    let size = open(fp8, Scaling::Static, 3, None);
    assert!(matches!(size, Err(CudaError::Scales(ScaleError::Size { .. }))), "{size:?}");
    for (dtype, scaling) in [(fp8, Scaling::ByToken), (KvDtype::Bf16, Scaling::Static)] {
        let given = open(dtype, scaling, 2, None);
        assert_eq!(given, Err(CudaError::Scales(ScaleError::NotStatic)));
    }
    let (rows, pool) = (Dtype::F16, KvDtype::Bf16);
    assert_eq!(open(pool, Scaling::Static, 0, Some(rows)), Err(CudaError::RowsDtype { rows, pool }));
}

#[test]
fn latent_rows_and_heads_that_no_kernel_serves_are_refused() {
    let Some(gpu) = gpu() else { return };
    let table = small_table();
    let open = |rank, rope, dtype: KvDtype| {
        let (shape, capacity) = (KvShape::Latent { rank, rope }, Capacity::Pages(8));
        let made = dtype.is_quantised();
        let scaling = if made { Scaling::ByToken } else { Scaling::Static };
        let config = PoolConfig { shape, dtype, scaling, capacity, ..PoolConfig::default() };
        CudaOptions::new(&gpu).open(&config.layout().expect("a small pool"), &table, 2)
    };
    for (rank, rope, dtype) in [
        (512, 32, KvDtype::Bf16),
        (448, 128, KvDtype::Bf16),
        (256, 64, KvDtype::Bf16),
        (512, 32, KvDtype::Fp8E4M3),
        (576, 64, KvDtype::Fp8E4M3),
    ] {
        let error = open(rank, rope, dtype).expect_err("there are no kernels for it");
        assert_eq!(error, CudaError::PoolShape { shape: KvShape::Latent { rank, rope } });
        assert!(error.to_string().contains(&rank.to_string()));
    }
    for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3] {
        let mut cuda = open(512, 64, dtype).expect("a small pool");
        let refused = CudaError::Heads { q_heads: 129, kv_heads: 1 };
        assert_eq!(cuda.prepare(&Prepare::new(&[Attend::latent(129, 0.1)])), Err(refused));
        let scale = Attend::new(16, 576).scale;
        let refused = CudaError::Plan(PlanError::LatentScale { scale });
        assert_eq!(cuda.prepare(&Prepare::new(&[Attend::new(16, 576)])), Err(refused));
        assert_eq!(cuda.prepare(&Prepare::new(&[Attend::latent(128, 0.1)])), Ok(()));
    }
}

/// If a layer is prepared with a window, `begin` rejects a plan with trees before any kernel runs.
#[test]
fn trees_are_refused_where_a_window_is_prepared() {
    let Some(gpu) = gpu() else { return };
    let table = small_table();
    for dtype in [KvDtype::Bf16, KvDtype::F32] {
        let (shape, capacity) = (KvShape::heads(1, 64), Capacity::Pages(8));
        let config = PoolConfig { shape, dtype, capacity, ..PoolConfig::default() };
        let layout = config.layout().expect("a small pool");
        let mut cuda = CudaOptions::new(&gpu).open(&layout, &table, 4).expect("a small pool");
        let rows = [BatchRow { row: RowId::new(0), qo_start: 0, extend_len: 3, kv_len: 3 }];
        let plan = |step, masks| {
            let positions = if masks == [0; 0] { &[0, 1, 2] } else { &[0, 1, 1] };
            BatchPlan { masks, ..plan_of(step, &rows, positions, SlotMapping::I32(&[0, 1, 2])) }
        };
        let (tree, plain): (&[u64], &[u64]) = (&[4, 6, 5], &[]);
        let attend = Attend::new(2, 64);
        cuda.prepare(&Prepare::new(&[attend])).expect("a served shape");
        cuda.begin(&plan(1, tree)).expect("there is no window yet");
        cuda.prepare(&Prepare::new(&[Attend { window: Some(2), ..attend }])).expect("a served shape");
        let refused = CudaError::Plan(PlanError::TreeWindow { window: 2 });
        assert_eq!(cuda.begin(&plan(2, tree)), Err(refused.clone()));
        assert_eq!(cuda.stage(&plan(1, tree)).err(), Some(refused));
        cuda.begin(&plan(2, plain)).expect("the step has not begun, and has no trees now");
        cuda.stage(&plan(2, plain)).expect("it has begun");
    }
}

#[test]
fn steps_out_of_order_are_refused() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = open(&gpu, KvDtype::F32, 64);
    let rows = [FIRST];
    cuda.begin(&plan(2, &rows, &[0])).expect("a valid plan");
    let (step, last) = (StepId::new(2), StepId::new(2));
    let again = cuda.begin(&plan(2, &rows, &[0]));
    assert_eq!(again, Err(CudaError::Plan(PlanError::AlreadyBegun { step, last })));
    let early = cuda.stage(&plan(3, &rows, &[0]));
    assert_eq!(early, Err(CudaError::Plan(PlanError::NotBegun { step: StepId::new(3) })));
    cuda.begin(&plan(3, &rows, &[0])).expect("a valid plan");
    let full = cuda.begin(&plan(4, &rows, &[0]));
    assert_eq!(full, Err(CudaError::Plan(PlanError::OpenSteps { max: 2 })));
}

#[test]
fn plans_of_ended_steps_are_refused() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = open(&gpu, KvDtype::F32, 64);
    let (rows, layer) = ([FIRST], LayerId::new(0));
    let (first, second) = (plan(1, &rows, &[0]), plan(2, &rows, &[1]));
    cuda.begin(&first).expect("a valid plan");
    cuda.begin(&second).expect("a valid plan");
    let numbers = DeviceBuffer::of(&gpu, &[1_f32; 64]).expect("memory");
    let row = numbers.rows(0, None);
    cuda.store_cache(&first, layer, row, row).expect("an open step");
    cuda.end(StepEnd::Complete(first.step));
    cuda.end(StepEnd::Abort(second.step));
    for (plan, attend) in [(first, Attend::new(1, 64)), (second, Attend::new(1, 64))] {
        let ended = Err(CudaError::Plan(PlanError::Ended { step: plan.step }));
        assert_eq!(cuda.store_cache(&plan, layer, row, row), ended);
        let mut out = DeviceBuffer::of(&gpu, &[0_f32; 64]).expect("memory");
        let result = cuda.attend(&plan, layer, &attend, row, out.rows_mut(0, None), None);
        assert_eq!(result, ended);
        assert_eq!(cuda.stage(&plan), Err(CudaError::Plan(PlanError::Ended { step: plan.step })));
    }
    cuda.synchronize().expect("nothing failed");
}

#[test]
fn plans_outside_the_pool_are_refused() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = open(&gpu, KvDtype::F32, 64);
    let error = cuda.begin(&plan(1, &[FIRST], &[128]));
    let refused = |error| Err(CudaError::Plan(error));
    assert_eq!(error, refused(PlanError::Slot { slot: SlotId::new(128), slot_count: 128 }));
    let table = small_table();
    let max = u64::from(16 * table.leaf_pages * table.leaves_per_row);
    let row = FIRST.row;
    let past = RowId::new(2);
    for (bad, error) in [
        (BatchRow { row: past, ..FIRST }, PlanError::Row { row: past, rows: 2 }),
        (BatchRow { kv_len: 4096, ..FIRST }, PlanError::KvLen { row, kv_len: 4096, min: 1, max }),
        (BatchRow { qo_start: 1, ..FIRST }, PlanError::QueryRows { row: 0 }),
        (BatchRow { extend_len: 2, ..FIRST }, PlanError::KvLen { row, kv_len: 1, min: 2, max }),
    ] {
        assert_eq!(cuda.begin(&plan(1, &[bad], &[0])), refused(error), "{bad:?}");
    }
    // Fewer query rows than tokens, then more slots than tokens.
    let short = BatchRow { extend_len: 0, ..FIRST };
    assert_eq!(cuda.begin(&plan(1, &[short], &[0])), refused(PlanError::QueryRows { row: 1 }));
    assert_eq!(
        cuda.begin(&plan(1, &[FIRST], &[0, 1])),
        refused(PlanError::Tokens { positions: 1, tokens: 1, slots: 2 })
    );
    let words = cuda.table_words().expect("nothing failed").len();
    let write = TableWrite { index: 1 << 20, value: 0 };
    let error = cuda.begin(&BatchPlan { table_writes: &[write], ..plan(1, &[FIRST], &[0]) });
    assert_eq!(error, refused(PlanError::TableIndex { index: 1 << 20, words }));
    let page = PageCopy { source: PageId::new(0), target: PageId::new(8) };
    assert_eq!(cuda.copy_pages(&[page]), refused(PlanError::Page { page: PageId::new(8), page_count: 8 }));
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = open(&gpu, KvDtype::Bf16, 64);
    let (rows, layer) = ([FIRST], LayerId::new(0));
    let plan = plan(1, &rows, &[0]);
    cuda.begin(&plan).expect("a valid plan");
    let mut buffer = DeviceBuffer::of(&gpu, &[0_u8; 1024]).expect("memory");
    let short = buffer.rows(1000, None);
    let error = cuda.store_cache(&plan, layer, short, short);
    assert_eq!(error, Err(CudaError::Plan(PlanError::Length { operand: Operand::K, actual: 12, wanted: 64 })));
    let odd = buffer.rows(1, None);
    let error = cuda.store_cache(&plan, layer, odd, odd);
    assert_eq!(error, Err(CudaError::RowsAlignment { align: 2 }));
    let attend = Attend::new(1, 64);
    let q = DeviceBuffer::of(&gpu, &[0_u8; 1024]).expect("memory");
    let out = buffer.rows_mut(2, None);
    let error = cuda.attend(&plan, layer, &attend, q.rows(0, None), out, None);
    assert_eq!(error, Err(CudaError::RowsAlignment { align: 16 }));
    let mut sums = DeviceBuffer::of(&gpu, &[0_u8; 16]).expect("memory");
    for (start, stride, wanted) in [
        (2, None, CudaError::RowsAlignment { align: 4 }),
        (0, Some(2), PlanError::Stride { operand: Operand::Lse, stride: 2, width: 1 }.into()),
    ] {
        let (out, sums) = (buffer.rows_mut(0, None), sums.rows_mut(start, stride));
        let error = cuda.attend(&plan, layer, &attend, q.rows(0, None), out, Some(sums));
        assert_eq!(error, Err(wanted));
    }
}

#[test]
fn shapes_without_a_kernel_are_refused() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = open(&gpu, KvDtype::Bf16, 80);
    assert_eq!(cuda.prepare(&Prepare::new(&[Attend::new(1, 80)])), Err(CudaError::HeadDim { head_dim: 80 }));
    let heads = CudaError::Heads { q_heads: 17, kv_heads: 1 };
    assert_eq!(cuda.prepare(&Prepare::new(&[Attend::new(17, 80)])), Err(heads));
}

#[test]
fn memory_of_another_device_is_refused() {
    let Some(gpu) = gpu() else { return };
    let Some(second) = device(1) else { return };
    let mut cuda = open(&gpu, KvDtype::Bf16, 64);
    let (rows, layer) = ([FIRST], LayerId::new(0));
    let plan = plan(1, &rows, &[0]);
    cuda.begin(&plan).expect("a valid plan");
    let mut here = DeviceBuffer::new(&gpu, 1024).expect("memory");
    let mut there = DeviceBuffer::new(&second, 1024).expect("memory");
    let refused = Err(CudaError::OtherDevice { ordinal: 1 });
    let (near, far) = (here.rows(0, None), there.rows(0, None));
    assert_eq!(cuda.store_cache(&plan, layer, near, far), refused);
    let attend = Attend::new(1, 64);
    let out = here.rows_mut(0, None);
    assert_eq!(cuda.attend(&plan, layer, &attend, far, out, None), refused);
    let q = DeviceBuffer::new(&gpu, 1024).expect("memory");
    let (q, out) = (q.rows(0, None), there.rows_mut(0, None));
    assert_eq!(cuda.attend(&plan, layer, &attend, q, out, None), refused);

    let stream = CudaStream::new(&second).expect("a stream");
    let mut target = open(&gpu, KvDtype::Bf16, 64);
    let copies = [PageCopy { source: PageId::new(0), target: PageId::new(1) }];
    let copied = cuda.copy_to_pool(&mut target, &copies, &stream);
    assert_eq!(copied.err(), refused.clone().err());

    let options = CudaOptions { stream: Some(stream), ..CudaOptions::new(&gpu) };
    let layout = PoolConfig { capacity: Capacity::Pages(8), ..PoolConfig::default() }.layout();
    let table = small_table();
    let error = options.open(&layout.expect("a small pool"), &table, 2).err();
    assert_eq!(error, refused.err());
}
