//! All checks of `kvarena-server --check`, with a line for each setting, fault and sampling.

use std::io::Write;
use std::rc::Rc;

use super::settings::{FAIL_EVERY, FEW, Setting, samplings, settings};
use super::shaped::VOCAB_MIN;
use super::{Case, Distance};
use crate::args::{Args, Shape};
use crate::setup::{self, config_of};
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
        let (name, Distance { token, logits, tokens, .. }) = (&case.name, distance);
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
        let (name, Distance { token, logits, .. }) = (&case.name, distance);
        self.line(format_args!("{name}: fault {fault:?} {verdict}: token {token:.3}, logits {logits:.4}"))
    }

    /// Checks that draws do not depend on graphs and overlap.
    fn draws(&mut self, case: &mut Case, sampling: Sampling) -> Result<()> {
        let name = case.name.clone();
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
        let name = case.name.clone();
        if case.model.config.vocab < VOCAB_MIN {
            return self.line(format_args!("{name}: too few tokens to check edits"));
        }
        match case.shaped_draws(setting) {
            Ok(tokens) if tokens > 0 => {
                self.line(format_args!("{name}: {tokens} changed draws equal the CPU's, {setting:?}"))
            }
            Ok(_) => Err(Error::run(format!("{setting:?}: no draw is changed"))),
            Err(error) => {
                self.failures += 1;
                self.line(format_args!("{name}: {error}"))
            }
        }
    }

    /// Checks that unsupported heads of 32 are rejected by name.
    fn refusal(&mut self) -> Result<()> {
        let narrow = ModelConfig { head_dim: 32, ..config_of(Shape::LlamaTiny64)? };
        match check_shape(&narrow) {
            Err(GpuError::Heads { head_dim: 32, .. }) => Ok(()),
            _ => {
                self.failures += 1;
                self.line("heads of 32 are not refused")
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

/// Runs all checks, on the model of the command line or on the built-in ones.
///
/// # Errors
/// The model cannot be used, the GPUs cannot serve, or a check failed.
pub fn run(args: &Args, out: &mut impl Write) -> Result<()> {
    if args.model.is_some() {
        check_shape(&setup::model_files(args)?.0)?;
    }
    let device = Rc::new(Device::open()?);
    let mut cases = match &args.model {
        Some(dir) => vec![Case::folder(&device, dir)?],
        None => vec![Case::golden(&device)?, Case::seeded(&device)?],
    };
    let mut report = Report { out, failures: 0 };
    for case in &mut cases {
        match args.tp as usize {
            1 => report.one(case, args.model.is_none())?,
            ranks => report.ranks(case, ranks, args.sums.map(Into::into))?,
        }
    }
    report.refusal()?;
    report.end()
}

impl<W: Write> Report<'_, W> {
    /// Checks a model on one GPU. Only in the built-in models do wrong channels surely change tokens.
    fn one(&mut self, case: &mut Case, is_built_in: bool) -> Result<()> {
        for setting in case.settings() {
            self.setting(case, setting)?;
        }
        let faults = [InjectedFault::Page, InjectedFault::Position, InjectedFault::Rotary];
        for fault in faults.into_iter().chain(is_built_in.then_some(InjectedFault::Labels)) {
            self.fault(case, fault)?;
        }
        for sampling in samplings() {
            self.draws(case, sampling)?;
        }
        let mut settings = case.settings().into_iter().step_by(9);
        settings.try_for_each(|setting| self.shaped(case, setting))
    }

    /// Checks a model that is divided among several GPUs: every ninth setting, steps that fail, and draws with and
    /// without edits. Other settings are left out, because each opens its GPUs again. Also reports whether the tokens
    /// equal those of one GPU. The check does not require this, because sums over ranks round differently.
    fn ranks(&mut self, case: &mut Case, ranks: usize, sums: Option<Transport>) -> Result<()> {
        let one = case.tokens(Setting::default())?;
        (case.ranks, case.sums) = (ranks, sums);
        let (name, same) = (case.name.clone(), case.tokens(Setting::default())? == one);
        self.line(format_args!("{name}: the tokens on {ranks} GPUs equal those on one: {same}"))?;
        for setting in case.settings().into_iter().step_by(9) {
            self.setting(case, setting)?;
        }
        let failing = Setting { fail_every: Some(FAIL_EVERY), ..Setting::default() };
        self.setting(case, failing)?;
        self.draws(case, samplings()[2])?;
        self.shaped(case, Setting::default())
    }
}
