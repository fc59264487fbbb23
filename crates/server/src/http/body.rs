//! Typed look-ups in a request's JSON.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::api_error::ApiError;
use super::fields::{Field, Kind, Use};

/// Maximum number of bytes of a field that is read, except `prompt`, `messages` and `prediction`.
const FIELD_BYTES_MAX: usize = 1 << 20;

/// A request's JSON, reduced to the served fields.
#[derive(Debug)]
pub struct RequestBody<'a> {
    fields: Map<String, Value>,
    /// The prompt as raw JSON, because JSON values of lists of tokens would take many times the bytes.
    pub prompt: Option<&'a RawValue>,
}

impl<'a> RequestBody<'a> {
    /// Reads a request, and checks each field's name by the table.
    ///
    /// # Errors
    /// The body is not a JSON object, or a field is not in the table, unsupported or too long.
    pub fn read(bytes: &'a [u8], kind: Kind) -> Result<Self, ApiError> {
        let raw: BTreeMap<String, &RawValue> = serde_json::from_slice(bytes)
            .map_err(|e| ApiError::bad(format!("the body is not valid JSON, or no object: {e}")))?;
        let (mut fields, mut prompt) = (Map::new(), None);
        for (name, raw) in raw {
            let field = Field::find(&name, kind);
            let field =
                field.ok_or_else(|| ApiError::unsupported(&name, format!("{name} is not a field of this request")))?;
            if matches!(field.usage, Use::Harmless) || raw.get() == "null" {
                continue;
            }
            if name == "prompt" {
                prompt = Some(raw);
                continue;
            }
            let carries_text = ["messages", "prediction"].contains(&&name[..]);
            if raw.get().len() > FIELD_BYTES_MAX && !carries_text {
                let what = format!("{name}: {} bytes, of at most {FIELD_BYTES_MAX}", raw.get().len());
                return Err(ApiError::field(&name, what));
            }
            let value: Value =
                serde_json::from_str(raw.get()).map_err(|e| ApiError::bad(format!("{name}: not valid JSON: {e}")))?;
            match field.usage {
                Use::Refused(neutral) if !neutral.accepts(&value) => {
                    let what = format!("{name}: {} is not served here", brief(&value));
                    return Err(ApiError::unsupported(&name, what));
                }
                Use::Refused(_) | Use::Harmless => {}
                Use::Served => _ = fields.insert(name, value),
            }
        }
        Ok(Self { fields, prompt })
    }

    /// Returns the fields except the prompt.
    pub fn body(&self) -> Body<'_> {
        Body(&self.fields)
    }
}

/// A request's fields. Null counts as absent.
#[derive(Clone, Copy, Debug)]
pub struct Body<'a>(pub &'a Map<String, Value>);

impl<'a> Body<'a> {
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub fn all(&self) -> &'a Map<String, Value> {
        self.0
    }

    fn typed<T>(
        &self,
        name: &str,
        what: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let wrong = || ApiError::field(name, format!("{name}: {} is no {what}", brief(value)));
        read(value).map(Some).ok_or_else(wrong)
    }

    /// Returns a whole number; 1.0 is valid.
    pub fn whole<T: TryFrom<i64>>(&self, name: &str) -> Result<Option<T>, ApiError> {
        let exact = |x: f64| (x.fract() == 0.0 && x.abs() < 2_f64.powi(53)).then_some(x as i64);
        let read = |value: &Value| {
            let number = value.as_i64().or_else(|| value.as_f64().and_then(exact));
            number.and_then(|n| T::try_from(n).ok())
        };
        self.typed(name, "whole number in range", read)
    }

    pub fn number(&self, name: &str) -> Result<Option<f32>, ApiError> {
        self.typed(name, "number", |value| value.as_f64().map(|x| x as f32))
    }

    /// Returns a number from `least` to `most`.
    pub fn number_in(&self, name: &str, (least, most): (f32, f32)) -> Result<Option<f32>, ApiError> {
        match self.number(name)? {
            Some(number) if !(least..=most).contains(&number) => {
                Err(ApiError::field(name, format!("{name} {number} is not from {least} to {most}")))
            }
            number => Ok(number),
        }
    }

    /// Returns a flag; false if absent.
    pub fn flag(&self, name: &str) -> Result<bool, ApiError> {
        Ok(self.typed(name, "boolean", Value::as_bool)?.unwrap_or(false))
    }

    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.typed(name, "string", Value::as_str)
    }

    pub fn object(&self, name: &str) -> Result<Option<Body<'a>>, ApiError> {
        Ok(self.typed(name, "object", Value::as_object)?.map(Body))
    }

    pub fn list(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        self.typed(name, "list", |value| value.as_array().map(Vec::as_slice))
    }
}

/// Returns the beginning of a value, for messages.
pub fn brief(value: &Value) -> String {
    brief_json(&value.to_string())
}

/// Returns the beginning of a value's JSON.
pub fn brief_json(text: &str) -> String {
    const CHARS: usize = 60;
    match text.char_indices().nth(CHARS) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_owned(),
    }
}
