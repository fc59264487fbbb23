//! Communication of a model's ranks through NCCL (`libnccl.so.2`). Short sums do not need NCCL (`peers.rs`).
//!
//! The library is found in the same way as cublasLt. The binding in `cudarc` opens only file names without a version,
//! which wheels lack. Therefore this file looks up the five functions that it needs.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use super::error::GpuError;
use super::libs::open_nccl;

type Raw = *mut c_void;

/// NCCL's number of the type bf16.
const BF16: c_int = 9;
/// NCCL's number of the type of 32-bit integers.
const I32: c_int = 2;
/// NCCL's number of the operation sum.
const SUM: c_int = 0;

/// The functions of NCCL that this file calls.
struct Calls {
    init_all: unsafe extern "C" fn(*mut Raw, c_int, *const c_int) -> c_int,
    all_reduce: unsafe extern "C" fn(Raw, Raw, usize, c_int, c_int, Raw, Raw) -> c_int,
    broadcast: unsafe extern "C" fn(Raw, Raw, usize, c_int, c_int, Raw, Raw) -> c_int,
    version: unsafe extern "C" fn(*mut c_int) -> c_int,
    error: unsafe extern "C" fn(c_int) -> *const c_char,
}

fn calls() -> Result<&'static Calls, GpuError> {
    static CALLS: OnceLock<Result<Calls, String>> = OnceLock::new();
    let calls = CALLS.get_or_init(|| {
        // The library stays open, because `Calls` contains its functions.
        let library = Box::leak(Box::new(open_nccl()?));
        let missing = |error: libloading::Error| error.to_string();
        // SAFETY: these are the functions' types in NCCL's header, which are stable in NCCL 2.
        unsafe {
            Ok(Calls {
                init_all: *library.get(b"ncclCommInitAll\0").map_err(missing)?,
                all_reduce: *library.get(b"ncclAllReduce\0").map_err(missing)?,
                broadcast: *library.get(b"ncclBroadcast\0").map_err(missing)?,
                version: *library.get(b"ncclGetVersion\0").map_err(missing)?,
                error: *library.get(b"ncclGetErrorString\0").map_err(missing)?,
            })
        }
    });
    calls.as_ref().map_err(|why| GpuError::NoNccl { why: why.clone() })
}

fn check(calls: &Calls, call: &'static str, status: c_int) -> Result<(), GpuError> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: NCCL returns a static string.
    let what = unsafe { std::ffi::CStr::from_ptr((calls.error)(status)) };
    Err(GpuError::Nccl { call, what: what.to_string_lossy().into_owned() })
}

/// A rank's communicator.
#[derive(Debug)]
pub struct Comm {
    raw: Raw,
    /// The rank's number.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
}

// SAFETY: NCCL's handles may be used from any thread, one at a time.
unsafe impl Send for Comm {}

impl Comm {
    /// Connects the first devices, one for each rank.
    ///
    /// # Errors
    /// NCCL is missing, there are too few devices, or NCCL fails.
    pub fn connect(ranks: usize) -> Result<Vec<Self>, GpuError> {
        let calls = calls()?;
        let mut raw = vec![null_mut(); ranks];
        let devices: Vec<c_int> = (0..ranks as c_int).collect();
        // SAFETY: the array has as many handles as there are devices.
        let status = unsafe { (calls.init_all)(raw.as_mut_ptr(), ranks as c_int, devices.as_ptr()) };
        check(calls, "ncclCommInitAll", status)?;
        Ok(raw.into_iter().enumerate().map(|(rank, raw)| Self { raw, rank, ranks }).collect())
    }

    /// Returns the library's version as a number: 22703 is 2.27.3.
    ///
    /// # Errors
    /// NCCL is missing or fails.
    pub fn version() -> Result<i32, GpuError> {
        let calls = calls()?;
        let mut version = 0;
        // SAFETY: valid memory for one number.
        check(calls, "ncclGetVersion", unsafe { (calls.version)(&mut version) })?;
        Ok(version)
    }

    /// Replaces `count` numbers in bf16 with their sums over all ranks, in the stream's order.
    ///
    /// # Safety
    /// Until the sum is done, `address` is valid for `count` numbers in this rank's memory. All ranks submit the same
    /// sum.
    pub unsafe fn all_reduce(&self, address: u64, count: usize, stream: u64) -> Result<(), GpuError> {
        let calls = calls()?;
        let at = address as usize as Raw;
        // SAFETY: the caller guarantees the conditions.
        let status = unsafe { (calls.all_reduce)(at, at, count, BF16, SUM, self.raw, stream as usize as Raw) };
        check(calls, "ncclAllReduce", status)
    }

    /// Replaces `count` numbers of 32 bits with the first rank's numbers, in the stream's order.
    ///
    /// # Safety
    /// See [`Comm::all_reduce`].
    pub unsafe fn broadcast(&self, address: u64, count: usize, stream: u64) -> Result<(), GpuError> {
        let calls = calls()?;
        let at = address as usize as Raw;
        // SAFETY: the caller guarantees the conditions.
        let status = unsafe { (calls.broadcast)(at, at, count, I32, 0, self.raw, stream as usize as Raw) };
        check(calls, "ncclBroadcast", status)
    }
}
