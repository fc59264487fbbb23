//! Helpers of the tests on a GPU: the device, random numbers, and comparisons with a tolerance.

use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};

use half::bf16;
use kvarena::backend::cuda::{CudaError, DeviceBuffer};
use kvarena_host::gpu::GpuError;
use kvarena_host::gpu::device::Device;
use kvarena_host::sample::splitmix;

/// Opens the first GPU. Without a usable GPU, prints the reason and returns `None`.
pub fn device() -> Option<Rc<Device>> {
    match Device::open() {
        Ok(device) => Some(Rc::new(device)),
        Err(
            error @ (GpuError::NoCublasLt { .. }
            | GpuError::Cuda(
                CudaError::NoDriver
                | CudaError::NoDevice { .. }
                | CudaError::DriverTooOld { .. }
                | CudaError::DeviceTooOld { .. },
            )),
        ) => {
            println!("not run on a GPU: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Waits until no other test uses the GPUs: a graph capture must not contain another test's load of a kernel.
pub fn lock_gpus() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A generator of random numbers.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn vec(&mut self, len: usize, size: f32) -> Vec<bf16> {
        let mut one = || (splitmix(&mut self.0) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        (0..len).map(|_| bf16::from_f32((one() + one()) * size)).collect()
    }

    pub fn below(&mut self, end: usize) -> usize {
        (splitmix(&mut self.0) % end as u64) as usize
    }
}

pub fn buffer<T: bytemuck::Pod>(device: &Device, items: &[T]) -> DeviceBuffer {
    DeviceBuffer::of(&device.gpu, items).expect("memory")
}

pub fn read<T: bytemuck::Pod>(buffer: &DeviceBuffer, len: usize) -> Vec<T> {
    buffer.read(0, len).expect("a copy")
}

/// Checks that each number differs from the expected one by at most 1/64 of the expected number plus 1/512 of the
/// largest expected number.
pub fn close(actual: &[bf16], expected: &[bf16], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let largest = expected.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
    for (i, (a, b)) in actual.iter().zip(expected).enumerate() {
        let (a, b) = (a.to_f32(), b.to_f32());
        let bound = b.abs() / 64.0 + largest / 512.0;
        assert!((a - b).abs() <= bound, "{what}: number {i} is {a}, not {b}");
    }
}

pub const EPS: f32 = 1e-6;
