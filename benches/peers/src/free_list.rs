//! Allocates and frees 128 pages of 1 Mi pages, half of which are in use. kvarena's pool stores page states and returns
//! the lowest free pages. A plain `Vec` of free pages does neither. A third variant is a `Vec` that checks for double
//! frees, as in vLLM.

use std::hint::black_box;

use crate::cases::pages::{AllocFree, COUNT};
use crate::cases::sample::median_ns;
use crate::cases::work;
use crate::{Row, ours};

const PAGES: usize = 1 << 20;

pub fn rows() -> Vec<Row> {
    let row = |name, ns| Row { case: "alloc+free", page_size: 1, name, ns: ns / COUNT as f64 };
    let mut pool = AllocFree::new(PAGES as u32, 50);
    pool.check();
    let ours = median_ns(300, 100, || pool.call());
    let order = work::free_order(PAGES);
    let mut free: Vec<u32> = order[..PAGES / 2].to_vec();
    let mut taken = Vec::with_capacity(COUNT);
    let plain = median_ns(300, 100, || {
        taken.extend(free.drain(free.len() - COUNT..));
        free.append(black_box(&mut taken));
    });
    let mut is_free = vec![false; PAGES];
    free.iter().for_each(|&page| is_free[page as usize] = true);
    let checked = median_ns(300, 100, || {
        for page in free.drain(free.len() - COUNT..) {
            is_free[page as usize] = false;
            taken.push(page);
        }
        for page in black_box(&mut taken).drain(..) {
            assert!(!is_free[page as usize], "page {page} is free already");
            is_free[page as usize] = true;
            free.push(page);
        }
    });
    vec![row(ours::NAME, ours), row("Vec", plain), row("Vec and a flag a page", checked)]
}
