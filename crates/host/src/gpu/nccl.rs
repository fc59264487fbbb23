//! What ranks of a model do through NCCL: the few calls that are needed, from `libnccl.so.2`. Short sums need not
//! (`peers.rs`).
//!
//! The library is found as cublasLt is. Its own binding in `cudarc` asks for names without the version alone, which
//! wheels do not have; so these six functions are looked up here.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use super::error::GpuError;
use super::libs::load_nccl;

type Raw = *mut c_void;

/// Of a number in bf16, and of one of 32 bits.
const BF16: c_int = 9;
const I32: c_int = 2;
const SUM: c_int = 0;

/// The calls.
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
        // It stays loaded: these are its functions.
        let library = Box::leak(Box::new(load_nccl()?));
        let missing = |error: libloading::Error| error.to_string();
        // SAFETY: these are the functions' types in its header, which NCCL 2 keeps.
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
    // SAFETY: NCCL's answer is a text that stays.
    let what = unsafe { std::ffi::CStr::from_ptr((calls.error)(status)) };
    Err(GpuError::Nccl { call, what: what.to_string_lossy().into_owned() })
}

/// One rank's end of what connects them all.
#[derive(Debug)]
pub struct Comm {
    raw: Raw,
    /// Its number.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
}

// SAFETY: NCCL's handles may be used from any thread, one at a time.
unsafe impl Send for Comm {}

impl Comm {
    /// Connects the first devices, a rank each.
    ///
    /// # Errors
    /// No library, fewer devices, or what NCCL says.
    pub fn connect(ranks: usize) -> Result<Vec<Self>, GpuError> {
        let calls = calls()?;
        let mut raw = vec![null_mut(); ranks];
        let devices: Vec<c_int> = (0..ranks as c_int).collect();
        // SAFETY: there is room for as many handles as there are devices.
        let status =
            unsafe { (calls.init_all)(raw.as_mut_ptr(), ranks as c_int, devices.as_ptr()) };
        check(calls, "ncclCommInitAll", status)?;
        Ok(raw.into_iter().enumerate().map(|(rank, raw)| Self { raw, rank, ranks }).collect())
    }

    /// The library's version, as a number: 22703 is 2.27.3.
    ///
    /// # Errors
    /// No library.
    pub fn version() -> Result<i32, GpuError> {
        let calls = calls()?;
        let mut version = 0;
        // SAFETY: valid memory for one number.
        check(calls, "ncclGetVersion", unsafe { (calls.version)(&mut version) })?;
        Ok(version)
    }

    /// Replaces `count` numbers in bf16 by their sums over all ranks, in the stream's order.
    ///
    /// # Errors
    /// NCCL's.
    ///
    /// # Safety
    /// The address is this rank's memory of that many numbers, until it is done. All ranks ask for the same.
    pub unsafe fn sum(&self, address: u64, count: usize, stream: u64) -> Result<(), GpuError> {
        let calls = calls()?;
        let at = address as usize as Raw;
        // SAFETY: the caller's.
        let status = unsafe {
            (calls.all_reduce)(at, at, count, BF16, SUM, self.raw, stream as usize as Raw)
        };
        check(calls, "ncclAllReduce", status)
    }

    /// Replaces `count` numbers of 32 bits by those of the first rank, in the stream's order.
    ///
    /// # Errors
    /// NCCL's.
    ///
    /// # Safety
    /// As [`Comm::sum`].
    pub unsafe fn share(&self, address: u64, count: usize, stream: u64) -> Result<(), GpuError> {
        let calls = calls()?;
        let at = address as usize as Raw;
        // SAFETY: the caller's.
        let status =
            unsafe { (calls.broadcast)(at, at, count, I32, 0, self.raw, stream as usize as Raw) };
        check(calls, "ncclBroadcast", status)
    }
}
