//! All tables together, and the audit over them.
//!
//! * W1. Every page has exactly one owner, and its state says which kind: a sequence (Private), a tree node (Cached),
//!   the fence (Fenced), nobody (Free).
//! * W2. A sequence's published pages are the path of its lock.
//! * W3. Every lock that the tree counts is a sequence's or waits in the fence. T3 is audited with these locks.
//! * W4. Promised pages that are not drawn <= free + evictable + fenced pages. Why it holds: `system/room.rs`.
//!
//! Not here: what changes them (`system/`).

use std::collections::HashMap;
use std::fmt;

use bytemuck::Zeroable;

use crate::bitmap::Bitmap;
use crate::config::{EngineConfig, EngineShape};
use crate::error::ConfigError;
use crate::fence::Fence;
use crate::id::{NodeKey, PageId, PrefixLock, SeqKey, StepId, TokenId};
use crate::layout::Limits;
use crate::memory::{self, OutOfMemory, touch_reserved};
use crate::page::{PagePool, PageState};
use crate::plan::{Admitted, Compaction, PageCopy};
use crate::prefix::{Meeting, PrefixTree};
use crate::sequence::{Sequence, SequenceTable};
use crate::stats::Stats;
use crate::step::StepLog;

/// The tables, and the limits that they are made with.
pub struct World {
    /// Limits of the tables.
    pub shape: EngineShape,
    /// States of pages.
    pub pages: PagePool,
    /// Cached prefixes.
    pub prefixes: PrefixTree,
    /// Sequences.
    pub sequences: SequenceTable,
    /// Unfinished steps.
    pub steps: StepLog,
    /// What waits for them.
    pub fence: Fence,
    /// Where the prefixes of the last batch meet.
    pub meeting: Meeting,
    /// What has happened so far; its levels are not kept.
    pub counters: Stats,
    /// Buffers of the systems: each empties one before it fills it. Made at capacity, so that none ever grows.
    pub(crate) buffers: Buffers,
}

/// Most locks that wait in the fence: a planned item releases at most one, since a sequence that comes back has no step
/// until it is planned; a copy's step one more.
fn lock_count(shape: &EngineShape) -> u64 {
    u64::from(shape.max_steps) * (u64::from(shape.table.rows) + 1)
}

/// Most pages of a sequence, and one more, in all tracks.
fn row_pages_all(shape: &EngineShape) -> u64 {
    let row_pages = shape.max_sequence_len.div_ceil(shape.layout.page_size());
    (u64::from(row_pages) + 1) * u64::from(shape.table.tracks)
}

/// Most copies of a fork: a page for each child, and where there are several tracks as many as the pool has.
fn copy_count(shape: &EngineShape) -> u64 {
    let pages = if shape.table.tracks > 1 { shape.layout.page_count() } else { 0 };
    pages.max(shape.table.rows).into()
}

/// Buffers that systems fill, none of them from one call to the next.
pub(crate) struct Buffers {
    /// Pages released.
    pub freed: Vec<PageId>,
    /// Pages of a match, of a sequence, or that the tree has just got.
    pub pages: Vec<PageId>,
    /// Tokens of one sequence.
    pub tokens: Vec<TokenId>,
    /// Children that a fork made.
    pub children: Vec<SeqKey>,
    /// Copies that a fork made.
    pub copies: Vec<PageCopy>,
    /// What backends have to move of drafts that are accepted.
    pub compactions: Vec<Compaction>,
    /// What a batch's admission answered.
    pub admitted: Vec<Admitted>,
    /// Pages that a batch's admission has counted.
    pub counted: Bitmap,
}

impl World {
    /// Empty tables for a checked config; `hash_bits` as in [`PrefixTree::new`].
    ///
    /// # Errors
    /// [`ConfigError::OutOfMemory`] with the bytes of all tables, where the system refuses some of them.
    pub fn new(shape: &EngineShape, hash_bits: u32) -> Result<Self, ConfigError> {
        let refused = |_| ConfigError::OutOfMemory { bytes: shape.bytes().host() };
        Self::try_new(shape, hash_bits).map_err(refused)
    }

