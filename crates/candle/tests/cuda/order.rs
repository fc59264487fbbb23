//! Work in flight: K of a second stream, and arenas and tensors that are dropped before their kernels have run.
//!
//! A late kernel waits, and then writes K over NaN. On a GPU the kernel takes 0.2 s. The driver stand-in runs it last
//! (`FAKE_DRIVER_STREAMS=1`).

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut, LaunchConfig, PushKernelArg};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, Device, Storage, Tensor};
use kvarena::backend::Either;
use kvarena::backend::cuda::{CudaEvent, CudaStream};
use kvarena::testkit::rng::Rng;
use kvarena::{Backend, Extend, Namespace, TokenId};
use kvarena_candle::KvArena;

use crate::common::{DIM, HEADS, KV_HEADS, arena, attention, numbers, packed};
use crate::{device, untracked};

const ROWS: usize = 6;
const WORDS: usize = ROWS * KV_HEADS * DIM;
const MILLISECONDS: u32 = 200;

/// One warp sleeps for `naps` milliseconds, and then copies `words` words.
const LATE_COPY: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry late_copy(.param .u64 to, .param .u64 from, .param .u32 words, .param .u32 naps)
{
    .reg .pred p;
    .reg .b32 r<4>;
    .reg .b64 a<4>;
    ld.param.u64 a0, [to];
    ld.param.u64 a1, [from];
    ld.param.u32 r0, [words];
    ld.param.u32 r1, [naps];
nap:
    nanosleep.u32 1000000;
    sub.u32 r1, r1, 1;
    setp.gt.u32 p, r1, 0;
    @p bra nap;
    mov.u32 r2, %tid.x;
copy:
    setp.ge.u32 p, r2, r0;
    @p ret;
    mul.wide.u32 a2, r2, 4;
    add.s64 a3, a1, a2;
    ld.global.u32 r3, [a3];
    add.s64 a3, a0, a2;
    st.global.u32 [a3], r3;
    add.u32 r2, r2, 32;
    bra copy;
}";

/// Writes K late, in a device's stream.
fn late_copy(device: &Device, to: u64, from: u64, naps: u32) {
    let device = device.as_cuda_device().expect("a GPU");
    let kernel = device.get_or_load_custom_func("late_copy", "late_copy", LATE_COPY);
    let kernel = kernel.expect("valid PTX");
    let (mut launch, words) = (kernel.builder(), WORDS as u32);
    launch.arg(&to).arg(&from).arg(&words).arg(&naps);
    let warp = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: both addresses are rows of K. The tests keep them until their streams are done, or the stream of the
    // kernel orders their release after it.
    unsafe { launch.launch(warp) }.expect("a launch");
}

fn address(x: &Tensor) -> u64 {
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { panic!("not on a GPU") };
    let slice = storage.as_cuda_slice::<f32>().expect("floats");
    slice.device_ptr(&storage.device.cuda_stream()).0 + 4 * layout.start_offset() as u64
}

/// Returns q, k and v of all rows, and a tensor like k that contains only NaN.
fn tensors(device: &Device) -> ([Tensor; 3], Tensor) {
    let numbers = numbers(&mut Rng::new(5), ROWS);
    let tensor = |rows: Vec<f32>, heads| Tensor::from_vec(rows, (ROWS, heads, DIM), device);
    let qkv = [0, 1, 2].map(|side| tensor(packed(&numbers, side), HEADS[side]).expect("numbers"));
    (qkv, tensor(vec![f32::NAN; WORDS], KV_HEADS).expect("numbers"))
}

/// Launches a layer over all rows.
fn attend(arena: &mut KvArena, [q, k, v]: [&Tensor; 3]) -> Tensor {
    arena.engine.reset();
    let prompt: Vec<TokenId> = (0..ROWS as u32).map(TokenId::new).collect();
    let seq = arena.engine.admit(Namespace::default(), &prompt, 0).expect("room");
    let step = arena.step(&[Extend { seq, len: ROWS as u32 }]).expect("room");
    let out = step.attend(0, &attention(), q, k, v).expect("valid attention");
    let id = step.launched();
    arena.close(id).expect("it was launched");
    out
}

fn floats(x: &Tensor) -> Vec<f32> {
    x.flatten_all().and_then(|x| x.to_vec1()).expect("numbers")
}

