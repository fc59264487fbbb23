//! Checks K4 by enumeration: reads the shared kernel's plan in the order of the kernel (`ptx/src/shared`).

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::backend::cuda::kernels::params::{NO_SPAN, TREE_ROW, is_tree};
use crate::backend::cuda::kernels::{Kernel, SUFFIX_ROWS, Selection};
use crate::id::{PageId, RowId};
use crate::layout::Dtype;
use crate::plan::SharedSpan;
use crate::testkit::rng::Rng;
use crate::testkit::spans::Spans;

const MULTIPROCESSORS: u32 = 132;

/// Returns a kernel over bf16 that reads spans once.
fn kernel(capability: u32, head_dim: u32) -> &'static Kernel {
    let selection = Selection { capability, scaling: None, rows: Dtype::Bf16, head_dim };
    selection.shared(0).expect("every head_dim has kernels")[0]
}

/// Returns the grid of Hopper's kernels for head_dim 128. With `general`, a head_dim, returns the grid of the kernels
/// for any device.
fn grid(multiprocessors: u32, general: Option<u32>) -> SharedGrid {
    let (capability, head_dim) = general.map_or((90, 128), |head_dim| (80, head_dim));
    SharedGrid::new(kernel(capability, head_dim), multiprocessors, if head_dim == 128 { 1 } else { 2 })
}

fn shape(kv_heads: u32, group: u32, multiprocessors: u32) -> SplitShape {
    let (decode_ctas, extend_ctas) = ([2 * multiprocessors; 3], multiprocessors);
    SplitShape { kv_heads, group, decode_ctas, extend_ctas, ..SplitShape::PLAIN }
}

/// Returns rows over random pages of 16 tokens, many with a common prefix.
fn batch(rng: &mut Rng, count: u64) -> (Vec<BatchRow>, Spans) {
    let mut tables: Vec<Vec<PageId>> = vec![Vec::new()];
    let mut next = 0;
    let (mut rows, mut own) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let mut table = tables[rng.below(tables.len() as u64) as usize].clone();
        let cut = rng.below(table.len() as u64 + 1) as usize;
        table.truncate(if rng.one_in(2) { table.len() } else { cut });
        for _ in 0..rng.pick(&[0, 1, 7, 40, 300]) {
            table.push(PageId::new(next));
            next += 1;
        }
        let short = rng.within(1, 8) as u32;
        let extend_len = rng.pick(&[1, 1, short, short, 20, 600]);
        let kv_len = table.len() as u32 * 16 + extend_len + rng.below(200) as u32;
        own.push((extend_len, if rng.one_in(12) { 0 } else { kv_len }));
        tables.push(table);
    }
    let mut qo_start = 0;
    for (i, &(extend_len, kv_len)) in own.iter().enumerate() {
        let tree = kv_len > 0 && extend_len <= 64 && rng.one_in(16);
        let row = RowId::new(i as u32 | if tree { TREE_ROW } else { 0 });
        rows.push(BatchRow { row, qo_start, extend_len, kv_len });
        qo_start += extend_len;
    }
    let padding: &[PageId] = &[];
    let shown = |(row, table): (&BatchRow, &Vec<PageId>)| row.kv_len > 0 && !table.is_empty();
    let seen: Vec<&[PageId]> = rows
        .iter()
        .zip(&tables[1..])
        .map(|(row, table)| if shown((row, table)) { table.as_slice() } else { padding })
        .collect();
    let spans = Spans::of(&seen, 16);
    (rows, spans)
}

/// Returns whether a row has own items, or `None` if the kernel of `suffixes` does not take the row.
fn takes(split: &SharedSplit, suffixes: usize, row: &BatchRow) -> Option<bool> {
    let (rows, most) = (row.extend_len * split.shape.group, 64.min(split.grid.rows));
    let has_items = rows > SUFFIX_ROWS[suffixes];
    let is_taken = rows > 0 && !is_tree(row) && rows <= if has_items { most } else { rows };
    (is_taken && !(has_items && row.kv_len == 0)).then_some(has_items)
}

fn taken(split: &SharedSplit, suffixes: usize) -> RowAssignment {
    RowAssignment::new(&split.shape, &split.grid, suffixes)
}

