//! Pools in memory that the host allocated: the contract of backends, copies of pages, errors, and the owner's end.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cust::sys;
use kvarena::backend::cuda::{
    CudaError, CudaOptions, CudaStream, DeviceBuffer, DeviceRegion, GivenError, GivenPool, Gpu, Limit,
};
use kvarena::backend::{OpenBackend, SwapMemory};
use kvarena::config::StepBounds;
use kvarena::id::MoveId;
use kvarena::layout::{Groups, Layout, PlaneName, PoolLayout, Reach, Scaling, StatePart};
use kvarena::plan::PageMove;
use kvarena::testkit::contract::{Case, Filter, TestBackend, check_cases, check_rotated};
use kvarena::testkit::rng::Rng;
use kvarena::{Backend, Capacity, KvDtype, KvShape, LayerId, PageId, PoolConfig};

use crate::copies::{self, PAGES};
use crate::given_memory::Form;
use crate::on_gpu::{OnGpu, OnGpuOptions};
use crate::plans::{first_token, small_table};
use crate::{device, gpu, seeds};

/// Declares tests of the contract: the form, the filter and the number of seeds. `OnGpu` checks that nothing writes
/// between the heads.
macro_rules! check_forms {
    ($($test:ident: $form:ident, $filter:expr, $count:literal;)*) => {$(
        #[test]
        fn $test() {
            let Some(gpu) = gpu() else { return };
            let options = |case: &Case| {
                assert!(Form::serves(&case.layout), "the filter has other pools");
                OnGpuOptions::with_all_spans(&gpu).in_form(Form::$form).for_case(case)
            };
            println!("{}", check_cases(&$filter, options, seeds($count)));
        }
    )*};
}

check_forms! {
    page_layer_plane_keeps_the_contract: PageLayerPlane, Filter::PLAIN, 100;
    nhd_keeps_the_contract: Nhd, Filter::PLAIN, 100;
    hnd_keeps_the_contract: Hnd, Filter::PLAIN, 100;
    gaps_keep_the_contract: Gaps, Filter::PLAIN, 100;
    hnd_keeps_the_contract_over_fp8: Hnd, Filter::PLAIN_FP8, 60;
    gaps_keep_the_contract_over_fp8: Gaps, Filter::PLAIN_FP8, 60;
    hnd_keeps_the_contract_in_groups: Hnd, Filter::PLAIN.in_groups(), 60;
    nhd_keeps_the_contract_in_groups: Nhd, Filter::PLAIN.in_groups(), 60;
}

/// Cases of these filters that cannot have the form have a pool of the backend.
#[test]
fn forms_keep_the_contract_where_special_kernels_serve() {
    let Some(gpu) = gpu() else { return };
    let given = AtomicU32::new(0);
    for (filter, form) in
        [Filter::SHORT, Filter::SPANS, Filter::FP8_SPANS].into_iter().zip([Form::Hnd, Form::Gaps, Form::Hnd])
    {
        let options = |case: &Case| {
            given.fetch_add(Form::serves(&case.layout).into(), Ordering::Relaxed);
            OnGpuOptions::with_all_spans(&gpu).in_form(form).for_case(case)
        };
        println!("{form:?}: {}", check_cases(&filter, options, seeds(40)));
    }
    assert!(given.load(Ordering::Relaxed) > 0, "no pool has the form");
}

#[test]
fn all_forms_keep_the_contract_of_rotated_rows() {
    let Some(gpu) = gpu() else { return };
    for form in Form::ALL {
        let options = |case: &Case| OnGpuOptions::new(&gpu).in_form(form).for_case(case);
        println!("{form:?}: {}", check_rotated(&Filter::PLAIN_HEADS, options, seeds(20)));
    }
}

/// Shapes of pages below and above the threshold of the copy engines.
const SHAPES: [copies::Shape; 3] = [
    (3, 2, 64, KvDtype::Bf16, 16, false),
    (2, 3, 16, KvDtype::Fp8E4M3, 5, false),
    (36, 8, 128, KvDtype::Bf16, 16, false),
];

fn open(gpu: &Gpu, layout: &PoolLayout, form: Option<Form>) -> OnGpu {
    let options = OnGpuOptions::new(gpu);
    let options = if let Some(form) = form { options.in_form(form) } else { options };
    let backend = options.open(layout, &small_table(), StepBounds { steps: 1, tokens: 16 }).expect("a small pool");
    assert_eq!(backend.given.is_some(), form.is_some());
    backend
}

/// Compares a page with the bytes for a seed.
fn compare(backend: &mut OnGpu, layout: &PoolLayout, page: u32, seed: u64, of: &str) {
    let mut bytes = vec![0; layout.page_bytes() as usize];
    backend.read_pages(&[PageId::new(page)], &mut bytes);
    assert!(bytes == copies::page(layout, seed), "{layout:?} {of}: page {page}");
}

