//! A block manager over `Engine<Outbox>`, for a host with its own scheduler, tensors and kernels. A block is a page, an
//! allocation is a promise, a batch is a plan, and caching its blocks commits and completes the step.

use std::collections::HashMap;

use kvarena::backend::OutboxError;
use kvarena::plan::SlotMapping;
use kvarena::*;

use super::manager::{BlockManager, NULL_BLOCK, RequestId, Scheduled, StepInputs};

const LIVE: &str = "the sequence of a request is live";

#[derive(Clone, Copy)]
struct Request {
    seq: SeqKey,
    /// Number of promised tokens. A promise reserves whole blocks, so tokens in the last one need no other promise.
    promised: usize,
}

pub struct EngineBlocks {
    block_size: usize,
    engine: Engine<Outbox>,
    scratch: StepScratch,
    requests: HashMap<RequestId, Request>,
    /// The scheduled batch, its sequences and its step.
    items: Vec<Extend>,
    seqs: Vec<SeqKey>,
    step: StepId,
}

/// Returns `None` for a lack of blocks. A request longer than the pool lacks them for ever, so a host rejects it by
/// [`num_usable_blocks`](BlockManager::num_usable_blocks) on arrival.
fn allocated<T>(result: Result<T, impl Into<EngineError<OutboxError>>>) -> Option<T> {
    match result.map_err(Into::into) {
        Ok(value) => Some(value),
        Err(EngineError::Core(error)) if error.is_shortage() || matches!(error, Error::TooLong { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

impl EngineBlocks {
    /// Creates a manager for requests of at most `max_len` tokens, of which `max_requests` run at once.
    pub fn new(blocks: u32, block_size: u32, max_requests: u32, max_len: u32) -> Self {
        let pool = PoolConfig { page_size: block_size, capacity: Capacity::Pages(blocks), ..PoolConfig::default() };
        let config = EngineConfig {
            max_sequences: max_requests,
            max_sequence_len: max_len,
            max_tokens: u64::from(max_requests) * u64::from(max_len),
            reserved_pages: NULL_BLOCK + 1,
            wide_slots: true,
            ..pool.into()
        };
        let engine = Engine::new(config, OutboxOptions).expect("the config is valid");
        let (scratch, block_size, step) = (StepScratch::new(), block_size as usize, StepId::default());
        let (items, seqs) = (Vec::new(), Vec::new());
        Self { block_size, engine, scratch, requests: HashMap::new(), items, seqs, step }
    }

    /// For audits and counters.
    #[allow(dead_code)]
    pub fn engine(&self) -> &Engine<Outbox> {
        &self.engine
    }
}

impl BlockManager for EngineBlocks {
    fn num_usable_blocks(&self) -> usize {
        let shape = self.engine.shape();
        (shape.layout.page_count() - shape.reserved_pages) as usize
    }

    fn num_free_blocks(&self) -> usize {
        self.engine.available() as usize
    }

    fn get_computed_blocks(&mut self, _: RequestId, prompt: &[u32]) -> usize {
        let found = self.engine.match_prefix(Namespace::default(), TokenId::from_raw(prompt));
        found.pages() as usize * self.block_size
    }

    fn allocate_slots(&mut self, id: RequestId, prompt: &[u32], len: usize) -> bool {
        if let Some(Request { seq, promised }) = self.requests.get_mut(&id) {
            if len > promised.next_multiple_of(self.block_size) {
                let Some(()) = allocated(self.engine.promise(*seq, len as u32)) else { return false };
                *promised = len;
            }
            return true;
        }
        let admitted = self.engine.admit(Namespace::default(), TokenId::from_raw(prompt), len as u32);
        let Some(seq) = allocated(admitted) else { return false };
        self.requests.insert(id, Request { seq, promised: len });
        true
    }

    fn fork(&mut self, parent: RequestId, child: RequestId) -> bool {
        let Request { seq, promised } = self.requests[&parent];
        let forked = self.engine.fork(seq, 1, promised as u32).map(|forked| (forked.children[0], forked.step));
        let Some((seq, step)) = allocated(forked) else { return false };
        if let Some(step) = step {
            self.engine.complete(step).expect("the copies precede the next step");
        }
        self.requests.insert(child, Request { seq, promised });
        true
    }

    fn schedule(&mut self, batch: &[Scheduled<'_>], inputs: &mut StepInputs) {
        self.items.clear();
        self.seqs.clear();
        for &Scheduled { id, tokens, start, end } in batch {
            let seq = self.requests[&id].seq;
            let known = self.engine.token_count(seq).expect(LIVE) as usize;
            self.engine.append(seq, TokenId::from_raw(&tokens[known..])).expect("at most max_len tokens");
            self.items.push(Extend { seq, len: (end - start) as u32 });
            self.seqs.push(seq);
        }
        let plan = self.engine.plan_batch(&mut self.scratch, &self.items).expect("the blocks are allocated");
        let SlotMapping::I64(slots) = plan.slot_mapping else { unreachable!("slots are wide") };
        inputs.slots.clear();
        inputs.slots.extend_from_slice(slots);
        self.step = plan.step();
        inputs.copies.clear();
        self.engine.backend_mut().drain(|work| match work {
            Work::Copy(copies) => {
                inputs.copies.extend(copies.iter().map(|copy| [copy.source.raw(), copy.target.raw()]))
            }
            work => unreachable!("without draft trees and swap memory: {work:?}"),
        });
    }

    fn write_block_tables(&self, width: usize, tables: &mut [u32]) {
        self.engine.write_tables(&self.seqs, 0, width, NULL_BLOCK, tables).expect("the tables fit");
    }

    fn get_block_ids(&self, id: RequestId, ids: &mut Vec<u32>) {
        let runs = self.engine.page_runs(self.requests[&id].seq, 0).expect(LIVE);
        runs.for_each(|run| ids.extend_from_slice(PageId::as_raw(run)));
    }

    fn trim(&mut self, id: RequestId, len: usize) {
        let request = self.requests.get_mut(&id).expect("it is known");
        let known = self.engine.token_count(request.seq).expect(LIVE);
        self.engine.rollback(request.seq, known.min(len as u32)).expect("cached blocks stay");
        self.engine.promise(request.seq, len as u32).expect("it shrinks");
        request.promised = len;
    }

    fn cache_blocks(&mut self, _: &[Scheduled<'_>]) {
        self.engine.commit(self.step).expect("it is scheduled");
        self.engine.complete(self.step).expect("it is committed");
    }

    fn free(&mut self, id: RequestId) {
        self.engine.finish(self.requests.remove(&id).expect("it is known").seq).expect(LIVE);
    }

    fn reset_prefix_cache(&mut self) -> bool {
        if self.requests.is_empty() {
            self.engine.reset();
        }
        self.requests.is_empty()
    }
}
