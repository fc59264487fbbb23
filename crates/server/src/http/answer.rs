//! Answers in OpenAI's format: whole, or as a stream of chunks.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::api_error::ApiError;
use super::checked_request::CheckedRequest;
use super::choice::{Choice, Echo, GeneratedToken, Piece, Stops};
use super::fields::Kind;
use super::host::Host;
use super::job::{Event, Logprob};
use kvarena_host::stream::Finish;

/// An answer in progress.
pub struct Answer {
    host: Arc<Host>,
    kind: Kind,
    id: String,
    created: u64,
    choices: Vec<Choice>,
    /// Whether each choice has sent a chunk. The first chunk of a chat contains the role.
    begun: Vec<bool>,
    /// Whether each choice has received a token or its end. The chunk for the first of these events contains the echo.
    has_echoed: Vec<bool>,
    /// First choice and number of cached tokens of each prompt.
    prompts: Vec<(u32, u32)>,
    /// Checked and accepted drafts of each choice.
    drafts: Vec<[u32; 2]>,
    /// Whether the request has a prediction, so that usage contains the counts of drafts.
    has_prediction: bool,
    prompt_tokens: usize,
    include_usage: bool,
    logprobs: Option<u32>,
    /// Prompts, if the answer begins with them.
    echoes: Vec<Echo>,
    hides_new: bool,
}

impl Answer {
    /// Creates an answer to `checked`; its id ends in `number`.
    pub fn new(host: Arc<Host>, checked: &CheckedRequest, number: &str) -> Self {
        let prefix = if checked.kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (mut choices, mut prompts, mut echoes) = (Vec::new(), Vec::new(), Vec::new());
        for (request, (decoder, text)) in checked.requests.iter().zip(&checked.beginnings) {
            prompts.push((choices.len() as u32, 0));
            let min_tokens = request.shaping.as_ref().map_or(0, |shaping| shaping.rules().min_tokens);
            for _ in 0..request.samples {
                let number = choices.len() as u32;
                let (strings, tokens) = (checked.stop.clone(), request.stop.clone());
                let stops = Stops { strings, tokens, min_tokens };
                choices.push(Choice::new(number, stops, decoder.clone()));
            }
            if checked.echo {
                let tokens: Vec<u32> = request.prompt.iter().map(|token| token.raw()).collect();
                let scored = if request.scores_prompt { tokens.len() } else { 0 };
                let text = text.clone().unwrap_or_default();
                echoes.push(Echo { tokens, text, logprobs: vec![None; scored] });
            }
        }
        Self {
            echoes,
            hides_new: checked.hides_new,
            host,
            kind: checked.kind,
            id: format!("{prefix}-{number}"),
            created: since.as_secs(),
            begun: vec![false; choices.len()],
            has_echoed: vec![false; choices.len()],
            drafts: vec![[0; 2]; choices.len()],
            has_prediction: checked.requests.iter().any(|request| !request.prediction.is_empty()),
            choices,
            prompts,
            prompt_tokens: checked.requests.iter().map(|request| request.prompt.len()).sum(),
            include_usage: checked.include_usage,
            logprobs: checked.logprobs,
        }
    }

    /// Processes an event and returns the new chunk of the answer, if any.
    ///
    /// # Errors
    /// The engine failed.
    pub fn receive(&mut self, event: Event) -> Result<Option<Piece>, ApiError> {
        let host = Arc::clone(&self.host);
        let text = &host.text;
        match event {
            Event::Prompt { choice, position, logprob } => {
                let prompt = self.prompts.partition_point(|&(first, _)| first <= choice) - 1;
                self.echoes[prompt].logprobs[position as usize] = Some(logprob);
                Ok(None)
            }
            Event::Token { choice, token, cached, drafts, logprob } => {
                let echo = self.echo(choice);
                self.drafts[choice as usize] = drafts;
                if let Some(prompt) = self.prompts.iter_mut().find(|(first, _)| *first == choice) {
                    prompt.1 = cached;
                }
                let choice = &mut self.choices[choice as usize];
                let new = if self.hides_new { None } else { choice.token(text, token, logprob) };
                Ok(Piece::join(echo, new))
            }
            Event::Done { choice, finish } => {
                let echo = self.echo(choice);
                let finish = if self.hides_new && finish == Finish::Stop { Finish::Length } else { finish };
                Ok(Piece::join(echo, self.choices[choice as usize].done(text, finish)))
            }
            Event::Failed(what) => Err(ApiError::failed(what)),
        }
    }

    /// Returns the prompt as a chunk at the first event of a choice, if the answer begins with the prompt.
    fn echo(&mut self, choice: u32) -> Option<Piece> {
        let is_first = !std::mem::replace(&mut self.has_echoed[choice as usize], true);
        let prompt = self.prompts.partition_point(|&(first, _)| first <= choice) - 1;
        let echo = self.echoes.get(prompt).filter(|_| is_first)?;
        Some(self.choices[choice as usize].echo(echo))
    }

    /// Returns the cached tokens of the prompts, and the number of new tokens.
    pub fn counts(&self) -> (u32, u32) {
        let cached = self.prompts.iter().map(|(_, cached)| cached).sum();
        (cached, self.choices.iter().map(Choice::tokens).sum())
    }

    pub fn is_whole(&self) -> bool {
        self.choices.iter().all(Choice::is_done)
    }

    /// Returns whether a stream ends with the counts of tokens.
    pub fn includes_usage(&self) -> bool {
        self.include_usage
    }

