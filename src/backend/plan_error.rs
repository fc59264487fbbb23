//! [`PlanError`]: the reasons why any backend rejects a plan or a call. `check.rs`, `rope.rs` and `sparse.rs` return
//! it.

use crate::error::{Count, displayed};
use crate::id::{LayerId, MoveId, PageId, RowId, SlotId, StepId, SwapPageId};
use crate::layout::{KvShape, Reach};

displayed! {
    /// An array argument of a backend call.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum Operand {
        /// Queries.
        Q => "q";
        /// Keys.
        K => "k";
        /// Values.
        V => "v";
        /// Heads of queries, keys and values of a token, in this order.
        Qkv => "qkv";
        /// Weights of a norm.
        Norm => "the norm's weights";
        /// Frequencies of a rotation.
        Frequencies => "the frequencies";
        /// Attention sinks.
        Sinks => "sinks";
        /// The output of attention.
        Out => "out";
        /// Log-sum-exp.
        Lse => "the log-sum-exp";
        /// Lists of positions to read.
        Selection => "the selection";
    }
}

displayed! {
    /// The reason why a backend rejected a plan or a call. The call had no effect.
    #[derive(Clone, Copy, PartialEq, Debug)]
    #[non_exhaustive]
    pub enum PlanError {
        /// The step has not begun.
        NotBegun { step: StepId } => "step {} has not begun", step.raw();
        /// The step or a later one has already begun or ended.
        AlreadyBegun {
            step: StepId,
            /// The last step that began or ended.
            last: StepId,
        } => "step {} cannot begin after step {}", step.raw(), last.raw();
        /// The step has ended, so its pages may belong to another sequence.
        Ended { step: StepId } => "step {} has ended", step.raw();
        /// The backend has its maximum number of open steps.
        OpenSteps { max: u32 } => "no more than {} may be open", Count(max, "step");
        /// The step has more tokens, including padding, than the backend was opened for.
        StepTokens { tokens: usize, max: u32 } => "a step of {tokens} tokens is above the limit of {max}";
        /// The arrays with one entry for each token differ in length.
        Tokens {
            /// Length of the positions.
            positions: usize,
            /// Length of the tokens.
            tokens: usize,
            /// Length of the slot mapping.
            slots: usize,
        } => "a plan has {positions} positions, {tokens} tokens and {slots} slots";
        /// The query rows of the sequences are not contiguous, or their number differs from the number of tokens.
        QueryRows {
            /// The first sequence whose query rows do not follow those of the previous sequence; the number of
            /// sequences if only the total is wrong.
            row: usize,
        } => "the query rows of sequence {row}, or the total of all, are wrong";
        /// A shared span is empty, is not nested correctly, has fewer than two members, or covers new tokens of a
        /// member. Or the list of members is wrong: it contains a missing row, a row twice, or a row in no span.
        Span {
            /// The first wrong span; the number of spans if the list of members is wrong.
            span: usize,
        } => "shared span {span} or its members are wrong";
        /// The number of masks differs from the number of tokens, or a mask of a draft tree is wrong. Such a mask lacks
        /// its token's own bit, or has bits of missing or later slots. Or the tree has more than 64 new tokens.
        Mask {
            /// The first token with a wrong mask; the number of tokens if the number of masks is wrong.
            token: usize,
            /// Its mask, or 0 without one.
            mask: u64,
        } => "the mask {mask:#x} of token {token}, or the number of masks, is wrong";
        /// The number of slots of the tracks after the first is wrong. Each of these tracks needs one slot for each
        /// token.
        TrackSlots {
            /// Slots given.
            slots: usize,
            /// Slots expected: tokens times the tracks after the first.
            wanted: usize,
        } => "{} of further tracks, expected {wanted}", Count(slots, "slot");
        /// The attention's window or chunk size differs from that of the layer's group, or is missing.
        Reach {
            layer: LayerId,
            group: u32,
            /// The positions that the group's tokens read.
            reach: Reach,
            /// The window given.
            window: Option<u32>,
            /// The size of chunks given.
            chunk: Option<u32>,
        } => "layer {} of group {group} reads {reach}, but its attention has {}", layer.raw(), match (window, chunk) {
            (Some(window), Some(chunk)) => format!("a window of {window} and chunks of {chunk}"),
            (Some(window), None) => format!("a window of {window}"),
            (None, Some(chunk)) => format!("chunks of {chunk}"),
            (None, None) => "no window".into(),
        };
        /// A layer that keeps a state has no K and V.
        StateLayer { layer: LayerId } => "layer {} keeps a state instead of K and V", layer.raw();
        /// A layer that stores K and V has no state.
        NoState { layer: LayerId } => "layer {} stores K and V, and keeps no state", layer.raw();
        /// A row of a plan does not exist or is padding, which has no state.
        StateRow { row: usize, rows: usize } => "row {row} of {rows} of a plan does not exist or is padding";
        /// A sparse read is for a layer outside group 0.
        SparseGroup { layer: LayerId, group: u32 } =>
            "a sparse read of layer {}, whose group {group} does not keep all tokens", layer.raw();
        /// A window is given for a plan with draft trees, which backends do not support.
        TreeWindow { window: u32 } => "a sliding window of {window} for a plan with trees of drafts";
        /// Chunks are given for a plan with draft trees, which backends do not support.
        TreeChunk {
            /// The size of chunks.
            chunk: u32,
        } => "chunks of {chunk} for a plan with trees of drafts";
        /// The size of chunks is not a power of two.
        ChunkSize {
            /// The size given.
            chunk: u32,
        } => "chunks of {chunk}, which is no power of two";
        /// A sequence's row is not in the page tables.
        Row {
            row: RowId,
            /// Rows of the page tables.
            rows: u32,
        } => "page table row {} is out of range: the count is {rows}", row.raw();
        /// `kv_len` of a sequence is below the number of its new tokens, or more than a page table row can hold.
        KvLen { row: RowId, kv_len: u32, min: u32, max: u64 } =>
            "kv_len {kv_len} of row {} is outside {min} to {max}", row.raw();
        /// A compaction keeps a slot whose place is past the end of the page table row.
        Place {
            row: RowId,
            /// The slot's place in the row.
            place: u64,
            /// Slots of a row.
            max: u64,
        } => "place {place} of row {} is past its {max} slots", row.raw();
        /// A slot is not in the pool.
        Slot { slot: SlotId, slot_count: u64 } => "slot {} is out of range: the count is {slot_count}", slot.raw();
        /// A write is outside the page tables.
        TableIndex {
            /// The word's index.
            index: u32,
            /// Words of the page tables.
            words: usize,
        } => "page table word {index} is out of range: the count is {words}";
        /// A word written to the page tables is not a valid page or leaf.
        TableValue {
            /// The word's index.
            index: u32,
            value: u32,
            /// Pages of the pool or leaves of the tables.
            count: u32,
        } => "page table word {index} is {value}, which is not below {count}";
        /// A page of the pool does not exist.
        Page { page: PageId, page_count: u32 } => "page {} is out of range: the count is {page_count}", page.raw();
        /// A page of swap memory does not exist.
        SwapPage {
            page: SwapPageId,
            /// Number of pages of swap memory.
            pages: u32,
        } => "swap page {} is out of range: the count is {pages}", page.raw();
        /// A move writes a swap page that has a lease, or reads a swap page that has a write lease.
        Leased { page: SwapPageId } => "swap page {} is leased", page.raw();
        /// The number of a batch of moves is not above the number of the last batch.
        MoveOrder {
            id: MoveId,
            /// The number of the last batch.
            last: MoveId,
        } => "move {} does not follow move {}", id.raw(), last.raw();
        /// The model does not have the layer.
        Layer {
            layer: LayerId,
            /// Layers of the model.
            layers: u32,
        } => "layer {} is out of range: the count is {layers}", layer.raw();
        /// The number of query heads is 0 or not a multiple of the kv heads.
        Heads { q_heads: u32, kv_heads: u32 } =>
            "{} cannot share {}", Count(q_heads, "query head"), Count(kv_heads, "kv head");
        /// The window is empty.
        EmptyWindow => "a sliding window of 0 tokens";
        /// The scale is not finite.
        Scale { scale: f32 } => "scale {scale} is not finite";
        /// The pool has no heads with an even number of elements to rotate.
        Rope {
            /// The shape of its K and V.
            shape: KvShape,
        } => "{shape:?} has no heads of even size to rotate";
        /// The scale is `1 / sqrt` of the length of a latent row. The scale must come from the length of the heads that
        /// the row compresses.
        LatentScale { scale: f32 } => "scale {scale} is that of latent rows, not of the heads they compress";
        /// The soft cap is not above 0 or not finite.
        SoftCap { soft_cap: f32 } => "soft cap {soft_cap} is not above 0 and finite";
        /// Attention from a later position on is not supported for draft trees, and on GPUs.
        First { first: u32 } => "attention from position {first} on is not supported here";
        /// A sink is NaN or plus infinity.
        Sink {
            /// The query head.
            head: u32,
            sink: f32,
        } => "sink {sink} of query head {head} is not below infinity";
        /// The lists are empty, or longer than a sequence can be.
        Top {
            /// Positions of a list.
            top: u32,
            /// Maximum length of a list.
            max: u64,
        } => "lists of {}, not 1 to {max}", Count(top, "position");
        /// The pool has no labels to select by.
        NoLabels => "the pool has no labels to select by";
        /// An argument's number of elements does not match the plan.
        Length {
            operand: Operand,
            /// Elements given.
            actual: usize,
            /// Elements expected; for rows, the minimum.
            wanted: usize,
        } => "{operand} has {actual} elements where the plan needs {wanted}";
        /// Rows overlap, or are not contiguous where they must be.
        Stride {
            operand: Operand,
            /// Elements from one row to the next.
            stride: usize,
            /// Elements of one row.
            width: usize,
        } => "{operand} has stride {stride} for rows of {width} elements";
    }
}

impl std::error::Error for PlanError {}
