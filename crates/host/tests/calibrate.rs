//! Tests the measurement of an fp8 pool's scales. NaN is an error, and the measuring runner has the limits of the
//! runner that it wraps.

mod common;

use common::serving::{Setting, requests, serve_by};
use common::wrapped::Wrapped;
use kvarena::{Cpu, PageId, PlanSize, Scaling};
use kvarena_host::calibrate::Calibrating;
use kvarena_host::cpu::CpuRunner;
use kvarena_host::error::Error;
use kvarena_host::model::Model;
use kvarena_host::request::Request;
use kvarena_host::runner::Runner;
use kvarena_host::shaping::Shaping;

fn model() -> Model {
    Model::read(&common::dir("qwen3-tiny")).expect("the golden model loads")
}

/// Fills all pages with NaN.
fn spoil(backend: &mut Cpu) {
    let nan = vec![0xff; backend.layout().page_bytes() as usize];
    for page in 0..backend.layout().page_count() {
        backend.write_page(PageId::new(page), &nan).expect("the page exists");
    }
}

#[test]
fn nan_is_an_error() {
    let model = model();
    let requests = requests(&common::cases("qwen3-tiny"));
    let runner = Calibrating::new(Wrapped { collected: spoil, ..Wrapped::new(&model) });
    let (_, server) = serve_by(runner, &requests[..1], Setting::default(), Scaling::Static, None);
    assert!(server.runner().scales().is_err(), "{:?}", server.runner().scales());
}

#[test]
fn shaped_requests_are_measured() {
    let model = model();
    let allowed = Some((0..60).map(|i| 7 * i).collect());
    let shaping = Some(Shaping { allowed, ..Shaping::default() }.prepare());
    let shaped: Vec<Request> = requests(&common::cases("qwen3-tiny"))
        .into_iter()
        .map(|request| Request { shaping: shaping.clone(), ..request })
        .collect();
    let runner = Calibrating::new(CpuRunner::new(&model));
    let (ran, server) = serve_by(runner, &shaped, Setting::default(), Scaling::Static, None);
    assert!(ran.collected.tokens.values().flatten().all(|token| token % 7 == 0));
    server.runner().scales().expect("K and V are finite");
}

#[test]
fn limits_are_those_of_the_inner_runner() {
    let model = model();
    let size = Some(PlanSize { rows: 3, tokens: 5 });
    let before_plan = || Err(Error::run("called"));
    let limited = Wrapped { draws: 7, edits: 9, size, before_plan, ..Wrapped::new(&model) };
    let mut runner = Calibrating::new(limited);
    assert_eq!((runner.draws_max(), runner.edits_max()), (7, 9));
    assert_eq!(runner.step_size(&[]), size);
    assert!(runner.before_plan().is_err());
}
