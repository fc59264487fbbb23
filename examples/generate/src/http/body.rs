//! Typed look-ups in a request's JSON.

use serde_json::{Map, Value};

use super::refusal::Refusal;

/// A request's fields. A field that is null is not there.
#[derive(Clone, Copy, Debug)]
pub struct Body<'a>(&'a Map<String, Value>);

impl<'a> Body<'a> {
    /// The fields of an object.
    pub fn new(value: &'a Value) -> Result<Self, Refusal> {
        let object = value.as_object();
        object.map(Self).ok_or_else(|| Refusal::bad("the body is no JSON object"))
    }

    /// A field.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        name: &str,
        what: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Refusal> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let wrong = || Refusal::field(name, format!("{name}: {} is no {what}", brief(value)));
        read(value).map(Some).ok_or_else(wrong)
    }

    /// A whole number.
    pub fn whole<T: TryFrom<i64>>(&self, name: &str) -> Result<Option<T>, Refusal> {
        let read = |value: &Value| value.as_i64().and_then(|n| T::try_from(n).ok());
        self.typed(name, "whole number in range", read)
    }

    /// A number.
    pub fn number(&self, name: &str) -> Result<Option<f32>, Refusal> {
        self.typed(name, "number", |value| value.as_f64().map(|x| x as f32))
    }

    /// True or false.
    pub fn flag(&self, name: &str) -> Result<bool, Refusal> {
        Ok(self.typed(name, "boolean", Value::as_bool)?.unwrap_or(false))
    }

    /// A text.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, Refusal> {
        self.typed(name, "string", Value::as_str)
    }

    /// An object.
    pub fn object(&self, name: &str) -> Result<Option<Body<'a>>, Refusal> {
        Ok(self.typed(name, "object", Value::as_object)?.map(Body))
    }

    /// A list.
    pub fn list(&self, name: &str) -> Result<Option<&'a [Value]>, Refusal> {
        self.typed(name, "list", |value| value.as_array().map(Vec::as_slice))
    }

    /// Refuses a field that would ask for something, which is not served.
    pub fn refuse(&self, name: &str, asks: impl FnOnce(&Value) -> bool) -> Result<(), Refusal> {
        match self.get(name).filter(|value| asks(value)) {
            Some(value) => {
                let message = format!("{name}: {} is not served here", brief(value));
                Err(Refusal {
                    code: Some("unsupported_parameter"),
                    ..Refusal::field(name, message)
                })
            }
            None => Ok(()),
        }
    }
}

/// The beginning of a value, for messages.
pub fn brief(value: &Value) -> String {
    const CHARS: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(CHARS) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text,
    }
}