/// Counts the parts of a (row, kv head)'s own tokens as the kernel does.
fn own_parts(split: &SharedSplit, share: &RowShare, head: u32) -> u32 {
    let (stripes, per) = (split.stripes(), split.head.work_units);
    if share.units == 0 {
        return 0;
    }
    let begin = share.start + head / stripes * share.units;
    let some = (share.units - DECODE_EXTRA).max(1);
    (begin + some - 1) / per - begin / per + 1
}

/// Returns the items of a CTA that works on spans, in the kernel's order.
fn items_of(split: &SharedSplit, cta: u32) -> impl Iterator<Item = &SpanItem> {
    let next = |item: &&SpanItem| (item.next > 0).then(|| &split.items[usize::from(item.next)]);
    std::iter::successors(Some(&split.items[cta as usize]), next)
}

/// Returns the places of the parts of a member's sum over a span. The join computes the same places.
fn parts_of(split: &SharedSplit, span: &SpanParts, place: u32, head: u32) -> Vec<u32> {
    let (rows, group, per) = (split.grid.rows, split.shape.group, split.head.work_tiles);
    let (whole, nth) = (rows / group, place - span.member_start);
    let in_tile = nth % whole * group;
    let begin = head * split.head.head_tiles + span.tile_at + nth / whole * span.stride;
    let (first, last) = (begin / per, (begin + span.tiles - 1) / per);
    if first == last {
        let alone = 2 * split.head.span_ctas * rows + head * split.head.head_rows;
        return vec![alone + span.row_at + nth * group];
    }
    (first..=last).map(|cta| (2 * cta + u32::from(cta == first)) * rows + in_tile).collect()
}

fn check(split: &SharedSplit, width: usize, rows: &[BatchRow]) {
    let (heads, group) = (split.shape.kv_heads, split.shape.group);
    // The part of each item for each of its members: where it is, and the tokens that it covers.
    let mut written = BTreeMap::new();
    let mut count = 0;
    let items = |cta| items_of(split, cta).map(move |item| (cta, item));
    for (cta, item) in (0..split.head.span_ctas).flat_map(items) {
        assert!(item.piece < item.parts && u32::from(item.piece) <= cta, "K4: pieces are in CTAs");
        let member_count = u32::from(item.member_count);
        assert!(item.kv_begin < item.kv_end && member_count * group <= split.grid.rows);
        let first = split.members[item.member_start as usize].batch_index as usize;
        if item.behind > 0 {
            // The new tokens of the row see the tokens before them.
            assert_eq!(item.kv_end + u32::from(item.behind) - 1, rows[first].kv_len);
            assert_eq!((item.row, member_count), (rows[first].row.raw(), rows[first].extend_len));
        }
        for member in 0..member_count {
            let at = item.part + member * group;
            let of = (item.member_start + member, u32::from(item.head), item.kv_begin, item.kv_end);
            let index = split.members[of.0 as usize].batch_index as usize;
            let position = rows[index].kv_len - rows[index].extend_len;
            assert!(item.behind > 0 || item.kv_end <= position, "members see all of a span");
            assert!((at + group) as usize <= split.grid.partial_rows(), "K4: sums have room");
            assert!(written.insert(at, of).is_none(), "K4: parts do not overlap");
        }
        count += 1;
    }
    assert_eq!(count, split.items.len(), "each item belongs to one CTA");
    let starts: Vec<u32> = written.keys().copied().collect();
    assert!(starts.windows(2).all(|two| two[0] + group <= two[1]), "K4: parts do not overlap");

    // The suffixes in the order of the decode kernel: the token ranges of each (row, head)'s units, by warp.
    let stripes = split.stripes();
    let striped = heads / stripes;
    let mut suffixes: BTreeMap<(usize, u32), Vec<(u32, u32)>> = BTreeMap::new();
    for warp in 0..split.head.decode_warps {
        let Some(work) = split.works.get((warp / stripes) as usize) else { continue };
        let mut unit = warp / stripes * work.work_units;
        let mut index = work.batch_index as usize;
        if unit < work.unit_end {
            assert_eq!(work.unit_start, split.shares[index].start);
            assert_eq!(work.row, rows[index].row.raw());
        }
        while unit < work.unit_end {
            while split.shares[index].units == 0
                || split.shares[index].start + split.shares[index].units * striped <= unit
            {
                index += 1;
            }
            let share = &split.shares[index];
            let (turn, at) = ((unit - share.start) / share.units, (unit - share.start) % share.units);
            let stop = (at + work.unit_end - unit).min(share.units);
            let token = |units: u32| rows[index].kv_len.min(share.begin + units * DECODE_UNIT);
            if at < (share.units - DECODE_EXTRA).max(1) {
                let head = turn * stripes + warp % stripes;
                suffixes.entry((index, head)).or_default().push((token(at), token(stop)));
            }
            unit += stop - at;
        }
    }

    for (index, (row, share)) in rows.iter().zip(&split.shares).enumerate() {
        let Some(has_items) = takes(split, width, row) else {
            assert_eq!((share.extend_len, share.depth), (0, 0), "the extend kernel takes the row");
            assert!(split.taken.goes_to_extend(row) || row.extend_len == 0);
            continue;
        };
        assert!(!split.taken.goes_to_extend(row));
        assert_eq!((share.qo_start, share.extend_len), (row.qo_start, row.extend_len));
        for head in 0..heads {
            let own = suffixes.remove(&(index, head)).unwrap_or_default();
            assert_eq!(own.is_empty(), has_items, "every row has a suffix or items");
            assert_eq!(own.len() as u32, own_parts(split, share, head), "arrivals are counted");
            let mut at = share.begin.min(row.kv_len);
            for (begin, end) in own {
                assert_eq!(begin, at, "K4: no gap, no overlap");
                at = end;
            }
            assert_eq!(at, row.kv_len, "K4: the suffix ends with the row");
            for query in 0..row.extend_len {
                // The spans, deepest first, in the order of the join.
                let (mut span, mut depth, mut seen) = (share.span, 0, BTreeSet::new());
                while let Some(of) = split.spans.get(span as usize) {
                    assert!(of.parent == NO_SPAN || of.parent < span, "parents come first");
                    for at in parts_of(split, of, share.place + query, head) {
                        let (place, of_head, begin, end) = written.remove(&at).expect("a part at this place");
                        assert_eq!((place, of_head), (share.place + query, head));
                        let member = split.members[place as usize];
                        let wanted = (row.qo_start + query, index as u32);
                        assert_eq!((member.qo_start, member.batch_index), wanted);
                        seen.insert((begin, end));
                    }
                    depth += 1;
                    span = of.parent;
                }
                assert_eq!(depth, share.depth, "arrivals are counted");
                let end = seen.iter().fold(0, |at, &(begin, end)| {
                    assert_eq!(begin, at, "K4: no gap, no overlap");
                    end
                });
                assert_eq!(end, share.begin, "K4: the suffix begins where the spans end");
            }
        }
    }
    assert!(suffixes.is_empty() && written.is_empty(), "K4: no other parts");
}

