//! Measures the time to the first token of a prompt whose cached pages are in swap memory.
//!
//! A filler prompt, which needs nearly the whole pool, evicts the prompt's pages to swap memory. Before each load, all
//! pages of the pool have copies in swap memory, so the load waits for no save. Times are medians of [`ROUNDS`] rounds.

use std::time::Instant;

use kvarena::{Backend, Namespace};
use serde_json::{Value, json};

use super::Run;
use crate::args::Args;
use crate::gpu::setup::wait_for_swap_pages;
use kvarena_host::error::{Error, Result};
use kvarena_host::gpu::runner::OnGpu;
use kvarena_host::request::Request;

const ROUNDS: usize = 7;

/// Returns the numbers of new tokens that follow the cached ones.
fn new_tokens(context: usize) -> [usize; 2] {
    [1, context / 8]
}

/// Returns the arguments with a pool that holds one prompt, and swap memory of three times its size.
pub fn args(args: &Args, page_bytes: u64) -> Args {
    let [_, most] = new_tokens(args.context as usize);
    let pages = (args.context + most as u32 + 2 * args.page_size).div_ceil(args.page_size);
    let gib = 3.0 * f64::from(pages) * page_bytes as f64 / (1_u64 << 30) as f64;
    Args { pages: Some(pages), swap_space: Some(gib), concurrency: 1, ..args.clone() }
}

fn failed(error: impl std::error::Error) -> Error {
    Error::run(error.to_string())
}

/// Returns a row for each number of new tokens after `context` cached ones.
///
/// # Errors
/// A failed run, or pages that are not where the measurement needs them.
pub fn rows(run: &mut Run<'_, impl OnGpu>, context: usize) -> Result<Vec<Value>> {
    wait_for_swap_pages(run.server.engine_mut())?;
    let layout = run.server.engine().shape().layout;
    let cached = run.request(context, 1, 0.0);
    let filler = run.request(((layout.page_count() - 1) * layout.page_size()) as usize, 1, 0.0);
    new_tokens(context).into_iter().map(|new| row(run, [&cached, &filler], new)).collect()
}

fn row(run: &mut Run<'_, impl OnGpu>, [cached, filler]: [&Request; 2], new: usize) -> Result<Value> {
    let context = cached.prompt.len();
    let pages = (context / run.server.engine().shape().layout.page_size() as usize) as u64;
    let mut times = [const { Vec::new() }; 4];
    // The first round, which captures graphs, does not count.
    for round in 0..=ROUNDS {
        run.server.engine_mut().reset();
        let (uncached, _) = serve(run, cached, new)?;
        evict(run, filler)?;
        let load = load(run, cached)?;
        let (compute, loaded_on_device) = serve(run, cached, new)?;
        evict(run, filler)?;
        let (first, loaded) = serve(run, cached, new)?;
        // The filler may leave one of the prompt's pages in the pool.
        if loaded_on_device > 0 || loaded + 1 < pages {
            return Err(Error::run(format!("{:?} pages were loaded, not [0, {pages}]", [loaded_on_device, loaded])));
        }
        if round > 0 {
            times.iter_mut().zip([first, load, compute, uncached]).for_each(|(times, time)| times.push(time));
        }
    }
    let [first, load, compute, uncached] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    Ok(json!({
        "part": "load",
        "context": context,
        "new": new,
        "ms": first,
        "load_ms": load,
        "compute_ms": compute,
        "uncached_ms": uncached,
        "of_longer": first / load.max(compute),
    }))
}

/// Serves the cached tokens and some new ones. Returns the milliseconds, and the number of loaded pages.
fn serve(run: &mut Run<'_, impl OnGpu>, cached: &Request, new: usize) -> Result<(f64, u64)> {
    let before = run.server.engine().stats().loaded_pages;
    let mut request = run.request(new, 1, 0.0);
    request.prompt.splice(0..0, cached.prompt.iter().copied());
    let (seconds, _) = run.serve(vec![request])?;
    Ok((seconds * 1e3, run.server.engine().stats().loaded_pages - before))
}

/// Moves the cached tokens to swap memory.
fn evict(run: &mut Run<'_, impl OnGpu>, filler: &Request) -> Result<()> {
    save(run)?;
    run.serve(vec![filler.clone()])?;
    save(run)
}

/// Copies all pages of the pool to swap memory, and waits.
fn save(run: &mut Run<'_, impl OnGpu>) -> Result<()> {
    let engine = run.server.engine_mut();
    let pages = engine.shape().layout.page_count();
    engine.save_ahead(pages).map_err(failed)?;
    engine.backend_mut().synchronize().map_err(failed)
}

/// Returns the milliseconds of loading the cached tokens alone.
fn load(run: &mut Run<'_, impl OnGpu>, cached: &Request) -> Result<f64> {
    // The last token of a prompt is never cached.
    let mut prompt = cached.prompt.clone();
    prompt.extend(run.request(1, 1, 0.0).prompt);
    let engine = run.server.engine_mut();
    let start = Instant::now();
    let seq = engine.admit(Namespace::default(), &prompt, 0).map_err(failed)?;
    engine.load(&[seq]).map_err(failed)?;
    while engine.is_loading(seq).map_err(failed)? {}
    let ms = start.elapsed().as_secs_f64() * 1e3;
    engine.finish(seq).map_err(failed)?;
    Ok(ms)
}
