//! All checks of `kvarena-server --check`, with a line for each setting, fault and sampling.

use std::io::Write;
use std::rc::Rc;

use super::settings::{FAIL_EVERY, FEW, Setting, samplings, settings};
use super::{Case, Distance};
use crate::setup::tiny_model;
use kvarena_host::config::ModelConfig;
use kvarena_host::error::{Error, Result};
use kvarena_host::gpu::GpuError;
use kvarena_host::gpu::device::Device;
use kvarena_host::gpu::forward::InjectedFault;
use kvarena_host::gpu::shape::check_shape;
use kvarena_host::gpu::sums::Transport;
use kvarena_host::sample::Sampling;

/// The output of the checks, and the number of failures.
struct Report<'a, W> {
    out: &'a mut W,
    failures: usize,
}

impl<W: Write> Report<'_, W> {
    fn line(&mut self, line: impl std::fmt::Display) -> Result<()> {
        writeln!(self.out, "{line}").map_err(|e| Error::run(format!("cannot write: {e}")))
    }

    /// Checks that a setting's tokens are close to the reference's.
    fn setting(&mut self, case: &mut Case, setting: Setting) -> Result<()> {
        let distance = case.distance(setting)?;
        self.failures += usize::from(!distance.is_close());
        let verdict = if distance.is_close() { "ok" } else { "WRONG" };
        let (name, Distance { token, logits, tokens, .. }) = (case.name, distance);
        self.line(format_args!(
            "{name}: {verdict}, worst token {token:.4}, logits {logits:.5}, {tokens} tokens, {setting:?}"
        ))
    }

    /// Checks that a deliberate fault is detected.
    fn fault(&mut self, case: &mut Case, fault: InjectedFault) -> Result<()> {
        let sparse = (fault == InjectedFault::Labels).then_some(FEW);
        let distance = case.distance(Setting { fault, sparse, ..settings()[0] })?;
        self.failures += usize::from(distance.is_close());
        let verdict = if distance.is_close() { "NOT FOUND" } else { "found" };
        let (name, Distance { token, logits, .. }) = (case.name, distance);
        self.line(format_args!(
            "{name}: fault {fault:?} {verdict}: token {token:.3}, logits {logits:.4}"
        ))
    }

    /// Checks that draws do not depend on graphs and overlap.
    fn draws(&mut self, case: &mut Case, sampling: Sampling) -> Result<()> {
        let name = case.name;
        match case.draws_agree(sampling) {
            Ok(tokens) => self.line(format_args!("{name}: {tokens} draws agree, {sampling:?}")),
            Err(error) => {
                self.failures += 1;
                self.line(format_args!("{name}: {error}"))
            }
        }
    }

    /// Checks that edited logits yield the tokens that the specification chooses.
    fn shaped(&mut self, case: &mut Case, setting: Setting) -> Result<()> {
        let name = case.name;
        match case.shaped_draws(setting) {
            Ok(tokens) if tokens > 0 => self
                .line(format_args!("{name}: {tokens} changed draws equal the CPU's, {setting:?}")),
            Ok(_) => Err(Error::run(format!("{setting:?}: no draw is changed"))),
            Err(error) => {
                self.failures += 1;
                self.line(format_args!("{name}: {error}"))
            }
        }
    }

    /// Checks that unsupported heads of 32 are rejected by name.
    fn refusal(&mut self) -> Result<()> {
        let narrow = ModelConfig::read(&tiny_model().with_file_name("llama-tiny"))?;
        match check_shape(&narrow) {
            Err(GpuError::Heads { head_dim: 32, .. }) => Ok(()),
            _ => {
                self.failures += 1;
                self.line("llama-tiny: heads of 32 are not refused")
            }
        }
    }

    fn end(mut self) -> Result<()> {
        match self.failures {
            0 => self.line("all checks passed"),
            n => Err(Error::run(format!("{n} of the checks failed"))),
        }
    }
}

/// Runs all checks on one GPU.
///
/// # Errors
/// The GPU cannot serve, or a check failed.
pub fn run(out: &mut impl Write) -> Result<()> {
    let device = Rc::new(Device::open()?);
    let mut report = Report { out, failures: 0 };
    for mut case in [Case::golden(&device)?, Case::seeded(&device)?] {
        for setting in settings() {
            report.setting(&mut case, setting)?;
        }
        for fault in [
            InjectedFault::Page,
            InjectedFault::Position,
            InjectedFault::Rotary,
            InjectedFault::Labels,
        ] {
            report.fault(&mut case, fault)?;
        }
        for sampling in samplings() {
            report.draws(&mut case, sampling)?;
        }
        for setting in settings().into_iter().step_by(9) {
            report.shaped(&mut case, setting)?;
        }
    }
    report.refusal()?;
    report.end()
}

/// Checks models that are divided among several GPUs: every ninth setting, steps that fail, and draws with and without
/// edits. Other settings are left out, because each opens its GPUs again. Also reports whether the tokens equal those
/// of one GPU. The check does not require this, because sums over ranks round differently.
///
/// # Errors
/// The GPUs cannot serve, or a check failed.
pub fn run_ranks(ranks: usize, sums: Option<Transport>, out: &mut impl Write) -> Result<()> {
    let device = Rc::new(Device::open()?);
    let mut report = Report { out, failures: 0 };
    for mut case in [Case::golden(&device)?, Case::seeded(&device)?] {
        let one = case.tokens(Setting::default())?;
        (case.ranks, case.sums) = (ranks, sums);
        let (name, same) = (case.name, case.tokens(Setting::default())? == one);
        report
            .line(format_args!("{name}: the tokens on {ranks} GPUs equal those on one: {same}"))?;
        for setting in settings().into_iter().step_by(9) {
            report.setting(&mut case, setting)?;
        }
        let failing = Setting { fail_every: Some(FAIL_EVERY), ..Setting::default() };
        report.setting(&mut case, failing)?;
        report.draws(&mut case, samplings()[2])?;
        report.shaped(&mut case, Setting::default())?;
    }
    report.end()
}