/// Returns the number of query tiles that end between two new tokens of one row.
fn straddled(split: &SharedSplit) -> usize {
    let ends = |span: &Accepted| {
        let members = span.member_start..span.member_start + span.member_count;
        members.step_by(split.tile_members() as usize).skip(1).collect::<Vec<_>>()
    };
    let row = |place: u32| split.members[place as usize].batch_index;
    split.accepted.iter().flat_map(ends).filter(|&end| row(end - 1) == row(end)).count()
}

#[test]
fn plans_cover_every_token_once() {
    let mut rng = Rng::new(3);
    let (mut accepted, mut deep, mut straddling, mut own) = (0, 0, 0, 0);
    for _ in 0..200 {
        let count = rng.pick(&[2, 5, 30, 200]);
        let (rows, spans) = batch(&mut rng, count);
        let (kv_heads, group) = rng.pick(&[(1, 1), (2, 8), (8, 4), (3, 3), (8, 1), (4, 16), (2, 9)]);
        for ignore_cost in [false, true] {
            let all = rng.pick(&[2, 3, 4, 5, 16, 132, 132, 132]);
            let shape = shape(kv_heads, group, all);
            let suffixes = rng.within(shape.narrowest() as u64, 1) as usize;
            let grid = grid(all, rng.pick(&[None, None, Some(64), Some(128), Some(256)]));
            if !grid.serves(&shape) {
                continue;
            }
            let mut split = SharedSplit::new(shape, grid, ignore_cost);
            let any = split.plan(&rows, &spans.plan(), RowAssignment::new(&shape, &grid, suffixes));
            if !any {
                continue;
            }
            let tokens = rows.iter().map(|row| row.extend_len as usize).sum();
            assert!(split.members.len() <= shape.members_max(tokens, rows.len()));
            straddling += straddled(&split);
            own += split.items.iter().filter(|item| item.behind > 0).count();
            accepted += 1;
            deep += split.spans.iter().filter(|span| span.parent != NO_SPAN).count();
            assert!(split.head.span_ctas < grid.ctas);
            assert!(split.head.span_ctas as usize <= split.items.len());
            check(&split, suffixes, &rows);
        }
    }
    assert!(accepted > 100 && deep > 100, "{accepted} {deep}");
    assert!(straddling > 20 && own > 1000, "{straddling} {own}");
}

