//! Plans a step: checks the batch, takes exactly the pages that the new tokens need, and writes the plan (`writer`).

mod states;
mod writer;

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::{PageId, SeqKey};
use crate::page::PagePool;
use crate::plan::{BatchPlan, Draft, Extend, PlanSize, StepScratch};
use crate::prefix::{PrefixTree, SharedPrefixFinder};
use crate::sequence::{Sequence, SequenceTable};
use crate::stats::Stats;
use crate::step::StepLog;
use crate::system::access::access;
use crate::system::find_spans::find_spans;
use crate::system::page_budget::PageBudget;
use crate::system::plan_drafts::check_drafts;
use crate::system::reclaim::reclaim;
use crate::world::{Buffers, World};
use writer::{Batch, fill};

access! {
    /// Tables of [`plan_batch`].
    struct PlanBatch of &mut World {
        shape: &EngineShape,
        pages: &mut PagePool,
        prefixes: &mut PrefixTree,
        sequences: &mut SequenceTable,
        steps: &mut StepLog,
        fence: &Fence,
        finder: &mut SharedPrefixFinder,
        counters: &mut Stats,
        buffers: &mut Buffers,
    }
}

/// The resources that a batch needs, counted before the first change.
#[derive(Default)]
struct Needs {
    tokens: usize,
    /// Pages of all tracks.
    pages: u64,
    /// Number of these pages that are promised to the batch's sequences.
    promised: u64,
    leaves: u32,
    table_writes: usize,
    /// Whether a row's state is not steady.
    states: bool,
}

/// Implements the [`Engine`](crate::Engine)'s `plan_batch`, `plan_drafts` and `plan_padded` (with a `size`). The plan
/// is in `scratch`. O(batch, new tokens and page table words sent), plus [`find_spans`].
///
/// # Errors
/// [`Error::EmptyBatch`], [`Error::OutOfSteps`], [`Error::StepTokens`], [`Error::PlanSize`], [`Error::OutOfTokens`],
/// [`Error::OutOfPages`]. For an item [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::RepeatedSequence`],
/// [`Error::NotAccepted`], [`Error::ExtendLen`], and if layers keep a state [`Error::CrossesMark`] or
/// [`Error::StateLost`]. For a draft [`Error::DraftOrder`], [`Error::ExtendLen`],
/// [`Error::DraftLen`], [`Error::DraftArrays`], [`Error::DraftMask`], [`Error::DraftPosition`]. Nothing changes then.
pub(crate) fn plan_batch<'step>(
    world: PlanBatch<'_>,
    scratch: &'step mut StepScratch,
    items: &[Extend],
    drafts: &[Draft<'_>],
    size: Option<PlanSize>,
) -> Result<BatchPlan<'step>, Error> {
    let PlanBatch { shape, pages, prefixes, sequences, steps, fence, finder, .. } = world;
    let plan = sequences.next_plan();
    let mut needs = match shape.table.tracks {
        1 => check::<true>(shape, sequences, steps, items, plan),
        _ => check::<false>(shape, sequences, steps, items, plan),
    }?;
    let optional = if needs.states { states::check(sequences, items, &mut needs)? } else { 0 };
    check_drafts(sequences, items, drafts)?;
    let own = PlanSize { rows: items.len(), tokens: needs.tokens };
    let size = size.unwrap_or(own);
    if !size.holds(own) {
        let PlanSize { rows, tokens } = size;
        let (batch_rows, batch_tokens) = (own.rows, own.tokens);
        return Err(Error::PlanSize { rows, tokens, batch_rows, batch_tokens });
    }
    check_step_tokens(shape, size.tokens)?;
    let budget = PageBudget::new(pages, prefixes, sequences, fence);
    budget.check(needs.pages, needs.promised)?;
    if needs.states {
        let spare = budget.spare(needs.pages, needs.promised) / u64::from(shape.table.state_pages);
        let granted = spare.min(optional.into()) as u32;
        world.counters.given_up_marks += u64::from(states::grant(sequences, items, granted, &mut needs));
    }
    let evicted = reclaim(pages, prefixes, needs.pages, &mut world.buffers.pool_pages);
    sequences.consume_promised(needs.promised as u32);
    world.counters.evicted_pages += u64::from(evicted);
    let bump = scratch.reset();
    let new_pages = bump.alloc_slice_fill_copy(needs.pages as usize, PageId::default());
    assert!(pages.alloc(new_pages), "the pages were reclaimed");
    let shared = find_spans(shape, prefixes, sequences, finder, items, bump);
    let batch = Batch { shape, items, drafts, needs, size, new_pages };
    let plan = if shape.slots_fit_i32() {
        fill::<i32>(sequences, steps, &batch, bump)
    } else {
        fill::<i64>(sequences, steps, &batch, bump)
    };
    Ok(BatchPlan { shared, ..plan })
}