    fn try_new(shape: &EngineShape, hash_bits: u32) -> Result<Self, OutOfMemory> {
        let (page_count, page_size) = (shape.layout.page_count(), shape.layout.page_size());
        if shape.prefault {
            memory::check(shape.bytes().host())?;
        }
        let mut world = Self {
            shape: *shape,
            pages: PagePool::try_new(page_count)?,
            prefixes: PrefixTree::try_new(page_count, page_size, hash_bits)?,
            sequences: SequenceTable::try_new(&shape.table, page_size, hash_bits)?,
            steps: StepLog::try_new(shape.max_steps, shape.table.rows)?,
            fence: Fence::try_new(page_count, shape.max_steps, lock_count(shape))?,
            meeting: Meeting::try_new(shape.table.rows)?,
            counters: Stats::default(),
            buffers: Buffers {
                freed: memory::reserved(page_count.into())?,
                pages: memory::reserved(row_pages_all(shape))?,
                tokens: memory::reserved(shape.max_sequence_len.into())?,
                children: memory::reserved(shape.table.rows.into())?,
                copies: memory::reserved(copy_count(shape))?,
                compactions: memory::reserved(shape.table.rows.into())?,
                admitted: memory::reserved(shape.table.rows.into())?,
                counted: Bitmap::new(page_count, false)?,
            },
        };
        if shape.table.tracks > 1 {
            world.sequences.set_limits(Limits::new(&shape.layout, shape.promise_ahead));
        }
        if let Some(hashing) = shape.hashing {
            world.prefixes.keep_hashes(hashing, hash_bits)?;
            if shape.event_pages > 0 {
                world.prefixes.keep_events(shape.event_pages)?;
            }
        }
        if shape.prefault {
            world.fence.prefault();
            world.prefixes.try_prefault()?;
            world.sequences.prefault();
            world.meeting.prefault();
            touch_reserved(&mut world.buffers.freed, PageId::default());
            touch_reserved(&mut world.buffers.pages, PageId::default());
            touch_reserved(&mut world.buffers.tokens, TokenId::default());
            touch_reserved(&mut world.buffers.children, SeqKey::default());
            touch_reserved(&mut world.buffers.copies, PageCopy::zeroed());
            touch_reserved(&mut world.buffers.compactions, Compaction::default());
            touch_reserved(&mut world.buffers.admitted, Admitted::default());
        }
        Ok(world)
    }

    /// Pages that are free or evictable.
    fn there(&self) -> u32 {
        self.pages.free_count() + self.prefixes.size_info().evictable
    }

    /// Pages that a plan could take now that nobody is promised.
    pub fn available(&self) -> u32 {
        self.there().saturating_sub(self.sequences.promised())
    }

    /// Pages that a plan could take that nobody is promised once `step` is complete, if nothing else happens.
    /// O(unfinished steps).
    pub fn available_after(&self, step: StepId) -> u32 {
        let there = self.there() + self.fence.pages_until(step);
        there.saturating_sub(self.sequences.promised())
    }

    /// Checks every numbered invariant of every table over the whole state. O(everything); for tests and debugging.
    ///
    /// # Errors
    /// What broke, and a page that shows it with its owner.
    pub fn verify(&self) -> Result<(), Broken> {
        let broken = |(invariant, page)| Broken {
            invariant,
            page,
            owner: page.and_then(|page| self.owner(page)),
        };
        self.pages.check().map_err(broken)?;
        self.steps.check().map_err(|invariant| broken((invariant, None)))?;
        let fence = self.fence.check(self.steps.newest(), self.pages.fenced_count());
        fence.map_err(|invariant| broken((invariant, None)))?;
        let all = self.count_locks(|_| true);
        let fenced = self.count_locks(|holder| holder == LockHolder::Fence);
        self.prefixes.check(&all, &fenced, &self.fence).map_err(broken)?;
        if !self.prefixes.counts_names(self.sequences.iter().map(|(_, s)| s.namespace)) {
            return Err(broken(("T11: names stay while they have users, which are counted", None)));
        }
        self.check_sequences().map_err(broken)?;
        self.check_drafts().map_err(|invariant| broken((invariant, None)))?;
        self.check_promises().map_err(|invariant| broken((invariant, None)))?;
        self.check_owners().map_err(broken)
    }

    /// Every lock that somebody holds. Whoever comes to hold locks is named here, or T3 finds locks that nobody has.
    fn lock_holders(&self) -> impl Iterator<Item = (LockHolder, &PrefixLock)> {
        let sequences = self.sequences.iter().filter_map(|(_, sequence)| sequence.lock.as_ref());
        let sequences = sequences.map(|lock| (LockHolder::Sequence, lock));
        let fence = self.fence.locks().map(|(_, lock)| (LockHolder::Fence, lock));
        sequences.chain(fence)
    }