/// Even if a span is nearly all of the work, each stripe of the suffixes keeps a warp.
#[test]
fn every_stripe_of_the_suffixes_keeps_a_warp() {
    let pages: Vec<PageId> = (0..16_384).map(PageId::new).collect();
    let row = |i| BatchRow { row: RowId::new(i), qo_start: i, extend_len: 1, kv_len: 16_384 * 16 + 1 };
    let (rows, spans): (Vec<_>, _) = ((0..16).map(row).collect(), Spans::of(&[&pages[..]; 16], 16));
    for all in [2, 3, 4, 5, 8, 132] {
        let mut split = SharedSplit::new(shape(8, 4, all), grid(all, None), true);
        let any = split.plan(&rows, &spans.plan(), taken(&split, 0));
        assert_eq!(any, all > 1, "{all}");
        if !any {
            continue;
        }
        assert!(split.head.decode_warps >= split.stripes(), "{all}");
        check(&split, 0, &rows);
    }
}

#[test]
fn a_warm_split_does_not_allocate() {
    let mut rng = Rng::new(4);
    let mut split = SharedSplit::new(shape(8, 4, MULTIPROCESSORS), grid(MULTIPROCESSORS, None), true);
    let room = |split: &SharedSplit| {
        let SharedSplit { works, shares, members, spans, items, .. } = split;
        let sizes = [works.capacity(), shares.capacity(), members.capacity(), spans.capacity()];
        let accepted = [split.accepted.capacity(), split.around.capacity()];
        (sizes, items.capacity(), accepted, split.before.capacity())
    };
    let before = room(&split);
    for _ in 0..50 {
        let (rows, spans) = batch(&mut rng, 300);
        let suffixes = taken(&split, rng.below(2) as usize);
        split.plan(&rows, &spans.plan(), suffixes);
    }
    assert_eq!(room(&split), before);
}

/// Returns rows of one new token each, and their spans without the last `dropped` ones.
fn decoding(rng: &mut Rng, dropped: usize) -> (Vec<BatchRow>, Vec<SharedSpan>, Vec<u32>) {
    let count = rng.within(2, 60);
    let (mut rows, shared) = batch(rng, count);
    for (i, row) in rows.iter_mut().enumerate() {
        (row.row, row.qo_start, row.extend_len) = (RowId::new(i as u32), i as u32, 1);
    }
    let shared = shared.plan();
    let spans = &shared.spans[..shared.spans.len().saturating_sub(dropped)];
    (rows, spans.to_vec(), shared.members.to_vec())
}

#[test]
fn a_reused_split_plans_like_a_new_one() {
    let mut rng = Rng::new(5);
    let result = |split: &SharedSplit, is_once: bool| {
        let SharedSplit { head, works, shares, members, spans, items, .. } = split.clone();
        is_once.then_some((head, works, shares, members, spans, items))
    };
    let mut kept = 0;
    for round in 0..100 {
        let shape = shape(rng.pick(&[1, 2, 8]), rng.pick(&[1, 4, 8, 16]), MULTIPROCESSORS);
        let grid = grid(MULTIPROCESSORS, rng.pick(&[None, Some(64), Some(256)]));
        let fresh = SharedSplit::new(shape, grid, rng.one_in(2));
        let mut split = fresh.clone();
        let (mut rows, mut spans, mut members) = decoding(&mut rng, 0);
        for step in 0..16 {
            let shared = SharedSpans { spans: &spans, members: &members };
            let tokens = rows.iter().map(|row| row.extend_len as usize).sum();
            if let Some(taken) = shape.taken(&grid, tokens, &rows) {
                let mut alone = fresh.clone();
                let is_once = alone.plan(&rows, &shared, taken);
                let all = format!("round {round} step {step}");
                kept += u32::from(split.before.is_like(&rows, &shared, taken) && is_once);
                assert_eq!(split.plan(&rows, &shared, taken), is_once, "{all}");
                assert_eq!(result(&split, is_once), result(&alone, is_once), "{all}");
            }
            let place = rng.below(rows.len() as u64) as usize;
            let row = &mut rows[place];
            match rng.below(12) {
                0 => row.row = RowId::new(rng.below(400) as u32),
                1 => row.qo_start += 1,
                2 => row.extend_len = rng.within(0, 3) as u32,
                3 => row.kv_len = if row.kv_len == 0 { 20_000 } else { 0 },
                4 => (rows, spans, members) = decoding(&mut rng, 1),
                5 => spans.truncate(spans.len().max(1) - 1),
                6 if members.len() > 1 => members.swap(0, 1),
                _ => {
                    let more = rng.pick(&[1, 1, 16]);
                    let some = rows.iter_mut().filter(|row| row.kv_len > 0);
                    some.for_each(|row| row.kv_len += more);
                }
            }
        }
    }
    assert!(kept > 200, "{kept}");
}