/// Checks a batch and counts its needs. `ONE` is set if there is one track, which saves 5 % of a plan's instructions at
/// page_size 1. Not inlined, so that the loop keeps its registers, which saves 3 % at page_size 16.
#[inline(never)]
fn check<const ONE: bool>(
    shape: &EngineShape,
    sequences: &mut SequenceTable,
    steps: &StepLog,
    items: &[Extend],
    plan: u64,
) -> Result<Needs, Error> {
    if items.is_empty() {
        return Err(Error::EmptyBatch);
    }
    steps.check_room()?;
    let page_size = shape.layout.page_size();
    let mut needs = Needs::default();
    for &Extend { seq, len } in items {
        let row = sequences.row_mut(seq)?;
        let sequence = &mut *row.sequence;
        if sequence.is_preempted() {
            return Err(Error::Preempted { seq });
        }
        if sequence.last_plan >= plan {
            return Err(unplannable(sequence, seq));
        }
        sequence.last_plan = plan;
        let max = extend_max(shape, sequence, steps);
        if len == 0 || len > max {
            return Err(Error::ExtendLen { seq, len, max });
        }
        needs.tokens += len as usize;
        let (new_pages, lacking) = if len == 1 && row.is_sent() {
            if row.sequence.room(page_size) > 0 {
                continue;
            }
            row.prefetch_next_page();
            (1, row.lacking_one::<ONE>())
        } else {
            needs.states |= !row.sequence.dirty_from.is_steady();
            let new_pages = row.sequence.pages_lacking(len, page_size);
            (new_pages, row.lacking(row.sequence.page_len + new_pages))
        };
        needs.pages += u64::from(new_pages);
        needs.promised +=
            u64::from(if ONE { row.sequence.outstanding().min(new_pages) } else { row.promised_of(new_pages) });
        needs.leaves += lacking.leaves;
        needs.table_writes += lacking.table_writes as usize;
    }
    if !ONE {
        needs.pages *= u64::from(shape.table.tracks);
    }
    check_step_tokens(shape, needs.tokens)?;
    sequences.check_leaves(needs.leaves.into())?;
    Ok(needs)
}

/// Checks the number of tokens of a step, including padding.
fn check_step_tokens(shape: &EngineShape, tokens: usize) -> Result<(), Error> {
    let (tokens, max) = (tokens as u64, u64::from(shape.max_step_tokens));
    if tokens <= max { Ok(()) } else { Err(Error::StepTokens { tokens, max }) }
}

/// Returns the error for a sequence that this plan already contains, or whose drafts wait.
#[cold]
fn unplannable(sequence: &Sequence, seq: SeqKey) -> Error {
    if sequence.is_drafted() {
        Error::NotAccepted { seq, step: sequence.last_step }
    } else {
        Error::RepeatedSequence { seq }
    }
}

/// Implements [`Engine::extend_max`](crate::Engine::extend_max).
pub(crate) fn extend_max(shape: &EngineShape, sequence: &Sequence, steps: &StepLog) -> u32 {
    if sequence.token_len > sequence.planned_len {
        return sequence.token_len - sequence.planned_len;
    }
    let room = sequence.planned_len < shape.max_sequence_len;
    u32::from(room && steps.samples_next(sequence.last_item))
}

#[cfg(test)]
mod tests {
    use super::{PlanBatch, plan_batch};
    use crate::config::EngineConfig;
    use crate::error::Error;
    use crate::id::{Namespace, TokenId};
    use crate::layout::{Capacity, PoolConfig};
    use crate::plan::{Extend, Prompt, STEP_TOKENS_MAX, StepScratch};
    use crate::system::admit::{Admitting, admit};
    use crate::world::World;

    #[test]
    fn a_step_of_more_tokens_than_can_be_numbered_is_refused() {
        // Real sequences of 2^30 tokens would take 4 GiB each, so the test forges the lengths.
        const LEN: u32 = 1 << 30;
        let pool = PoolConfig { capacity: Capacity::Pages(8), ..Default::default() };
        let config = EngineConfig { max_step_tokens: u32::MAX, ..EngineConfig::from(pool) };
        let shape = config.shape().expect("a valid config");
        let mut world = World::new(&shape, 32).expect("it is small");
        let mut items = Vec::new();
        for count in 1..=5_u64 {
            let (namespace, tokens) = (Namespace::default(), &[TokenId::new(7)]);
            let prompt = Prompt { namespace, tokens, admit: 0.into() };
            let seq = admit(Admitting::from(&mut world), &prompt).expect("there is room");
            world.sequences.get_mut(seq).expect("it is live").token_len = LEN;
            items.push(Extend { seq, len: LEN });
            let (tokens, max) = (count << 30, u64::from(STEP_TOKENS_MAX));
            let mut scratch = StepScratch::new();
            let refused = plan_batch(PlanBatch::from(&mut world), &mut scratch, &items, &[], None);
            match refused.expect_err("the pool has 8 pages") {
                Error::StepTokens { tokens: named, max: limit } => {
                    assert_eq!((named, limit), (tokens, max));
                }
                error => assert!(tokens <= max, "{tokens} tokens: {error}"),
            }
        }
        assert_eq!(world.steps.len(), 0);
    }
}