    /// How many locks end at each node, of the holders that are asked for.
    fn count_locks(&self, counted: impl Fn(LockHolder) -> bool) -> HashMap<NodeKey, u32> {
        let mut counts = HashMap::new();
        let locks = self.lock_holders().filter(|(holder, _)| counted(*holder));
        for node in locks.filter_map(|(_, lock)| lock.node()) {
            *counts.entry(node).or_default() += 1;
        }
        counts
    }

    fn check_sequences(&self) -> Result<(), (&'static str, Option<PageId>)> {
        let page_size = self.prefixes.page_size();
        for (_, s) in self.sequences.iter() {
            let first = (s.page_len > 0).then(|| self.sequences.page(s, 0));
            let ensure = |holds: bool, what| if holds { Ok(()) } else { Err((what, first)) };
            ensure(s.cached_len <= s.planned_len, "S1: cached_len <= planned_len")?;
            let pages = s.planned_len.div_ceil(page_size);
            ensure(s.page_len == pages, "S1: page_len = ceil(planned_len / page_size)")?;
            let published = s.published * page_size;
            ensure(
                published <= s.cached_len.min(s.token_len),
                "S2: what is published is computed",
            )?;
            ensure(s.dirty_from <= s.page_len, "S4: dirty_from lies within the pages")?;
            ensure(s.inherited <= s.published, "S4: inherited pages are published")?;
            match &s.lock {
                Some(lock) => {
                    let path = self.prefixes.path(lock);
                    let own = self.sequences.pages(s).take(s.published as usize);
                    ensure(path.into_iter().eq(own), "W2: published pages are the lock's path")?;
                }
                None => {
                    ensure(s.page_len == 0, "S3: a preempted sequence has no pages")?;
                    ensure(s.promised == 0, "S3: a preempted sequence is promised nothing")?;
                }
            }
            let known = self.sequences.knows_its_end(s);
            ensure(known, "S6: a row knows the entry of its last page and its last token")?;
        }
        if !self.sequences.counts_chunks() {
            return Err(("S5: every chunk in use belongs to rows, as many as it counts", None));
        }
        if !self.sequences.finds_fronts() {
            return Err(("S8: sequences are found by their fronts, running ones only", None));
        }
        Ok(())
    }

    fn check_drafts(&self) -> Result<(), &'static str> {
        let waits = |s: &Sequence| {
            let item = self.steps.open_item(s.last_item);
            item.is_some_and(|item| {
                s.cached_len <= item.start
                    && item.end == s.planned_len
                    && s.planned_len <= s.token_len
            })
        };
        let mut drafted = self.sequences.iter().filter(|(_, s)| s.is_drafted());
        match drafted.all(|(_, s)| waits(s)) {
            true => Ok(()),
            false => {
                Err("S9: drafts that wait are the last item of their sequence, in an open step")
            }
        }
    }

    fn check_promises(&self) -> Result<(), &'static str> {
        if !self.sequences.counts_promises() {
            return Err("S7: promised pages are the sum of what sequences are promised");
        }
        let fenced = self.pages.fenced_count();
        if self.sequences.promised() <= self.there() + fenced {
            Ok(())
        } else {
            Err("W4: promised <= free + evictable + fenced")
        }
    }

    fn check_owners(&self) -> Result<(), (&'static str, Option<PageId>)> {
        let mut owners = HashMap::new();
        for (page, owner) in self.owners() {
            if owners.insert(page, owner).is_some() {
                return Err(("W1: a page has one owner", Some(page)));
            }
            let state = match owner {
                Owner::Sequence(_) => PageState::Private,
                Owner::Node(_) => PageState::Cached,
                Owner::Fence(_) => PageState::Fenced,
            };
            if self.pages.state(page) != state {
                return Err(("W1: a page's state says what owns it", Some(page)));
            }
        }
        let free = self.pages.free_count() as usize;
        if owners.len() + free == self.pages.page_count() as usize {
            return Ok(());
        }
        let pages = (0..self.pages.page_count()).map(PageId::new);
        let lost = pages
            .filter(|page| self.pages.state(*page) != PageState::Free)
            .find(|page| !owners.contains_key(page));
        Err(("W1: a page that is not free has an owner", lost))
    }

    /// Every page that is not free, with its owner.
    fn owners(&self) -> impl Iterator<Item = (PageId, Owner)> + '_ {
        let private = self.sequences.iter().flat_map(move |(seq, s)| {
            let own = move |track| if track == 0 { s.published } else { 0 };
            let tracks = 0..self.sequences.tracks();
            let pages =
                tracks.flat_map(move |track| self.sequences.track_pages(s, track, own(track)));
            pages.map(move |page| (page, Owner::Sequence(seq)))
        });
        let cached = self.prefixes.pages().map(|(node, page)| (page, Owner::Node(node)));
        let fenced = self.fence.pages().map(|(page, step)| (page, Owner::Fence(step)));
        private.chain(cached).chain(fenced)
    }

    fn owner(&self, page: PageId) -> Option<Owner> {
        self.owners().find(|(owned, _)| *owned == page).map(|(_, owner)| owner)
    }
}