#[test]
fn spans_are_refused_where_reading_them_again_is_cheaper() {
    let (mut rows, pages): (Vec<_>, Vec<PageId>) = (Vec::new(), (0..512).map(PageId::new).collect());
    for i in 0..64 {
        rows.push(BatchRow { row: RowId::new(i), qo_start: i, extend_len: 1, kv_len: 8192 + 256 });
    }
    let mut split = SharedSplit::new(shape(8, 4, MULTIPROCESSORS), grid(MULTIPROCESSORS, None), false);
    let spans = |pages: &[PageId]| Spans::of(&vec![pages; 64], 16);
    let suffixes = taken(&split, 0);
    assert!(split.plan(&rows, &spans(&pages).plan(), suffixes));
    assert_eq!(split.spans.len(), 1);
    assert!(!split.plan(&rows, &spans(&pages[..1]).plan(), suffixes), "16 tokens are not worth it");
    assert!(!split.plan(&rows, &SharedSpans::default(), suffixes));
}

/// Returns rows. `lens` has the new tokens and all tokens of each row, and whether the row is a tree.
fn rows_of(lens: &[(u32, u32, bool)]) -> Vec<BatchRow> {
    let mut qo_start = 0;
    let row = |(i, &(extend_len, kv_len, tree)): (usize, &(u32, u32, bool))| {
        qo_start += extend_len;
        let row = RowId::new(i as u32 | if tree { TREE_ROW } else { 0 });
        BatchRow { row, qo_start: qo_start - extend_len, extend_len, kv_len }
    };
    lens.iter().enumerate().map(row).collect()
}

/// Returns the shape on Hopper, where the kernel of 64 query rows follows the kernel of 8.
fn hopper() -> SplitShape {
    let plain = shape(8, 4, MULTIPROCESSORS);
    SplitShape { decode_ctas: [264, 0, 264], ..plain }
}

/// A step uses the narrow suffixes unless a row needs the wide ones. If only the decode kernel takes a row, the step
/// uses no kernel with shared spans.
#[test]
fn a_step_uses_a_kernel_that_takes_its_rows() {
    let suffixes = |lens: &[(u32, u32, bool)]| {
        let rows = rows_of(lens);
        let tokens = rows.iter().map(|row| row.extend_len as usize).sum();
        let grid = grid(MULTIPROCESSORS, None);
        let taken = hopper().taken(&grid, tokens, &rows)?;
        Some((taken.suffixes, rows.iter().filter(|row| taken.has_items(row)).count()))
    };
    let (one, two, four) = ((1, 100, false), (2, 100, false), (4, 100, false));
    let (eight, chunk, tree) = ((8, 100, false), (512, 700, false), (2, 100, true));
    let padding = (5, 0, false);
    assert_eq!(suffixes(&[one, one]), Some((0, 0)));
    assert_eq!(suffixes(&[one, two, two]), Some((0, 0)));
    assert_eq!(suffixes(&[four, four]), Some((1, 0)));
    assert_eq!(suffixes(&[one, one, one, four]), Some((1, 0)));
    assert_eq!(suffixes(&[one, two, chunk]), Some((0, 0)), "neither kernel takes the chunk");
    assert_eq!(suffixes(&[one, eight, chunk]), Some((0, 1)));
    assert_eq!(suffixes(&[four, eight]), Some((1, 1)), "a row with its own items");
    assert_eq!(suffixes(&[eight, eight, padding]), Some((0, 2)), "padding does not need the decode kernel");
    assert_eq!(suffixes(&[one, one, tree]), Some((0, 0)), "neither kernel takes the tree");
    assert_eq!(suffixes(&[four, four, tree]), None, "only the decode kernel for wide rows takes the tree");
}

