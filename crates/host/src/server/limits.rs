//! What a request may ask for: the model's sizes and the pool's.

use crate::request::Request;

/// New tokens where a request does not say how many.
const USUAL_NEW_TOKENS: u32 = 128;
/// A lower temperature above 0 is raised to this one, as vLLM does: scores divided by less lose the noise of draws.
const TEMPERATURE_MIN: f32 = 0.01;

/// Sizes that no request may pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Positions of the model.
    pub positions: usize,
    /// Tokens that one sequence may have in the pool.
    pub pool: usize,
    /// Pages of the pool.
    pub pages: u32,
    /// Tokens of a page.
    pub page_size: u32,
}

impl Limits {
    /// Most new tokens after a prompt of this length. The last one is never fed back, so it needs no K and V.
    pub fn room(&self, prompt: usize) -> usize {
        (self.positions.min(self.pool) + 1).saturating_sub(prompt)
    }

    /// The request with its number of new tokens settled, if it can ever be served. A stop token that the model does not
    /// have is left out: it never comes.
    ///
    /// # Errors
    /// Says what is wrong: an empty prompt, a token that the model does not have, more tokens than the model has
    /// positions or the pool has slots, a sampling that makes no sense.
    pub fn check(&self, mut request: Request) -> Result<Request, String> {
        if request.prompt.is_empty() {
            return Err("the prompt has no tokens".into());
        }
        let prompt = request.prompt.iter().map(|token| token.raw());
        let mut given = prompt.chain(request.prediction.iter().copied());
        if let Some(token) = given.find(|&token| token as usize >= self.vocab) {
            let vocab = self.vocab;
            return Err(format!("token {token} is past the model's vocabulary of {vocab} tokens"));
        }
        if request.samples == 0 {
            return Err("n is 0 but must be at least 1".into());
        }
        request.stop.retain(|&token| (token as usize) < self.vocab);
        let sampling = &mut request.sampling;
        if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
            return Err(format!("temperature {} is not 0 or more", sampling.temperature));
        }
        if sampling.temperature > 0.0 {
            sampling.temperature = sampling.temperature.max(TEMPERATURE_MIN);
        }
        if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
            return Err(format!("top_p {} is not above 0 and at most 1", sampling.top_p));
        }
        if !(0.0..=1.0).contains(&sampling.min_p) {
            return Err(format!("min_p {} is not 0 to 1", sampling.min_p));
        }
        let prompt = request.prompt.len();
        let room = self.room(prompt);
        let wanted = request.max_new_tokens.map_or(1, |n| n.max(1)) as usize;
        if wanted > room {
            return Err(format!(
                "a prompt of {prompt} tokens and {wanted} new ones need K and V of {} tokens, but {}",
                prompt + wanted - 1,
                self.least()
            ));
        }
        request.max_new_tokens.get_or_insert(USUAL_NEW_TOKENS.min(room as u32));
        Ok(request)
    }

    /// The size that a long request meets first.
    pub fn least(&self) -> String {
        let Self { positions, pool, pages, page_size, .. } = *self;
        match pool < positions {
            true => format!("the pool holds {pool} ({pages} pages of {page_size})"),
            false => format!("the model has {positions} positions"),
        }
    }
}
