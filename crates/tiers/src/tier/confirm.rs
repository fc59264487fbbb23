//! Prompts of which stores shall have all that the engine has, before the host reports them as computed.
//!
//! ```text
//! confirm --> names of records that were put --[have]--> restate_puts --> turn: puts --> report
//! ```

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvarena::Engine;
use kvarena::id::{Namespace, TokenId};

use super::alarm::after;
use super::jobs::Ask;
use super::ranks::RankMemory;
use super::{Find, LOOKS_MAX, Tier};

/// The prompts that wait until stores have their records. A put costs O(prompts with its record), and not O(prompts).
#[derive(Default)]
pub(super) struct Confirms {
    waiting: HashMap<u64, Confirm>,
    /// The keys of the prompts' records, and the prompts.
    of_key: BTreeSet<([u8; 32], u64)>,
    /// Prompts that may have all records.
    due: Vec<u64>,
}

/// A prompt that waits until stores have its records.
struct Confirm {
    id: u64,
    namespace: Namespace,
    prompt: Arc<[TokenId]>,
    deadline: Instant,
    /// The keys of its records, when the stores have answered which of them they have.
    keys: Option<Vec<[u8; 32]>>,
    /// Number of records that must be put before the prompt is due.
    lacking: u32,
    /// When the stores have answered, and when the prompt is compared with the cache again: the cache may lose a record
    /// that is queued. Each pause is twice as long as the one before.
    answered: Instant,
    again: Instant,
    /// Whether a record remains of which no store has answered whether it has it.
    is_unanswered: bool,
}

/// The first pause between two comparisons of a prompt with the cache.
const PAUSE: Duration = Duration::from_millis(50);

impl Confirms {
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub fn cancel(&mut self, id: u64) {
        let of_id: Vec<_> = self.waiting.iter().filter(|(_, confirm)| confirm.id == id).map(|(&at, _)| at).collect();
        of_id.into_iter().for_each(|serial| self.remove(serial));
    }

    /// Counts a record that a store has from now on.
    pub fn put(&mut self, key: [u8; 32]) {
        for (_, serial) in self.of_key.range((key, 0)..=(key, u64::MAX)) {
            let confirm = self.waiting.get_mut(serial).expect("the prompt waits");
            confirm.lacking = confirm.lacking.saturating_sub(1);
            if confirm.lacking == 0 {
                self.due.push(*serial);
            }
        }
    }

    fn remove(&mut self, serial: u64) {
        let confirm = self.waiting.remove(&serial);
        for key in confirm.and_then(|confirm| confirm.keys).into_iter().flatten() {
            self.of_key.remove(&(key, serial));
        }
    }
}