/// A row with more new tokens needs more products, but still reads its suffix once.
#[test]
fn products_are_counted_by_new_tokens() {
    let pages: Vec<PageId> = (0..512).map(PageId::new).collect();
    let work = |new: u32| {
        let rows = rows_of(&vec![(new, 8192 + 256, false); 64]);
        let mut split = SharedSplit::new(shape(8, 4, MULTIPROCESSORS), grid(MULTIPROCESSORS, None), false);
        let spans = Spans::of(&vec![&pages[..]; 64], 16);
        let suffixes = taken(&split, usize::from(new > 2));
        assert!(split.plan(&rows, &spans.plan(), suffixes));
        let tiles = |span: &SpanParts| span.tiles * split.query_tiles(span.member_count);
        (split.spans.iter().map(tiles).sum::<u32>(), split.work.unit_bytes)
    };
    let (tiles, units) = work(1);
    assert_eq!([work(2), work(4)], [(2 * tiles, units), (4 * tiles, units)]);
}

/// Spans need a CTA besides those with a warp for each stripe of the suffixes. On a smaller device each row reads
/// separately.
#[test]
fn devices_without_a_cta_for_spans_are_refused() {
    let serves = |kv_heads, head_dim, ctas| {
        let grid = SharedGrid { ctas, ..grid(ctas, Some(head_dim)) };
        grid.serves(&shape(kv_heads, 4, 132))
    };
    for (kv_heads, head_dim) in [(1_u32, 64), (8, 64), (8, 256)] {
        let for_suffixes = kv_heads.div_ceil(kernel(80, head_dim).suffix_warps());
        let served = [for_suffixes, for_suffixes + 1].map(|ctas| serves(kv_heads, head_dim, ctas));
        assert_eq!(served, [false, true], "{kv_heads} {head_dim}");
    }
}

/// With one more multiprocessor for spans, the spans never end later and the suffixes never end sooner. The bisection
/// therefore finds the best number.
#[test]
fn multiprocessors_are_divided_optimally() {
    let mut rng = Rng::new(6);
    for _ in 0..300 {
        let (kv_heads, group) = rng.pick(&[(8, 4), (4, 16), (1, 1)]);
        let all = rng.pick(&[2, 3, 16, 132]);
        let shape = shape(kv_heads, group, all);
        let split = SharedSplit::new(shape, grid(all, None), false);
        let tiles = 1 + rng.below(10_000) as u32;
        let unit_bytes = (1 + rng.below(400_000_000)) as f64;
        let work = SpanWork { unit_bytes, ..SpanWork::default() };
        let later = |ctas| {
            let [spans, suffixes] = split.costs.sides(&split.dealt(&work, tiles, ctas));
            spans.max(suffixes)
        };
        let most = split.grid.span_ctas_max(&split.shape).min(tiles);
        let least = (1..=most).map(later).fold(f64::INFINITY, f64::min);
        assert_eq!(later(split.balance(&work, tiles)), least, "{work:?}");
    }
}

/// All CTAs for spans except the last have equally many tiles, counting the extra tiles.
#[test]
fn tiles_are_dealt_in_equal_shares() {
    let mut rng = Rng::new(7);
    let shape = shape(8, 4, MULTIPROCESSORS);
    let mut split = SharedSplit::new(shape, grid(MULTIPROCESSORS, None), true);
    let suffixes = taken(&split, 1);
    for _ in 0..50 {
        let (rows, spans) = batch(&mut rng, 30);
        if !split.plan(&rows, &spans.plan(), suffixes) {
            continue;
        }
        let tiles =
            |cta| -> u32 { items_of(&split, cta).map(|item| (item.kv_end - item.kv_begin).div_ceil(128)).sum() };
        let last = split.head.span_ctas - 1;
        let between = split.spans.iter().map(|span| span.stride - span.tiles).max().unwrap_or(0);
        for cta in 0..split.head.span_ctas {
            let items = items_of(&split, cta).count() as u32;
            let most = split.head.work_tiles;
            // Extra tiles may precede the first item and follow each item.
            let without = (items + 1) * between;
            let least = if cta == last { 1 } else { most.saturating_sub(without).max(1) };
            assert!((least..=most).contains(&tiles(cta)), "{items} items");
        }
    }
}
