//! Serves one request at a time, without a scheduler: every count is a function of the workload and the options.
//!
//! The sampled tokens are known beforehand, so a request is appended whole and computed in as few steps as
//! `step_tokens` allows (one if unset). Decoding token by token would take longer. Without groups of layers, it would
//! give the same hits and evictions.

use kvarena::stats::Stats;
use kvarena::{EngineError, Extend, TokenId};

use crate::host::{Host, NAMESPACE, ServeError, pages_in_use};
use crate::request::Request;

/// Serves the requests in order.
pub fn serve(host: &mut Host<'_>, requests: &[Request], step_tokens: u32) -> Result<(), ServeError> {
    let (mut prompt, mut output) = (Vec::new(), Vec::new());
    for (i, request) in requests.iter().enumerate() {
        if !host.fits(request) {
            host.skip();
            continue;
        }
        request.write_prompt(&mut prompt);
        request.write_stored_output(&mut output);
        host.count_full_hit(&prompt);
        let evicted = host.engine.stats().evicted_pages;
        let (found, page_size) = (host.engine.match_prefix(NAMESPACE, &prompt), host.engine.shape().layout.page_size());
        host.fetch(&prompt).map_err(|source| ServeError::Engine { request: i, source })?;
        let served =
            one(host, &prompt, &output, step_tokens).map_err(|source| ServeError::Engine { request: i, source })?;
        let on_device = (found.pages() - found.swap_pages()) * page_size;
        host.started(request, served.hit, on_device);
        let growth = i64::from(served.hit) - i64::from(found.pages() * page_size);
        host.tally.store_hit_tokens = host.tally.store_hit_tokens.wrapping_add_signed(growth);
        host.served(request);
        host.work.computed_tokens = u64::from(request.stored_len() - served.hit);
        host.tally.peak_pages = host.tally.peak_pages.max(served.peak_pages);
        host.work.evicted_pages = served.planned.evicted_pages - evicted;
        host.save_ahead().map_err(|source| ServeError::Engine { request: i, source })?;
        host.end_step(served.planned, 1);
    }
    Ok(())
}

struct Served {
    hit: u32,
    /// Maximum number of pages in use after a plan. With groups of layers, commits release pages, so the maximum need
    /// not follow the last plan.
    peak_pages: u32,
    /// The engine's counters after the request's last plan.
    planned: Stats,
}

/// Serves one request from admission to finish; all of it is core time.
fn one(
    host: &mut Host<'_>,
    prompt: &[TokenId],
    output: &[TokenId],
    step_tokens: u32,
) -> Result<Served, EngineError<std::convert::Infallible>> {
    let Host { engine, scratch, core, .. } = host;
    core.measure(|| {
        let seq = engine.admit(NAMESPACE, prompt, 0)?;
        let hit = engine.cached_len(seq)?;
        engine.load(&[seq])?;
        if !output.is_empty() {
            engine.append(seq, output)?;
        }
        let mut peak_pages = 0;
        let mut left = (prompt.len() + output.len()) as u32 - hit;
        loop {
            let len = engine.next_len(seq, left.min(step_tokens))?;
            let step = engine.plan_batch(scratch, &[Extend { seq, len }])?.step();
            let planned = engine.stats();
            peak_pages = peak_pages.max(pages_in_use(&planned));
            engine.commit(step)?;
            engine.complete(step)?;
            left -= len;
            if left == 0 {
                engine.finish(seq)?;
                return Ok(Served { hit, peak_pages, planned });
            }
        }
    })
}
