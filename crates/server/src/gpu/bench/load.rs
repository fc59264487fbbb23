//! Measures the time to the first token of a prompt whose cached pages are in swap memory.
//!
//! A filler prompt, which needs nearly the whole pool, evicts the prompt's pages to swap memory. Before each load, all
//! pages of the pool have copies in swap memory, so the load waits for no save. Times are medians of [`ROUNDS`] rounds.

use std::time::Instant;

use kvarena::{Backend, Namespace, TokenId};
use serde_json::{Value, json};

use super::{Discard, Prompts};
use crate::args::Args;
use crate::gpu::setup::wait_for_swap_pages;
use kvarena_host::error::{Error, Result};
use kvarena_host::gpu::runner::OnGpu;
use kvarena_host::request::Request;
use kvarena_host::server::Server;

const ROUNDS: usize = 7;

/// Returns the numbers of new tokens that follow the cached ones.
fn new_tokens(context: u32) -> [u32; 2] {
    [1, context / 8]
}

/// Returns the arguments with a pool that holds one prompt, and swap memory of three times its size.
pub fn args(args: &Args, page_bytes: u64) -> Args {
    let [_, most] = new_tokens(args.context);
    let tokens = args.context + most + 2 * args.page_size;
    let pages = tokens.div_ceil(args.page_size);
    let gib = 3.0 * f64::from(pages) * page_bytes as f64 / (1_u64 << 30) as f64;
    Args { pages: Some(pages), swap_space: Some(gib), concurrency: 1, ..args.clone() }
}

/// The prompt's cached tokens, and a prompt that needs nearly the whole pool.
struct Bench<'s, R: OnGpu> {
    server: &'s mut Server<R>,
    prompts: &'s mut Prompts,
    cached: Request,
    filler: Request,
}

impl<R: OnGpu> Bench<'_, R> {
    /// Serves one request. Returns its milliseconds and the number of loaded pages.
    fn serve(&mut self, request: Request) -> Result<(f64, u64)> {
        let loaded = self.server.engine().stats().loaded_pages;
        let start = Instant::now();
        self.server.submit(request)?;
        self.server.run(&mut Discard)?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        Ok((ms, self.server.engine().stats().loaded_pages - loaded))
    }

    /// Copies all pages of the pool to swap memory, and waits.
    fn save(&mut self) -> Result<()> {
        let engine = self.server.engine_mut();
        let pages = engine.shape().layout.page_count();
        engine.save_ahead(pages).map_err(|error| Error::run(error.to_string()))?;
        engine.backend_mut().synchronize().map_err(|error| Error::run(error.to_string()))
    }

    /// Moves the cached tokens to swap memory.
    fn evict(&mut self) -> Result<()> {
        self.save()?;
        self.serve(self.filler.clone())?;
        self.save()
    }

    /// Returns the cached tokens and some new ones.
    fn cached_and(&mut self, new: usize) -> Request {
        let mut request = self.prompts.request(new, 1, 0.0);
        request.prompt.splice(0..0, self.cached.prompt.iter().copied());
        request
    }

    /// Returns the milliseconds of loading the cached tokens alone.
    fn load(&mut self) -> Result<f64> {
        let prompt: &[TokenId] = &self.cached_and(1).prompt;
        let engine = self.server.engine_mut();
        let failed = |error: &dyn std::error::Error| Error::run(error.to_string());
        let start = Instant::now();
        let seq = engine.admit(Namespace::default(), prompt, 0).map_err(|error| failed(&error))?;
        engine.load(&[seq]).map_err(|error| failed(&error))?;
        while engine.is_loading(seq).map_err(|error| failed(&error))? {}
        let ms = start.elapsed().as_secs_f64() * 1e3;
        engine.finish(seq).map_err(|error| failed(&error))?;
        Ok(ms)
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns a row for each number of new tokens.
///
/// # Errors
/// A failed run, or pages that are not where the measurement needs them.
pub fn rows(server: &mut Server<impl OnGpu>, prompts: &mut Prompts, context: usize) -> Result<Vec<Value>> {
    wait_for_swap_pages(server.engine_mut())?;
    let layout = server.engine().shape().layout;
    let pages = context as u64 / u64::from(layout.page_size());
    let filler = (layout.page_count() - 1) * layout.page_size();
    let cached = prompts.request(context, 1, 0.0);
    let filler = prompts.request(filler as usize, 1, 0.0);
    let mut bench = Bench { server, prompts, cached, filler };
    let mut rows = Vec::new();
    for new in new_tokens(context as u32).map(|new| new as usize) {
        let [mut first, mut load, mut compute, mut uncached] = [const { Vec::new() }; 4];
        for round in 0..=ROUNDS {
            bench.server.engine_mut().reset();
            let request = bench.cached_and(new);
            let without = bench.serve(request)?.0;
            bench.evict()?;
            let alone = bench.load()?;
            let request = bench.cached_and(new);
            let on_device = bench.serve(request)?;
            bench.evict()?;
            let request = bench.cached_and(new);
            let in_swap = bench.serve(request)?;
            let loaded = [on_device.1, in_swap.1];
            // The filler may leave one of the prompt's pages in the pool.
            if loaded[0] > 0 || loaded[1] + 1 < pages {
                return Err(Error::run(format!("{loaded:?} pages were loaded, not [0, {pages}]")));
            }
            if round > 0 {
                uncached.push(without);
                load.push(alone);
                compute.push(on_device.0);
                first.push(in_swap.0);
            }
        }
        let [first, load, compute, uncached] = [first, load, compute, uncached].map(median);
        rows.push(json!({
            "part": "load",
            "context": context,
            "new": new,
            "ms": first,
            "load_ms": load,
            "compute_ms": compute,
            "uncached_ms": uncached,
            "of_longer": first / load.max(compute),
        }));
    }
    Ok(rows)
}
