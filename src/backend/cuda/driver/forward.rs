//! Forwards the driver's functions by name to a `libcuda.so.1` that the first call opens.
//!
//! A program with this backend therefore starts on any machine. Without a driver, each function returns
//! `CUDA_ERROR_STUB_LIBRARY`, which becomes [`CudaError::NoDriver`](crate::backend::cuda::CudaError).
//!
//! Each name is a jump through a slot. The slot first contains the loader, and later the driver's function. The symbols
//! are weak, so another definition of the same name may exist. They are hidden, so another library of the process calls
//! its own `libcuda`. They precede `-lcuda` on the linker's command line, so the linker takes no name from that
//! library.
//!
//! This works on Linux with x86-64 or AArch64; elsewhere the linker needs the driver's library.

mod names;

use std::arch::{global_asm, naked_asm};
use std::ffi::{CStr, c_void};
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering};

use names::for_each_name;

/// The address of a driver function; never null.
type Slot = AtomicPtr<c_void>;

/// Returns `CUDA_ERROR_STUB_LIBRARY`, the result of every function without a driver.
extern "C" fn no_driver() -> u32 {
    34
}

/// Returns `CUDA_ERROR_NOT_FOUND`, the result of a function that the driver lacks.
extern "C" fn not_found() -> u32 {
    500
}

/// Finds all functions once; concurrent callers wait.
extern "C" fn load() {
    static LOADED: Once = Once::new();
    LOADED.call_once(|| {
        // SAFETY: the name ends with a zero. The library has no unsafe initialiser, and stays open.
        let driver = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        for (name, slot) in NAMED {
            let found = if driver.is_null() {
                no_driver as *mut c_void
            } else {
                // SAFETY: the handle is open, the name ends with a zero.
                match unsafe { libc::dlsym(driver, name.as_ptr()) } {
                    found if found.is_null() => not_found as *mut c_void,
                    found => found,
                }
            };
            slot.store(found, Ordering::Release);
        }
    });
}

/// The initial target of every slot: loads the functions, then calls the function of the slot in r11 with the original
/// arguments.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
extern "C" fn first_call() {
    naked_asm!(
        "push rdi; push rsi; push rdx; push rcx; push r8; push r9; push r11",
        "sub rsp, 128",
        "movups [rsp], xmm0; movups [rsp + 16], xmm1; movups [rsp + 32], xmm2; movups [rsp + 48], xmm3",
        "movups [rsp + 64], xmm4; movups [rsp + 80], xmm5; movups [rsp + 96], xmm6; movups [rsp + 112], xmm7",
        "call {load}",
        "movups xmm0, [rsp]; movups xmm1, [rsp + 16]; movups xmm2, [rsp + 32]; movups xmm3, [rsp + 48]",
        "movups xmm4, [rsp + 64]; movups xmm5, [rsp + 80]; movups xmm6, [rsp + 96]; movups xmm7, [rsp + 112]",
        "add rsp, 128",
        "pop r11; pop r9; pop r8; pop rcx; pop rdx; pop rsi; pop rdi",
        "jmp [r11]",
        load = sym load,
    )
}

/// The initial target of every slot: loads the functions, then calls the function of the slot in x16 with the original
/// arguments.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
extern "C" fn first_call() {
    naked_asm!(
        "stp x29, x30, [sp, -224]!",
        "mov x29, sp",
        "stp x0, x1, [sp, 16]; stp x2, x3, [sp, 32]; stp x4, x5, [sp, 48]; stp x6, x7, [sp, 64]",
        "stp x8, x16, [sp, 80]",
        "stp q0, q1, [sp, 96]; stp q2, q3, [sp, 128]; stp q4, q5, [sp, 160]; stp q6, q7, [sp, 192]",
        "bl {load}",
        "ldp q0, q1, [sp, 96]; ldp q2, q3, [sp, 128]; ldp q4, q5, [sp, 160]; ldp q6, q7, [sp, 192]",
        "ldp x8, x16, [sp, 80]",
        "ldp x0, x1, [sp, 16]; ldp x2, x3, [sp, 32]; ldp x4, x5, [sp, 48]; ldp x6, x7, [sp, 64]",
        "ldp x29, x30, [sp], 224",
        "ldr x17, [x16]",
        "br x17",
        load = sym load,
    )
}

/// The jump of one name through its slot. It uses only registers that the ABI reserves for such jumps.
#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    ($name:ident) => {
        global_asm!(
            concat!(".pushsection .text.", stringify!($name), ", \"ax\", @progbits"),
            concat!(".weak ", stringify!($name)),
            concat!(".hidden ", stringify!($name)),
            concat!(".type ", stringify!($name), ", @function"),
            concat!(stringify!($name), ":"),
            "mov r11, [rip + {slot}@GOTPCREL]",
            "jmp [r11]",
            concat!(".size ", stringify!($name), ", . - ", stringify!($name)),
            ".popsection",
            slot = sym slots::$name,
        );
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    ($name:ident) => {
        global_asm!(
            concat!(".pushsection .text.", stringify!($name), ", \"ax\", %progbits"),
            ".p2align 2",
            concat!(".weak ", stringify!($name)),
            concat!(".hidden ", stringify!($name)),
            concat!(".type ", stringify!($name), ", %function"),
            concat!(stringify!($name), ":"),
            "adrp x16, :got:{slot}",
            "ldr x16, [x16, :got_lo12:{slot}]",
            "ldr x17, [x16]",
            "br x17",
            concat!(".size ", stringify!($name), ", . - ", stringify!($name)),
            ".popsection",
            slot = sym slots::$name,
        );
    };
}

macro_rules! forward {
    ($($name:ident)*) => {
        mod slots {
            #![allow(non_upper_case_globals, reason = "the driver's names")]
            $(pub(super) static $name: super::Slot = super::Slot::new(super::first_call as *mut _);)*
        }

        $(jump!($name);)*

        /// Every name and its slot. `used` keeps the object file in programs where only `cust` calls the driver.
        #[used]
        static NAMED: [(&CStr, &Slot); [$(stringify!($name)),*].len()] = [$((
            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("one zero, at the end"),
            },
            &slots::$name,
        )),*];
    };
}

for_each_name!(forward);