/// Loads all kernels, because loading one later would wait for other streams. Returns the attention over K.
fn warm(arena: &mut KvArena, devices: [&Device; 2], [q, k, v]: [&Tensor; 3]) -> Vec<f32> {
    let wanted = floats(&attend(arena, [q, k, v]));
    let elsewhere = tensors(devices[0]).1;
    for device in devices {
        late_copy(device, address(&elsewhere), address(k), 1);
        device.synchronize().expect("a GPU");
    }
    wanted
}

/// The arena's stream waits for K of another stream by an event. Without the event, attention reads NaN.
#[test]
fn k_of_a_second_stream_needs_an_event() {
    let (Some(device), Some(second)) = (untracked(), untracked()) else { return };
    let mut arena = arena(&device);
    let ([q, k, v], _) = tensors(&device);
    let wanted = warm(&mut arena, [&device, &second], [&q, &k, &v]);
    let Either::Right(cuda) = arena.engine.backend() else { panic!("no GPU") };
    let (gpu, stream) = (cuda.gpu().clone(), cuda.stream().clone());
    let owner = second.as_cuda_device().expect("a GPU").cuda_stream();
    // SAFETY: candle created the stream in the primary context, and its `Arc` keeps the stream alive.
    let from = unsafe { CudaStream::from_raw(&gpu, owner.cu_stream() as usize as u64, owner) };
    let from = from.expect("another stream");
    for is_ordered in [true, false] {
        let (_, late) = tensors(&device);
        device.synchronize().expect("a GPU");
        late_copy(&second, address(&late), address(&k), MILLISECONDS);
        if is_ordered {
            let mut event = CudaEvent::new(&gpu, false).expect("an event");
            event.record(&from).and_then(|()| event.block(&stream)).expect("the same GPU");
        }
        let out = floats(&attend(&mut arena, [&q, &late, &v]));
        second.synchronize().expect("a GPU");
        assert_eq!(out == wanted, is_ordered, "{:?} for {:?}", &out[..4], &wanted[..4]);
        assert_eq!(out.iter().any(|x| x.is_nan()), !is_ordered);
        assert_eq!(floats(&late), floats(&k));
    }
}

/// candle records an event after a kernel that writes a tensor, and `attend` waits for this event.
#[test]
fn candles_own_events_order_streams() {
    let (Some(device), Some(second)) = (device(), device()) else { return };
    let mut arena = arena(&device);
    let ([q, k, v], _) = tensors(&device);
    let wanted = warm(&mut arena, [&device, &second], [&q, &k, &v]);
    let to = second.as_cuda_device().expect("a GPU");
    let mut late: CudaSlice<f32> = to.clone_htod(&vec![f32::NAN; WORDS]).expect("memory");
    let stream = to.cuda_stream();
    let (at, written) = late.device_ptr_mut(&stream);
    late_copy(&second, at, address(&k), MILLISECONDS);
    drop(written);
    let storage = CudaStorage::wrap_cuda_slice(late, device.as_cuda_device().expect("a GPU").clone());
    let shape = (ROWS, KV_HEADS, DIM);
    let late = Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false);
    assert_eq!(floats(&attend(&mut arena, [&q, &late, &v])), wanted);
}

/// The test drops the arena while its kernels wait behind a late one. The result stays valid.
#[test]
fn results_outlive_an_arena_whose_kernels_wait() {
    let Some(device) = device() else { return };
    let mut arena = arena(&device);
    let ([q, k, v], late) = tensors(&device);
    let wanted = warm(&mut arena, [&device, &device], [&q, &k, &v]);
    late_copy(&device, address(&late), address(&k), MILLISECONDS);
    let out = attend(&mut arena, [&q, &late, &v]);
    drop(arena);
    assert_eq!(floats(&out), wanted);
}

/// The test drops all tensors and handles of candle's device while kernels wait. The arena keeps the stream alive.
#[test]
fn an_arena_outlives_tensors_and_device() {
    let Some(device) = device() else { return };
    let mut arena = arena(&device);
    let ([q, k, v], late) = tensors(&device);
    warm(&mut arena, [&device, &device], [&q, &k, &v]);
    late_copy(&device, address(&late), address(&k), MILLISECONDS);
    let out = attend(&mut arena, [&q, &late, &v]);
    drop((out, q, k, v, late, device));
    arena.engine.backend_mut().synchronize().expect("the stream lives");
    arena.engine.verify().expect("all invariants hold");
}
