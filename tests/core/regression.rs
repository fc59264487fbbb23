//! Failures that the oracle has found, as literal calls or ops, with date and cause.

use kvarena::layout::Groups;
use kvarena::plan::PageCopy;
use kvarena::{PageId, PoolConfig, TokenId};

use super::host::{ALL, Host, pool};

fn tokens(text: &str) -> Vec<TokenId> {
    text.bytes().map(|byte| TokenId::new(byte.into())).collect()
}

/// 2026-11-21. `fork` checked that a page for the tail's copy was available, then published the parent's whole pages,
/// and then took the page. A publish locks the last idle page if the parent has a duplicate of it. The call failed with
/// `OutOfPages` after it had published, and lost a lock.
///
/// 2026-11-28. With swap memory, the page for the copy is evicted, and the publish restores it. The backend had not
/// received the save, and prompts later matched a page whose bytes were never written.
#[test]
fn fork_takes_the_tail_before_it_publishes() {
    for swap_pages in [0, 8] {
        let mut host = Host::null(PoolConfig { swap_pages, ..pool(2, 4, Groups::ONE) });
        host.cache(&tokens("abcde"));
        // Idle: p0 (ab), p1 (cd). The second sequence finds p0 only, because its prompt ends at "c". It computes "cde"
        // before the host appends "de".
        let seq = host.begin(&tokens("abc"));
        for _ in "cde".chars() {
            let step = host.plan(seq, 1);
            host.commit(step).expect("it is open");
        }
        host.append(seq, &tokens("de")).expect("it fits");
        assert_eq!((host.stats().free_pages, host.available()), (0, 1)); // p1

        let forked = host.fork(seq, 1, 0).expect("a page is idle");
        let copy = PageCopy { source: PageId::new(3), target: PageId::new(1) };
        assert_eq!(forked.copies, [copy]);
        let child = forked.children[0];
        let table: Vec<_> = host.page_table(child).expect("it is live").collect();
        assert_eq!(table, [0, 2, 1].map(PageId::new));
        assert_eq!(host.match_prefix(ALL, &tokens("abcdx")).pages(), 2);
        host.check();
    }
}