    /// Returns an event of a stream: a chunk of a choice.
    pub fn chunk(&mut self, piece: Piece) -> Value {
        let begun = std::mem::replace(&mut self.begun[piece.choice as usize], true);
        let mut choice = json!({ "index": piece.choice });
        match self.kind {
            Kind::Completion => choice["text"] = piece.text.into(),
            Kind::Chat => {
                let mut delta = Map::new();
                if !begun {
                    delta.insert("role".into(), "assistant".into());
                }
                if !begun || !piece.text.is_empty() {
                    delta.insert("content".into(), piece.text.into());
                }
                choice["delta"] = delta.into();
            }
        }
        choice["logprobs"] = self.logprobs(&piece.tokens);
        choice["finish_reason"] = reason(piece.finish);
        let mut chunk = self.envelope(vec![choice], true);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    /// Returns the last event of a stream that includes the counts of tokens.
    pub fn usage_chunk(&self) -> Value {
        let mut chunk = self.envelope(Vec::new(), true);
        chunk["usage"] = self.usage();
        chunk
    }

    /// Returns the whole answer from all its chunks.
    pub fn whole(&self, pieces: Vec<Piece>) -> Value {
        let mut wholes = vec![Piece::default(); self.choices.len()];
        for mut piece in pieces {
            let whole = &mut wholes[piece.choice as usize];
            whole.text += &piece.text;
            whole.tokens.append(&mut piece.tokens);
            whole.finish = piece.finish;
        }
        let choice = |(index, whole): (usize, Piece)| {
            let mut choice = json!({ "index": index });
            match self.kind {
                Kind::Completion => choice["text"] = whole.text.into(),
                Kind::Chat => {
                    let content = whole.text;
                    choice["message"] = json!({ "role": "assistant", "content": content, "refusal": null });
                }
            }
            choice["logprobs"] = self.logprobs(&whole.tokens);
            choice["finish_reason"] = reason(whole.finish);
            choice
        };
        let choices = wholes.into_iter().enumerate().map(choice).collect();
        let mut answer = self.envelope(choices, false);
        answer["usage"] = self.usage();
        answer
    }

    fn envelope(&self, choices: Vec<Value>, is_chunk: bool) -> Value {
        let object = match (self.kind, is_chunk) {
            (Kind::Completion, _) => "text_completion",
            (Kind::Chat, false) => "chat.completion",
            (Kind::Chat, true) => "chat.completion.chunk",
        };
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.host.model,
            "choices": choices,
        })
    }

    fn usage(&self) -> Value {
        let (cached, tokens) = self.counts();
        let mut usage = json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens as usize,
            "prompt_tokens_details": { "cached_tokens": cached },
        });
        if self.has_prediction {
            let [drafted, accepted] = [0, 1].map(|i| self.drafts.iter().map(|d| d[i]).sum::<u32>());
            usage["completion_tokens_details"] = json!({
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            });
        }
        usage
    }

    /// Returns the text of a token at the place of `generated`.
    fn name(&self, token: u32, generated: &GeneratedToken) -> String {
        self.host.text.piece(token, generated.is_first)
    }

    fn logprobs(&self, tokens: &[GeneratedToken]) -> Value {
        match (self.logprobs, self.kind) {
            (None, _) => Value::Null,
            (Some(_), Kind::Completion) => self.completion_logprobs(tokens),
            (Some(_), Kind::Chat) => {
                let content: Vec<Value> = tokens.iter().map(|generated| self.chat_logprob(generated)).collect();
                json!({ "content": content, "refusal": null })
            }
        }
    }

    fn chat_logprob(&self, generated: &GeneratedToken) -> Value {
        let none = Logprob { own: 0.0, top: Vec::new() };
        let logprob = generated.logprob.as_ref().unwrap_or(&none);
        let entry = |token: u32, logprob: f32| {
            let text = self.name(token, generated);
            let bytes = self.host.text.part(token).unwrap_or_else(|| text.as_bytes().to_vec());
            json!({ "token": text, "logprob": logprob, "bytes": bytes })
        };
        let top: Vec<Value> = logprob.top.iter().map(|&(t, l)| entry(t, l)).collect();
        let mut own = entry(generated.token, logprob.own);
        own["top_logprobs"] = top.into();
        own
    }

    fn completion_logprobs(&self, tokens: &[GeneratedToken]) -> Value {
        // The map has one value for each text: that of its most likely token.
        let top = |generated: &GeneratedToken| -> Value {
            let Some(Logprob { own, top }) = &generated.logprob else { return Value::Null };
            let mut map = Map::new();
            for &(token, logprob) in top.iter().chain([&(generated.token, *own)]) {
                map.entry(self.name(token, generated)).or_insert(logprob.into());
            }
            map.into()
        };
        json!({
            "tokens": tokens.iter().map(|s| self.name(s.token, s)).collect::<Vec<_>>(),
            "token_logprobs": tokens.iter().map(|s| s.logprob.as_ref().map(|l| l.own)).collect::<Vec<_>>(),
            "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
            "text_offset": tokens.iter().map(|s| s.offset).collect::<Vec<_>>(),
        })
    }
}

fn reason(finish: Option<Finish>) -> Value {
    match finish {
        None => Value::Null,
        Some(Finish::Stop) => "stop".into(),
        Some(Finish::Length) => "length".into(),
        // The client has disconnected, so there is no reader.
        Some(Finish::Cancelled) => "cancelled".into(),
    }
}

#[cfg(test)]
mod tests;