#[test]
fn pages_move_between_forms() {
    let Some(gpu) = gpu() else { return };
    let mut rng = Rng::new(3);
    let forms = [None].into_iter().chain(Form::ALL.map(Some));
    for (i, (shape, from)) in
        SHAPES[..2].iter().flat_map(|&shape| forms.clone().map(move |form| (shape, form))).enumerate()
    {
        let layout = copies::pool(shape, [Layout::PageFirst, Layout::LayerFirst][i % 2]);
        let mut source = open(&gpu, &layout, from);
        copies::fill(&mut source, &layout, 100);
        for to in forms.clone() {
            let of = format!("{from:?} to {to:?}");
            let mut target = open(&gpu, &layout, to);
            let some = copies::copies(&mut rng, 9, PAGES, PAGES);
            let stream = source.stream.clone();
            let event = source.cuda.copy_to_pool(&mut target.cuda, &some, &stream).expect("a copy");
            event.synchronize().expect("nothing failed");
            for copy in some {
                compare(&mut target, &layout, copy.target.raw(), 100 + u64::from(copy.source.raw()), &of);
            }
        }
        let of = format!("{from:?} inside");
        let inside = [(3, 20), (7, 21)].map(|(source, target)| (PageId::new(source), PageId::new(target)));
        let inside = inside.map(|(source, target)| kvarena::plan::PageCopy { source, target });
        source.copy_pages(&inside).expect("pages of the pool");
        source.synchronize().expect("nothing failed");
        for (page, seed) in [(20, 103), (21, 107), (19, 119)] {
            compare(&mut source, &layout, page, seed, &of);
        }
    }
}

#[test]
fn pages_are_equal_after_a_copy_to_the_host_and_back() {
    let Some(gpu) = gpu() else { return };
    let mut rng = Rng::new(4);
    for (shape, form) in SHAPES.into_iter().flat_map(|shape| Form::ALL.map(|form| (shape, form))) {
        let layout = copies::pool(shape, Layout::LayerFirst);
        let mut backend = open(&gpu, &layout, Some(form));
        copies::fill(&mut backend, &layout, 100);
        copies::fill_swap(&mut backend, 0xee);
        let some = copies::moves(&copies::copies(&mut rng, 31, PAGES, PAGES));
        backend.save_pages(MoveId::new(1), &some).expect("pages of the pool");
        backend.synchronize().expect("nothing failed");
        for PageMove { device, swap } in &some {
            let lease = backend.lease(*swap);
            let wanted = copies::page(&layout, 100 + u64::from(device.raw()));
            assert!(lease.as_ref() == wanted, "{layout:?} {form:?} {swap:?}");
        }
        // Each swap page is loaded to the device page of the next one.
        let next = some.iter().cycle().skip(1).zip(&some);
        let back: Vec<_> =
            next.map(|(to, from)| PageMove { device: to.device, swap: from.swap }).take(some.len()).collect();
        backend.load_pages(MoveId::new(2), &back).expect("pages of the pool");
        backend.synchronize().expect("nothing failed");
        for (PageMove { device, .. }, from) in back.iter().zip(&some) {
            let of = format!("{form:?} {from:?}");
            compare(&mut backend, &layout, device.raw(), 100 + u64::from(from.device.raw()), &of);
        }
    }
}

/// A pool of 2 layers, 2 heads of 128 bytes, 3 pages of 16 slots.
fn config() -> PoolConfig {
    let (shape, capacity) = (KvShape::heads(2, 64), Capacity::Pages(3));
    PoolConfig { layers: 2, shape, dtype: KvDtype::Bf16, capacity, ..PoolConfig::default() }
}

/// Returns the error of a pool.
fn refused(gpu: &Gpu, config: PoolConfig, pool: GivenPool) -> CudaError {
    let options = CudaOptions { pool: Some(pool), ..CudaOptions::new(gpu) };
    let opened =
        options.open(&config.layout().expect("a valid pool"), &small_table(), StepBounds { steps: 1, tokens: 1 });
    opened.expect_err("the memory cannot be the pool")
}

