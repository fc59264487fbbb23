//! The served model, and the limits and defaults against which requests are checked.

use std::hash::RandomState;

use kvarena_host::request::Defaults;
use kvarena_host::server::Limits;
use kvarena_host::text::Text;

use super::api_error::{ApiError, Result};
use super::body::Body;

/// Maximum number of prompts of one request, and of its choices over all prompts unless [`Host::samples_max`] is
/// larger.
pub const CHOICES_MAX: usize = 128;

/// The served model and its limits.
pub struct Host {
    /// Name for clients.
    pub model: String,
    /// Tokenizer and chat template of the model.
    pub text: Text,
    pub limits: Limits,
    pub defaults: Defaults,
    pub repetition: f32,
    /// Maximum number of choices of one prompt. A step draws the first tokens of all of them.
    pub samples_max: u32,
    pub keeps_logits: bool,
    /// Whether logits can be edited before the choice of tokens.
    pub edits_logits: bool,
    /// Hashes `cache_salt` to namespaces; its keys are random in each run.
    pub salts: RandomState,
}

impl Host {
    /// Checks that a request names this model.
    ///
    /// # Errors
    /// `model` is missing, is not a text, or names another model.
    pub fn check_model(&self, body: Body<'_>) -> Result<()> {
        match body.get("model") {
            Some(_) => self.check_model_if_named(body),
            None => Err(ApiError::field("model", "model is missing")),
        }
    }

    /// Checks that a request names this model or none.
    ///
    /// # Errors
    /// `model` is not a text, or names another model.
    pub fn check_model_if_named(&self, body: Body<'_>) -> Result<()> {
        match body.text("model")? {
            Some(name) if name != self.model => Err(ApiError::unknown_model(name)),
            _ => Ok(()),
        }
    }
}
