//! The calls of a block manager in the form of vLLM's and mistral.rs's KV cache managers. `blocks` implements them over
//! an engine, `hash_blocks` with a hash map; `serve` is a scheduler for both.

/// A request of the host. Its tokens change only at their end.
pub type RequestId = u64;

/// The block that tables are padded with. No request gets it.
pub const NULL_BLOCK: u32 = 0;

/// A request's part of a step.
#[derive(Clone, Copy, Debug)]
pub struct Scheduled<'a> {
    pub id: RequestId,
    /// All known tokens.
    pub tokens: &'a [u32],
    /// Number of first tokens that have K and V before the step.
    pub start: usize,
    /// Number of first tokens that have K and V after it.
    pub end: usize,
}

/// Inputs of a step.
#[derive(Clone, Default, Debug)]
pub struct StepInputs {
    /// The slot of each new token, in the order of the batch: `block * block_size + offset`.
    pub slots: Vec<i64>,
    /// Sources and targets of the block copies that the host does in this order, before it writes new tokens.
    pub copies: Vec<[u32; 2]>,
}

/// A block manager. Calls panic for a request that is unknown.
#[allow(dead_code)] // `serve` has no drafts and reads tables instead of lists of blocks.
pub trait BlockManager {
    /// Returns the number of blocks that requests can use: all but the null block.
    fn num_usable_blocks(&self) -> usize;

    /// Returns the number of blocks that an allocation can take now, including cached blocks that no request uses.
    fn num_free_blocks(&self) -> usize;

    /// Returns the number of the prompt's first tokens that are cached: whole blocks, without the last token, whose
    /// query samples the next one.
    fn get_computed_blocks(&mut self, id: RequestId, prompt: &[u32]) -> usize;

    /// Reserves blocks for a request's first `len` tokens. A new request uses the computed blocks of its prompt; for a
    /// running one `prompt` is not read. Returns false and changes nothing if too few blocks are free.
    #[must_use]
    fn allocate_slots(&mut self, id: RequestId, prompt: &[u32], len: usize) -> bool;

    /// Copies a request to a new one, which has the same scheduled tokens and shares the whole computed blocks. Returns
    /// false and changes nothing if too few blocks are free. Not between [`schedule`](Self::schedule) and
    /// [`cache_blocks`](Self::cache_blocks).
    #[must_use]
    fn fork(&mut self, parent: RequestId, child: RequestId) -> bool;

    /// Plans a step, whose blocks are allocated, and writes its inputs.
    fn schedule(&mut self, batch: &[Scheduled<'_>], inputs: &mut StepInputs);

    /// Writes the block tables of the scheduled batch, `[requests, width]`, padded with the null block.
    fn write_block_tables(&self, width: usize, tables: &mut [u32]);

    /// Appends the blocks of a request, in order. Those of a step are included once it is scheduled.
    fn get_block_ids(&self, id: RequestId, ids: &mut Vec<u32>);

    /// Cuts a request to its first `len` tokens, for example after drafts were rejected. Its cached blocks stay.
    fn trim(&mut self, id: RequestId, len: usize);

    /// Ends the scheduled step: the whole blocks before each request's `end`, which a trim has reduced, are cached.
    fn cache_blocks(&mut self, batch: &[Scheduled<'_>]);

    /// Removes a request. Its cached blocks can be found until they are evicted, the least recently used first.
    fn free(&mut self, id: RequestId);

    /// Drops all cached blocks. Returns false and changes nothing while a request has blocks.
    #[must_use]
    fn reset_prefix_cache(&mut self) -> bool;
}