#[test]
fn memory_that_cannot_be_the_pool_is_an_error_with_its_value() {
    let Some(gpu) = gpu() else { return };
    let layout = config().layout().expect("a valid pool");
    let (tensor, row) = (3 * 16 * 256, 256);
    let buffer = Arc::new(DeviceBuffer::new(&gpu, 4 * tensor).expect("memory"));
    let at = |from: u64, bytes| {
        // SAFETY: the buffer owns the bytes.
        unsafe { DeviceRegion::from_raw(&gpu, buffer.address() + from, bytes, buffer.clone()) }
    };
    let tensors = |bytes| (0..2).map(|i| [2 * i, 2 * i + 1].map(|i| at(i * tensor, bytes).expect("memory"))).collect();
    let nhd = GivenPool::nhd(&layout, tensors(tensor));
    let with = |change: &dyn Fn(&mut GivenPool)| {
        let mut pool = nhd.clone();
        change(&mut pool);
        refused(&gpu, config(), pool)
    };
    // The whole pool opens, and ends with the memory.
    let options = CudaOptions { pool: Some(nhd.clone()), ..CudaOptions::new(&gpu) };
    let cuda = options.open(&layout, &small_table(), StepBounds { steps: 1, tokens: 1 }).expect("the pool's memory");
    assert_eq!(cuda.pool().bytes(), 0);

    let short = refused(&gpu, config(), GivenPool::nhd(&layout, tensors(tensor - 1)));
    let end = |layer, plane, end, bytes| CudaError::Given(GivenError::End { layer, plane, end, bytes });
    assert_eq!(short, end(0, PlaneName::K, tensor, tensor - 1));
    assert_eq!(with(&|pool| pool.layers[1][1].origin = 16), end(1, PlaneName::V, tensor + 16, tensor));
    assert_eq!(with(&|pool| pool.layers[1][0].origin = u64::MAX - 15), end(1, PlaneName::K, u64::MAX, tensor));
    assert_eq!(with(&|pool| pool.page = u64::MAX - 15), end(0, PlaneName::K, u64::MAX, tensor));
    let given = CudaError::Given;
    assert_eq!(with(&|pool| pool.layers.truncate(1)), given(GivenError::Layers { actual: 1, wanted: 2 }));
    assert_eq!(with(&|pool| pool.layers[0][1].region = 4), given(GivenError::Region { region: 4, regions: 4 }));
    assert_eq!(with(&|pool| pool.head = 127), given(GivenError::Alignment { value: 127 }));
    assert_eq!(with(&|pool| pool.head = 112), given(GivenError::Stride { stride: 112, bytes: 128 }));
    assert_eq!(with(&|pool| pool.slot = 240), given(GivenError::Stride { stride: 240, bytes: 256 }));
    assert_eq!(with(&|pool| pool.page = 16 * row - 16), given(GivenError::Stride { stride: 4080, bytes: 4096 }));
    assert_eq!(with(&|pool| pool.slot = 1 << 32), given(GivenError::WideStride { stride: 1 << 32 }));
    let overlap = |layers, planes| given(GivenError::Overlap { layers, planes });
    let [k, v] = [PlaneName::K, PlaneName::V];
    assert_eq!(with(&|pool| pool.layers[1][0] = pool.layers[0][0]), overlap([0, 1], [k, k]));
    // The last 16 bytes of layer 0's V are the first of layer 1's V, which lies in a region of its own.
    let twice = with(&|pool| pool.regions[3] = at(2 * tensor - 16, tensor).expect("memory"));
    assert_eq!(twice, overlap([0, 1], [v, v]));
    let odd = at(8, tensor).expect("memory");
    assert_eq!(with(&|pool| pool.regions[0] = odd.clone()), given(GivenError::Alignment { value: odd.address() }));

    let region = || at(0, 4 * tensor).expect("memory");
    let whole = |config: PoolConfig| {
        let layout = config.layout().expect("a valid pool");
        refused(&gpu, config, GivenPool::page_layer_plane(&layout, region()))
    };
    let latent = PoolConfig { shape: KvShape::Latent { rank: 512, rope: 64 }, ..config() };
    assert_eq!(whole(latent), given(GivenError::Planes { planes: 1 }));
    let by_token = PoolConfig { dtype: KvDtype::Fp8E4M3, scaling: Scaling::ByToken, ..config() };
    assert_eq!(whole(by_token), given(GivenError::Planes { planes: 4 }));
    let groups = Groups::new(&[Reach::All, Reach::Window(64)], &[0, 1]).expect("groups");
    let shapes = groups.with_shape(1, KvShape::heads(2, 32), None).expect("group 1 exists");
    assert_eq!(
        whole(PoolConfig { groups: shapes, layout: Layout::PageFirst, ..config() }),
        given(GivenError::Shapes { groups: 2 })
    );
    let states = Groups::new(&[Reach::All, Reach::State], &[0, 1]).expect("groups");
    let states = states.with_state(1, &[StatePart { heads: 2, head_bytes: 64 }]).expect("a part");
    let states = PoolConfig { groups: states, layout: Layout::PageFirst, ..config() };
    assert_eq!(whole(states), given(GivenError::States));
    let narrow = PoolConfig { shape: KvShape::heads(2, 4), groups, ..config() };
    assert_eq!(whole(narrow), given(GivenError::HeadBytes { bytes: 8 }));
    let many = PoolConfig { shape: KvShape::heads(65_536, 8), page_size: 1, layers: 1, ..config() };
    let layout = many.layout().expect("a valid pool");
    let page = GivenPool { head: 32, slot: 32 << 16, page: 32 << 16, ..GivenPool::page_layer_plane(&layout, region()) };
    let heads = CudaError::Limit { what: Limit::KvHeads, value: 65_536, max: 65_535 };
    assert_eq!(refused(&gpu, many, page), heads);
    drop(cuda);
}

