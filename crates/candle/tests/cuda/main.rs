//! Tests of the GPU bridge: random programs, copies, the order of streams, graphs. Without a GPU
//! these tests do nothing; with `KVARENA_GPU_ERROR=None` they fail instead.

#[path = "../common/mod.rs"]
mod common;
mod graph;
mod order;
mod tensors;

use std::ffi::{CStr, c_char, c_void};

use candle_core::Device;
use common::{Program, WRONG, arena, attention, fused, numbers};
use kvarena::testkit::rng::Rng;
use kvarena::{Extend, Namespace, TokenId};
use kvarena_candle::{Error, KvArena};

/// Returns a device with its own stream.
fn device() -> Option<Device> {
    match Device::new_cuda_with_stream(0) {
        Ok(device) => Some(device),
        Err(error) => {
            let must = std::env::var("KVARENA_GPU_ERROR").is_ok_and(|error| error == "None");
            assert!(!must, "{error}");
            None
        }
    }
}

/// Returns a device on which candle does not track tensors by events.
fn untracked() -> Option<Device> {
    let device = device()?;
    // SAFETY: no tensor exists. Tests order work on other streams, except the one that reads unfinished K on purpose.
    unsafe { device.as_cuda_device().expect("a GPU").disable_event_tracking() };
    Some(device)
}

#[test]
fn programs_on_a_gpu_are_exact() {
    let (Some(device), Some(second)) = (device(), device()) else { return };
    let others = [Device::Cpu, second];
    let mut rejected = [0; WRONG];
    // The seeds are few, because the stand-in for the driver interprets the kernels.
    for seed in 0..10 {
        let some = Program::new(&device, &others, 12, seed).run(20);
        rejected.iter_mut().zip(some).for_each(|(all, some)| *all += some);
    }
    assert!(rejected.iter().all(|&count| count > 0), "{rejected:?}");
}

/// Returns the function that counts calls that copied memory. Only the stand-in for the driver has one.
fn copy_counter() -> Option<extern "C" fn() -> u64> {
    unsafe extern "C" {
        fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
        fn dlopen(name: *const c_char, flags: i32) -> *mut c_void;
    }
    let (library, name): (&CStr, &CStr) = (c"libcuda.so.1", c"fake_driver_copies");
    // SAFETY: both names end with a zero byte; flag 1 is RTLD_LAZY.
    let found = unsafe { dlsym(dlopen(library.as_ptr(), 1), name.as_ptr()) };
    // SAFETY: the stand-in defines the function with this signature.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> u64>(found) })
}

/// With a real driver, which does not count copies, this test checks nothing.
#[test]
fn attend_makes_no_copy() {
    let Some(device) = device() else { return };
    let Some(copies) = copy_counter() else {
        assert!(std::env::var_os("FAKE_DRIVER_STREAMS").is_none(), "the stand-in counts copies");
        return;
    };
    let mut arena = arena(&device);
    let tokens: Vec<TokenId> = (0..5).map(TokenId::new).collect();
    let seq = arena.engine.admit(Namespace::default(), &tokens, 0).expect("room");
    let step = arena.step(&[Extend { seq, len: 5 }]).expect("room");
    let numbers = numbers(&mut Rng::new(1), 5);
    let [q, k, v] = fused(&numbers, &device);
    // The first layer stages the data that all layers read.
    step.attend(0, &attention(), &q, &k, &v).expect("valid attention");
    let before = copies();
    let out = step.attend(1, &attention(), &q, &k, &v).expect("valid attention");
    assert_eq!(copies(), before);
    // The counter works: reading a tensor back copies.
    out.flatten_all().and_then(|x| x.to_vec1::<f32>()).expect("numbers");
    assert!(copies() > before);
}

#[test]
fn the_per_thread_default_stream_is_rejected() {
    if device().is_none() {
        return;
    }
    let each = Device::new_cuda(0).expect("a GPU");
    let config = kvarena::PoolConfig { capacity: kvarena::Capacity::Pages(4), ..Default::default() };
    let error = KvArena::new(config, &each).err().expect("its stream differs in each thread");
    assert!(matches!(error, Error::Engine(_)), "{error}");
}
