//! Tests that the audit finds each broken invariant, and when pages and locks leave the fence.

use super::*;
use crate::id::Scope;

fn page_ids(numbers: &[u32]) -> Vec<PageId> {
    numbers.iter().copied().map(PageId::new).collect()
}

fn lock() -> PrefixLock {
    PrefixLock::new(None, Scope::default())
}

fn step(number: u64) -> StepId {
    StepId::new(number)
}

/// Returns a fence: pages 7 and 5 and a lock wait for step 2, pages 6 and 8 for step 3; step 1 is complete.
fn sound() -> Fence {
    let mut fence = Fence::new(10, 4, 4).expect("memory");
    fence.complete(step(1));
    fence.push_pages(&page_ids(&[7, 5]), step(2));
    fence.push_lock(lock(), step(2));
    fence.push_pages(&page_ids(&[6, 8]), step(3));
    fence.add_idle(step(2), 3);
    assert_eq!(fence.check(step(3), 4), Ok(()));
    fence
}

/// Returns the audit's error after `spoil`.
fn broken<T>(spoil: impl FnOnce(&mut Fence) -> T) -> &'static str {
    let mut fence = sound();
    spoil(&mut fence);
    fence.check(step(3), 4).expect_err("the audit finds it")
}

#[test]
fn f1_steps_of_marks_rise() {
    let rise = "F1: the steps of marks rise, and none is complete";
    assert_eq!(broken(|fence| fence.marks.swap(0, 1)), rise);
    assert_eq!(broken(|fence| fence.marks[1].step = step(2)), rise);
    assert_eq!(broken(|fence| fence.completed = step(2)), rise);
    let planned = "F1: nothing waits for a step that is not planned";
    assert_eq!(broken(|fence| fence.marks[1].step = step(4)), planned);
}

#[test]
fn f2_pages_are_counted() {
    let counted = "F2: marks count the pages that wait";
    assert_eq!(broken(|fence| fence.marks[0].pages += 1), counted);
    assert_eq!(broken(|fence| fence.pages.pop_back()), counted);
    let more = |fence: &mut Fence| {
        fence.pages.push_back(PageId::new(9));
        fence.marks[1].pages += 1;
    };
    assert_eq!(broken(more), counted, "a page that the pool does not count as fenced");
}

#[test]
fn f3_locks_wait_in_order_for_marked_steps() {
    let order = "F3: locks wait in the order of arrival";
    assert_eq!(broken(|fence| fence.locks.push_front((step(3), lock()))), order);
    let marked = "F3: a step that a lock waits for has a mark";
    assert_eq!(broken(|fence| fence.locks[0].0 = step(1)), marked);
}

#[test]
#[should_panic(expected = "F4")]
fn f4_a_complete_step_holds_nothing() {
    let mut fence = sound();
    fence.take_pages(step(2), |_| ());
    assert!(fence.take_lock(step(2)).is_some());
    fence.complete(step(2));
}

#[test]
fn new_waits_end_at_the_last_mark_or_later() {
    let fence = sound();
    assert_eq!(fence.until(step(1)), None);
    assert_eq!(fence.until(step(2)), Some(step(3)));
    assert_eq!(fence.until(step(4)), Some(step(4)));
    assert_eq!(Fence::new(1, 1, 1).expect("memory").until(step(0)), None, "no step at all");
}

#[test]
fn pages_and_locks_leave_exactly_when_their_step_completes() {
    let mut fence = sound();
    assert_eq!([1, 2, 3].map(|number| fence.pages_until(step(number))), [0, 5, 7]);
    let take = |fence: &mut Fence, number| {
        let mut pages = Vec::new();
        fence.take_pages(step(number), |run| pages.extend_from_slice(run));
        pages
    };
    assert!(take(&mut fence, 1).is_empty() && fence.take_lock(step(1)).is_none());
    assert_eq!(take(&mut fence, 2), page_ids(&[7, 5]));
    assert!(fence.take_lock(step(2)).is_some() && fence.take_lock(step(9)).is_none());
    fence.remove_idle(step(2), 3);
    fence.complete(step(2));
    assert_eq!(fence.check(step(3), 2), Ok(()));
    assert_eq!(take(&mut fence, 9), page_ids(&[6, 8]));
    fence.complete(step(9));
    assert_eq!(fence.check(step(9), 0), Ok(()));
}