/// Bytes that an engine takes, all of them at the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct EngineBytes {
    /// K and V, from the backend.
    pub kv: u64,
    /// The page tables' mirror, from the backend.
    pub kv_tables: u64,
    /// States of pages.
    pub pages: u64,
    /// The prefix tree.
    pub prefixes: u64,
    /// Hashes of its pages; what namespaces are called comes on top, when they are named.
    pub hashes: u64,
    /// Events that wait to be told.
    pub events: u64,
    /// Tokens and page tables of sequences.
    pub sequences: u64,
    /// Steps in flight, what waits for them, and the systems' buffers.
    pub steps: u64,
}

impl EngineBytes {
    /// Bytes on the host, the backend's left out.
    pub fn host(&self) -> u64 {
        self.pages + self.prefixes + self.hashes + self.events + self.sequences + self.steps
    }
}

impl EngineConfig {
    /// Every byte that an engine of this config will take. Beside it are the host's
    /// [`StepScratch`](crate::StepScratch)es, one for each step in flight, of up to [`EngineShape::plan_bytes`] each.
    ///
    /// # Errors
    /// As [`EngineConfig::shape`].
    pub fn bytes(&self) -> Result<EngineBytes, ConfigError> {
        Ok(self.shape()?.bytes())
    }
}

impl EngineShape {
    /// [`EngineConfig::bytes`] of a checked config. No number overflows.
    pub fn bytes(&self) -> EngineBytes {
        let (page_count, page_size) = (self.layout.page_count(), self.layout.page_size());
        let rows = size_of::<SeqKey>() + size_of::<Compaction>() + size_of::<Admitted>();
        let buffers = 4 * (u64::from(page_count) + row_pages_all(self))
            + copy_count(self) * size_of::<PageCopy>() as u64
            + 4 * u64::from(self.max_sequence_len)
            + u64::from(self.table.rows) * rows as u64
            + Bitmap::bytes(page_count);
        EngineBytes {
            kv: self.layout.total_bytes(),
            kv_tables: 4 * self.table.words() as u64,
            pages: PagePool::bytes(page_count),
            prefixes: PrefixTree::bytes(page_count, page_size),
            hashes: self.hashing.map_or(0, |hashing| PrefixTree::hash_bytes(page_count, hashing)),
            events: self.hashing.map_or(0, |hashing| {
                PrefixTree::event_bytes(page_count, page_size, hashing, self.event_pages)
            }),
            sequences: SequenceTable::bytes(&self.table, page_size),
            steps: StepLog::bytes(self.max_steps, self.table.rows)
                + Fence::bytes(page_count, self.max_steps, lock_count(self))
                + Meeting::bytes(self.table.rows)
                + buffers,
        }
    }
}

/// Who holds a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LockHolder {
    /// A running sequence.
    Sequence,
    /// Nobody any more, but a step is not complete.
    Fence,
}

/// Whose a page is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Owner {
    /// A sequence's own.
    Sequence(SeqKey),
    /// A tree node's.
    Node(NodeKey),
    /// Waits for this step.
    Fence(StepId),
}

/// A broken invariant: a bug of this crate, or memory that something else wrote to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Broken {
    /// Number and sentence, as in the module docs and ARCHITECTURE.md.
    pub invariant: &'static str,
    /// A page that shows it.
    pub page: Option<PageId>,
    /// Whose page that is.
    pub owner: Option<Owner>,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "broken invariant {}", self.invariant)?;
        if let Some(page) = self.page {
            write!(f, ", seen at page {page:?}")?;
        }
        match self.owner {
            Some(Owner::Sequence(seq)) => write!(f, " of sequence {seq:?}"),
            Some(Owner::Node(node)) => write!(f, " of tree node {node:?}"),
            Some(Owner::Fence(step)) => write!(f, " fenced until step {step:?}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Broken {}
