//! The measurement of the scales of an fp8 pool: NaN is an error, and the runner keeps the limits of the inner one.

mod common;

use common::serving::{Setting, requests, serve_by};
use kvarena::{Cpu, Extend, PageId, PlanSize, Scaling};
use kvarena_host::calibrate::Calibrating;
use kvarena_host::clock::Clock;
use kvarena_host::config::ModelConfig;
use kvarena_host::cpu::CpuRunner;
use kvarena_host::error::{Error, Result};
use kvarena_host::model::Model;
use kvarena_host::request::Request;
use kvarena_host::runner::{Runner, Work};
use kvarena_host::shaping::Shaping;

fn model() -> Model {
    Model::read(&common::dir("qwen3-tiny")).expect("the golden model loads")
}

/// A CPU runner whose steps leave NaN in all pages.
struct Spoiling<'m>(CpuRunner<'m>);

impl Runner for Spoiling<'_> {
    type Backend = Cpu;

    fn config(&self) -> &ModelConfig {
        self.0.config()
    }

    fn launch(&mut self, backend: &mut Cpu, work: &Work, clock: &mut Clock) -> Result<()> {
        self.0.launch(backend, work, clock)
    }

    fn collect(
        &mut self,
        backend: &mut Cpu,
        work: &Work,
        fail: bool,
        tokens: &mut Vec<u32>,
        clock: &mut Clock,
    ) -> Result<()> {
        self.0.collect(backend, work, fail, tokens, clock)?;
        let nan = vec![0xff; backend.layout().page_bytes() as usize];
        for page in 0..backend.layout().page_count() {
            backend.write_page(PageId::new(page), &nan).expect("the page exists");
        }
        Ok(())
    }

    fn settle(&mut self, backend: &mut Cpu) -> Result<()> {
        self.0.settle(backend)
    }

    fn keeps_logits(&self) -> bool {
        self.0.keeps_logits()
    }

    fn logits(&self, draw: usize) -> &[f32] {
        self.0.logits(draw)
    }
}

#[test]
fn nan_is_an_error() {
    let model = model();
    let requests = requests(&common::cases("qwen3-tiny"));
    let runner = Calibrating::new(Spoiling(CpuRunner::new(&model)));
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

/// A runner that has limits and pads steps, and computes none.
struct Fixed(ModelConfig);

impl Runner for Fixed {
    type Backend = Cpu;

    fn config(&self) -> &ModelConfig {
        &self.0
    }

    fn step_size(&self, _: &[Extend]) -> Option<PlanSize> {
        Some(PlanSize { rows: 3, tokens: 5 })
    }

    fn before_plan(&mut self) -> Result<()> {
        Err(Error::run("called"))
    }

    fn launch(&mut self, _: &mut Cpu, _: &Work, _: &mut Clock) -> Result<()> {
        unreachable!()
    }

    fn collect(
        &mut self,
        _: &mut Cpu,
        _: &Work,
        _: bool,
        _: &mut Vec<u32>,
        _: &mut Clock,
    ) -> Result<()> {
        unreachable!()
    }

    fn settle(&mut self, _: &mut Cpu) -> Result<()> {
        unreachable!()
    }

    fn draws_max(&self) -> usize {
        7
    }

    fn edits_max(&self) -> usize {
        9
    }

    fn keeps_logits(&self) -> bool {
        false
    }

    fn logits(&self, _: usize) -> &[f32] {
        &[]
    }
}

#[test]
fn limits_are_those_of_the_inner_runner() {
    let mut runner = Calibrating::new(Fixed(model().config));
    assert_eq!((runner.draws_max(), runner.edits_max()), (7, 9));
    assert_eq!(runner.step_size(&[]), Some(PlanSize { rows: 3, tokens: 5 }));
    assert!(runner.before_plan().is_err());
}