#[test]
fn memory_that_is_empty_or_freed_or_on_another_device_is_an_error() {
    let Some(gpu) = gpu() else { return };
    let owner = || -> Arc<dyn Any + Send + Sync> { Arc::new(()) };
    // SAFETY: nothing uses the regions.
    let region = |gpu: &Gpu, address, bytes| unsafe { DeviceRegion::from_raw(gpu, address, bytes, owner()) };
    let error = |address, bytes| region(&gpu, address, bytes).expect_err("no memory");
    let given = CudaError::Given;
    let buffer = DeviceBuffer::new(&gpu, 4096).expect("memory");
    let address = buffer.address();
    assert_eq!(error(0, 16), given(GivenError::Empty { address: 0, bytes: 16 }));
    assert_eq!(error(0, 1).to_string(), "a region of 1 byte at address 0x0 is empty");
    assert_eq!(error(address, 0), given(GivenError::Empty { address, bytes: 0 }));
    assert_eq!(error(address, u64::MAX), given(GivenError::Wraps { address, bytes: u64::MAX }));
    let host = 0x10_u64;
    assert_eq!(error(host, 16), given(GivenError::NotAllocated { address: host }));
    let far = 1 << 46;
    assert_eq!(error(address, far), given(GivenError::NotAllocated { address: address + far - 1 }));
    if let Some(other) = device(1) {
        assert_eq!(region(&other, address, 4096).err(), Some(CudaError::OtherDevice { ordinal: 0 }));
        let there = DeviceBuffer::new(&other, 4096).expect("memory");
        let there = region(&other, there.address(), 4096).expect("memory");
        let layout = PoolConfig { layers: 1, page_size: 1, ..config() }.layout().expect("a valid pool");
        let pool = GivenPool::page_layer_plane(&layout, there);
        let wanted = CudaError::OtherDevice { ordinal: 1 };
        assert_eq!(refused(&gpu, PoolConfig { layers: 1, page_size: 1, ..config() }, pool), wanted);
    }
}

/// Memory that is freed without a wait, and a count of its ends.
struct Owner(Arc<AtomicU32>, u64);

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once. The backend bound the context.
        assert_eq!(unsafe { sys::cuMemFree_v2(self.1) }, sys::CUresult::CUDA_SUCCESS);
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// The stand-in breaks the device if memory is freed that queued work names, so the free fails.
#[test]
fn the_owner_ends_after_the_backend_and_its_work() {
    let Some(gpu) = gpu() else { return };
    let layout = config().layout().expect("a valid pool");
    let (bytes, mut address) = (layout.total_bytes(), 0);
    gpu.bind().expect("a device");
    // SAFETY: `address` is valid memory for one address.
    assert_eq!(unsafe { sys::cuMemAlloc_v2(&mut address, bytes as usize) }, sys::CUresult::CUDA_SUCCESS);
    let ended = Arc::new(AtomicU32::new(0));
    // SAFETY: the owner frees the memory.
    let region = unsafe { DeviceRegion::from_raw(&gpu, address, bytes, Arc::new(Owner(ended.clone(), address))) };
    let pool = GivenPool::page_layer_plane(&layout, region.expect("memory"));
    let stream = CudaStream::new(&gpu).expect("a stream");
    let options = CudaOptions { pool: Some(pool), stream: Some(stream.clone()), ..CudaOptions::new(&gpu) };
    let mut cuda =
        options.open(&layout, &small_table(), StepBounds { steps: 1, tokens: 1 }).expect("the pool's memory");
    let rows = DeviceBuffer::of(&gpu, &[0_u16; 2 * 64]).expect("memory");
    let plan = first_token(1);
    cuda.begin(&plan).expect("a valid plan");
    cuda.store_cache(&plan, LayerId::new(0), rows.rows(0, None), rows.rows(0, None)).expect("a store");
    assert_eq!(ended.load(Ordering::Acquire), 0);
    drop(cuda);
    assert_eq!(ended.load(Ordering::Acquire), 1);
    stream.synchronize().expect("nothing failed");
}
