//! A layer allocates its result and little else for any length of context, because it copies no K
//! and V.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Tensor};
use kvarena::{Attend, Capacity, Extend, KvDtype, KvShape, Namespace, PoolConfig, SeqKey, TokenId};
use kvarena_candle::KvArena;

const Q_HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 64;

static BYTES: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call goes to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller guarantees the allocator's conditions.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees the allocator's conditions.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs a step of one layer. Returns the bytes that the layer allocated.
fn layer(arena: &mut KvArena, seq: SeqKey, rows: usize) -> usize {
    let tensor = |heads| Tensor::ones((rows, heads, DIM), DType::F32, &Device::Cpu).expect("memory");
    let (q, k) = (tensor(Q_HEADS), tensor(KV_HEADS));
    let attend = Attend::new(Q_HEADS as u32, DIM as u32);
    let step = arena.step(&[Extend { seq, len: rows as u32 }]).expect("room");
    let before = BYTES.load(Ordering::Relaxed);
    let out = step.attend(0, &attend, &q, &k, &k).expect("valid attention");
    let bytes = BYTES.load(Ordering::Relaxed) - before;
    drop(out);
    let id = step.launched();
    arena.engine.append(seq, &[TokenId::new(1)]).expect("room");
    arena.close(id).expect("it was launched");
    bytes
}

#[test]
fn a_layer_allocates_its_result() {
    let config = PoolConfig {
        shape: KvShape::heads(KV_HEADS as u32, DIM as u32),
        dtype: KvDtype::F32,
        capacity: Capacity::Pages(600),
        ..PoolConfig::default()
    };
    let mut arena = KvArena::new(config, &Device::Cpu).expect("a small pool");
    let mut tokens = (0..).map(TokenId::new);
    for context in [64, 4096] {
        let prompt: Vec<TokenId> = tokens.by_ref().take(context).collect();
        let seq = arena.engine.admit(Namespace::default(), &prompt, 0).expect("room");
        layer(&mut arena, seq, context);
        // The first decode step may grow the backend's scratch.
        layer(&mut arena, seq, 1);
        let bytes = layer(&mut arena, seq, 1);
        let out = Q_HEADS * DIM * size_of::<f32>();
        assert!(bytes <= out + 4096, "{bytes} bytes for {out} at a context of {context}");
    }
}