impl<B> Tier<B>
where
    B: RankMemory,
{
    /// Makes sure that a store has all records that the engine has of a prompt: asks the stores for those that were
    /// put, and puts the others and those that the stores have lost. `id` identifies the prompt for [`Tier::turn`],
    /// which reports it when its last put is done. A store that fails does not delay the prompt for longer than
    /// [`TierOptions::put_deadline`](super::TierOptions) and twice the estimated time of its puts. O(prompt).
    ///
    /// A server that only computes prompts calls it before it reports a prompt as computed.
    pub fn confirm(&mut self, id: u64, engine: &mut Engine<B>, namespace: Namespace, prompt: &[TokenId]) -> Find {
        let mut put = Vec::new();
        let lacking = engine.restate_puts(namespace, prompt, |group, place| {
            put.push((group, place));
            true
        });
        // The prompt has no name if nothing of it is cached.
        let (Ok(lacking), Ok(Some(lookup))) = (lacking, engine.lookup(namespace, prompt)) else { return Find::Ready };
        if lacking == 0 && put.is_empty() {
            return Find::Ready;
        }
        self.waits.confirmed += 1;
        if self.shared.writer(0).is_none() {
            self.waits.unconfirmed += 1;
            return Find::Ready;
        }
        let (serial, prompt) = (self.next, Arc::<[TokenId]>::from(prompt));
        self.next += 1;
        let records = u64::from(lacking) + put.len() as u64;
        let now = Instant::now();
        let bytes = records as f64 * self.shared.largest_put as f64;
        let time = self.options.stores.iter().map(|store| store.put_time(bytes)).max().unwrap_or_default();
        let deadline = after(now, self.options.put_deadline.saturating_add(2 * time));
        let confirm = Confirm {
            id,
            namespace,
            prompt: Arc::clone(&prompt),
            deadline,
            keys: None,
            lacking: 0,
            answered: now,
            again: deadline,
            is_unanswered: false,
        };
        self.confirms.waiting.insert(serial, confirm);
        self.alarm.set(deadline);
        // The next turn puts records that wait.
        self.alarm.set(now);
        // No rule excludes a store: the question is not whether to read. It also computes the keys.
        let (most, space) = ((u64::MAX, 0), self.shared.space(lookup.names()));
        let ask = Ask { is_exact: true, ..Ask::new(serial, space, lookup, prompt, most, put) };
        self.shared.ask(0, Box::new(ask));
        Find::Waiting
    }

    /// Takes the answer to the question for a prompt's records.
    pub(super) fn restate(&mut self, engine: &mut Engine<B>, ask: &Ask) {
        let Confirms { waiting, of_key, due } = &mut self.confirms;
        let Some(confirm) = waiting.get_mut(&ask.find) else { return };
        // Records that were put after the question are there. Without an answer, no record counts as lost.
        let lost: HashSet<_> = ask.denied.iter().filter(|at| !ask.located.contains_key(*at)).collect();
        let is_unanswered = |at: &(u32, u32)| !ask.located.contains_key(at) && !ask.denied.contains(at);
        confirm.is_unanswered = ask.wanted.iter().any(is_unanswered);
        let mut stored = HashSet::new();
        let lacking = engine.restate_puts(confirm.namespace, &confirm.prompt, |group, place| {
            let has = !lost.contains(&(group, place));
            stored.extend(has.then_some((group, place)));
            has
        });
        // A place whose page was put may have a cell that was not.
        let lacks = |place: &u32| self.shared.has_cells || !stored.contains(&(0, *place));
        let pages = self.shared.record_pages;
        let places = (pages - 1..ask.lookup.full_pages().min(ask.keys.len() as u32)).step_by(pages as usize);
        let keys: Vec<_> = places.filter(lacks).map(|place| ask.keys[place as usize].to_digest()).collect();
        of_key.extend(keys.iter().map(|key| (*key, ask.find)));
        confirm.keys = Some(keys);
        // An error leaves nothing to put.
        confirm.lacking = lacking.unwrap_or(0);
        due.extend((confirm.lacking == 0).then_some(ask.find));
        confirm.answered = Instant::now();
        confirm.again = confirm.answered + PAUSE;
        self.alarm.set(confirm.again);
    }

    /// Collects the prompts that do not wait any more.
    pub(super) fn end_confirms(&mut self, engine: &mut Engine<B>, ready: &mut Vec<u64>) {
        let (now, has_writer) = (Instant::now(), self.shared.writer(0).is_some());
        // If nothing is left to put, a prompt waits for records that the engine has lost.
        let is_quiet = self.fruitless >= LOOKS_MAX;
        let is_over = |confirm: &Confirm| !has_writer || now >= confirm.deadline;
        let mut due = std::mem::take(&mut self.confirms.due);
        let waiting = self.confirms.waiting.iter();
        let is_due = |confirm: &Confirm| is_quiet || is_over(confirm) || now >= confirm.again;
        due.extend(waiting.filter(|(_, confirm)| is_due(confirm)).map(|(&serial, _)| serial));
        for serial in due {
            let Some(confirm) = self.confirms.waiting.get_mut(&serial) else { continue };
            let mut is_stored = false;
            if confirm.keys.is_some() {
                self.waits.compared += 1;
                let lacking = engine.restate_puts(confirm.namespace, &confirm.prompt, |_, _| true);
                confirm.lacking = lacking.unwrap_or(0);
                is_stored = confirm.lacking == 0;
                if !is_stored && now >= confirm.again {
                    confirm.again = now + (now - confirm.answered);
                    self.alarm.set(confirm.again);
                }
            }
            if is_stored || is_over(confirm) {
                self.waits.unconfirmed += u64::from(!is_stored || confirm.is_unanswered);
                ready.push(confirm.id);
                self.confirms.remove(serial);
            }
        }
        if is_quiet {
            self.fruitless = 0;
        }
    }
}
