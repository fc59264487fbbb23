//! The limits of requests: the sizes of the model and of the pool.

use kvarena::config::EngineShape;

use crate::config::ModelConfig;
use crate::request::Request;

/// New tokens of a request that sets no number.
const USUAL_NEW_TOKENS: u32 = 128;
/// Minimum temperature above 0, as in vLLM. [`Limits::check`] raises lower temperatures to this one, because a draw's
/// noise is too small next to the large quotients of a lower temperature.
const TEMPERATURE_MIN: f32 = 0.01;

/// The sizes that limit requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Positions of the model.
    pub positions: usize,
    /// Maximum number of tokens of one sequence in the pool.
    pub pool: usize,
    /// Shape of the pool.
    pub shape: EngineShape,
}

/// Returns the maximum number of tokens of a sequence that runs alone in the pool. O(log of the tokens).
pub fn longest(shape: &EngineShape) -> u32 {
    let (mut fits, mut above) = (0, shape.max_sequence_len + 1);
    while above - fits > 1 {
        let middle = fits + (above - fits) / 2;
        let has_pages = shape.most_pages(middle) <= shape.layout.page_count().into();
        (fits, above) = if has_pages { (middle, above) } else { (fits, middle) };
    }
    fits
}

impl Limits {
    /// Returns the limits of a model and a pool.
    pub fn new(model: &ModelConfig, shape: &EngineShape) -> Self {
        let (vocab, positions) = (model.vocab, model.max_len);
        Self { vocab, positions, pool: longest(shape) as usize, shape: *shape }
    }

    /// Returns the maximum number of new tokens after a prompt of this length. The last new token is never an input, so
    /// it needs no K and V.
    pub fn room(&self, prompt: usize) -> usize {
        (self.positions.min(self.pool) + 1).saturating_sub(prompt)
    }

    /// Returns the maximum number of tokens of a prompt.
    pub fn longest_prompt(&self) -> usize {
        self.room(0).saturating_sub(1)
    }

    /// Returns the request with its final number of new tokens if it can be served. Raises a too low temperature, and
    /// removes stop tokens beyond the vocabulary, because they never occur.
    ///
    /// # Errors
    /// An empty prompt, a token of the prompt or prediction beyond the vocabulary, no samples, invalid sampling
    /// parameters, or more tokens than the model's positions or the pool allow.
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
                self.least(prompt + wanted - 1)
            ));
        }
        request.max_new_tokens.get_or_insert(USUAL_NEW_TOKENS.min(room as u32));
        Ok(request)
    }

    /// Describes the size that a sequence of so many tokens exceeds first.
    pub fn least(&self, tokens: usize) -> String {
        let Self { positions, pool, shape, .. } = self;
        if pool >= positions {
            return format!("the model has {positions} positions");
        }
        let (pages, page_size) = (shape.layout.page_count(), shape.layout.page_size());
        if shape.layout.groups().count() == 1 {
            return format!("the pool holds {pool} ({pages} pages of {page_size})");
        }
        let sequence = if tokens == 1 { "1 token takes" } else { &format!("{tokens} tokens take") };
        let needed = shape.most_pages(u32::try_from(tokens).unwrap_or(u32::MAX));
        format!(
            "the pool holds {pool}: {sequence} up to {needed} pages of {page_size}, because each group of layers takes \
             pages of its own, and it has {pages} (--pages)"
        )
    }
}
