//! The guide's Python script decodes every field of plans in their byte form.

use std::process::Command;
use std::{env, fs, process};

use kvarena::layout::{Groups, Reach};
use kvarena::plan::{DraftTree, OwnedPlan, PlanSize, SharedSpan, SlotMapping};
use kvarena::testkit::padded::padded;
use kvarena::*;
use serde_json::{Value, json};

/// Returns the expected output of the script for a plan.
fn wanted(plan: &BatchPlan<'_>) -> Value {
    let rows: Vec<_> = plan.rows.iter().map(|r| [r.row.raw(), r.qo_start, r.extend_len, r.kv_len]).collect();
    let numbers = |slots| -> Vec<i64> {
        match slots {
            SlotMapping::I32(slots) => slots.iter().map(|&slot| slot.into()).collect(),
            SlotMapping::I64(slots) => slots.to_vec(),
        }
    };
    let slots = numbers(plan.slot_mapping);
    let writes: Vec<_> = plan.table_writes.iter().map(|w| [w.index, w.value]).collect();
    let span = |s: &SharedSpan| [s.member_start, s.member_count, s.begin, s.end];
    let spans: Vec<_> = plan.shared.spans.iter().map(span).collect();
    json!({
        "step": plan.step.raw(), "rows": rows, "positions": plan.positions, "slot_mapping": slots,
        "tokens": plan.tokens.iter().map(|t| t.raw()).collect::<Vec<_>>(), "table_writes": writes,
        "spans": spans, "members": plan.shared.members, "masks": plan.masks,
        "track_slots": numbers(plan.track_slots),
    })
}

/// Writes the byte forms of some plans, and their expected decodings:
///
/// * A prefill of an odd number of tokens, and a decode whose token is unknown. Each is written as planned, then
///   padded, then padded with 64-bit slots.
/// * A step with a shared span.
/// * A draft tree.
/// * A prefill of an engine with groups of layers, as planned and padded.
fn write_plans(bytes: &mut Vec<u8>, plans: &mut Vec<Value>) {
    let pool = PoolConfig { page_size: 4, shape: KvShape::heads(1, 1), ..Default::default() };
    let mut engine = Engine::new(pool, Null).expect("a valid config");
    let prompt: Vec<_> = (7..18).map(TokenId::new).collect();
    let seq = engine.admit(Namespace::default(), &prompt, 0).expect("there is room");
    let (mut scratch, mut padding) = (StepScratch::new(), StepScratch::new());
    let wide: Vec<i64> = (0..16).map(|i| (5 << 31) + i).collect();
    for len in [11, 1] {
        let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }]).expect("there is room");
        let (rows, tokens) = (plan.rows.len() + 2, plan.token_count() + 4);
        let padded = padded(&plan, &mut padding, PlanSize { rows, tokens });
        let slots = SlotMapping::I64(&wide[..tokens]);
        for plan in [plan, padded, BatchPlan { slot_mapping: slots, ..padded }] {
            bytes.extend(OwnedPlan::from(&plan).as_bytes());
            plans.push(wanted(&plan));
        }
    }
    assert_eq!(plans[3]["tokens"], json!([u32::MAX]));
    assert_eq!(plans[4]["slot_mapping"][1], -1);
    // The child shares its parent's published pages.
    let step = plans[0]["step"].as_u64().expect("a number");
    for step in [step, step + 1] {
        engine.append(seq, &[TokenId::new(99)]).expect("there is room");
        engine.commit(StepId::new(step)).expect("steps commit in order");
    }
    let forked = engine.fork(seq, 1, 0).expect("there is room");
    let both = [seq, forked.children[0]].map(|seq| Extend { seq, len: 1 });
    let plan = engine.plan_batch(&mut scratch, &both).expect("there is room");
    assert_eq!(plan.shared.spans.len(), 1, "{:?}", plan.shared);
    bytes.extend(OwnedPlan::from(&plan).as_bytes());
    plans.push(wanted(&plan));
    // A tree of drafts.
    let child = both[1].seq;
    engine.append(child, &[5, 6, 7].map(TokenId::new)).expect("there is room");
    let mut tree = DraftTree::new();
    let start = engine.planned_len(child).expect("it is live");
    tree.set(start, &[0, 0, 0]).expect("parents precede children");
    let items = [Extend { seq: child, len: 3 }];
    let plan = engine.plan_drafts(&mut scratch, &items, &[tree.draft(child)]);
    let plan = plan.expect("there is room");
    assert_eq!(plan.masks.len(), 3);
    bytes.extend(OwnedPlan::from(&plan).as_bytes());
    plans.push(wanted(&plan));
    // Layers in groups, with three tracks.
    let groups = Groups::new(&[Reach::All, Reach::Window(8)], &[1, 0, 1]).expect("two groups");
    let mut engine = Engine::new(PoolConfig { layers: 3, groups, ..pool }, Null).expect("a valid config");
    let seq = engine.admit(Namespace::default(), &prompt, 0).expect("there is room");
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 11 }]).expect("there is room");
    for plan in [plan, padded(&plan, &mut padding, PlanSize { rows: 3, tokens: 14 })] {
        bytes.extend(OwnedPlan::from(&plan).as_bytes());
        plans.push(wanted(&plan));
    }
    let last = plans.last().expect("just pushed");
    assert_eq!(last["track_slots"].as_array().expect("slots").len(), 2 * 14);
    assert_eq!(last["track_slots"][13], -1);
}

#[test]
fn python_reads_what_was_written() {
    let (mut bytes, mut plans) = (Vec::new(), Vec::new());
    write_plans(&mut bytes, &mut plans);
    let folder = env::temp_dir().join(format!("kvarena-plans-{}", process::id()));
    fs::create_dir_all(&folder).expect("a temporary folder");
    let file = folder.join("plans");
    fs::write(&file, &bytes).expect("a temporary file");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/src/guide/read_plan.py");
    let run = Command::new("python3").arg(script).arg(&file).output();
    fs::remove_dir_all(folder).expect("the folder is the test's");
    let Ok(run) = run else {
        eprintln!("skipped: there is no python3");
        return;
    };
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let read: Vec<Value> = String::from_utf8_lossy(&run.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("a line of JSON"))
        .collect();
    assert_eq!(read, plans);
}
