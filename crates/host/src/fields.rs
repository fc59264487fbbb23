//! Typed look-ups in the JSON of a model directory.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Maximum of a size. Real models have no larger sizes, so a larger one shows that the config is damaged.
const SIZE_MAX: usize = 1 << 24;

/// Typed look-ups in a JSON object. Null counts as absent, as in Transformers. A value of another kind is an error,
/// which names the file, the field and the value.
pub struct Fields<'a> {
    path: &'a Path,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Returns the fields of `value`.
    ///
    /// # Errors
    /// The value is not an object.
    pub fn new(path: &'a Path, value: &'a Value) -> Result<Self> {
        match value.as_object() {
            Some(map) => Ok(Self { path, map }),
            None => Err(Error::model(format!("{}: not a JSON object", path.display()))),
        }
    }

    /// Returns the fields of the object `name`, if present.
    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields { path: self.path, map })),
            Some(other) => Err(self.unfit(name, other, "an object")),
        }
    }

    /// Returns an error about this file.
    pub fn wrong(&self, what: &str) -> Error {
        Error::model(format!("{}: {what}", self.path.display()))
    }

    /// Returns a field, if it is present and not null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// Returns a text, if present.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.unfit(name, value, "a text"))
    }

    /// Returns a size from 1 to 2^24. A missing field is an error.
    pub fn size(&self, name: &str) -> Result<usize> {
        let value = self.get(name).ok_or_else(|| self.wrong(&format!("{name} is missing")))?;
        match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) if (1..=SIZE_MAX).contains(&n) => Ok(n),
            _ => Err(self.unfit(name, value, "a whole number from 1 to 16,777,216")),
        }
    }

    /// Returns a size from 1 to 2^24, or a default.
    pub fn size_or(&self, name: &str, default: usize) -> Result<usize> {
        if self.get(name).is_some() { self.size(name) } else { Ok(default) }
    }

    /// Returns a size from 0 to 2^24, or a default.
    pub fn count_or(&self, name: &str, default: usize) -> Result<usize> {
        let none = self.get(name).and_then(Value::as_u64) == Some(0);
        if none { Ok(0) } else { self.size_or(name, default) }
    }

    /// Returns a finite number. A missing field is an error.
    pub fn number(&self, name: &str) -> Result<f64> {
        let value = self.get(name).ok_or_else(|| self.wrong(&format!("{name} is missing")))?;
        value.as_f64().filter(|x| x.is_finite()).ok_or_else(|| self.unfit(name, value, "a number"))
    }

    /// Returns a finite number, or a default.
    pub fn number_or(&self, name: &str, default: f64) -> Result<f64> {
        if self.get(name).is_some() { self.number(name) } else { Ok(default) }
    }

    /// Returns a flag, or a default.
    pub fn flag_or(&self, name: &str, default: bool) -> Result<bool> {
        let Some(value) = self.get(name) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.unfit(name, value, "true or false"))
    }

    /// Returns a flag; false if absent.
    pub fn flag(&self, name: &str) -> Result<bool> {
        self.flag_or(name, false)
    }

    /// Returns the ids of a field that contains one token id or a list of them. Returns no ids if it is absent.
    pub fn tokens(&self, name: &str) -> Result<Vec<u32>> {
        let Some(value) = self.get(name) else { return Ok(Vec::new()) };
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let ids = list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
        ids.collect::<Option<_>>().ok_or_else(|| self.unfit(name, value, "a token id or a list of them"))
    }

    fn unfit(&self, name: &str, value: &Value, wanted: &str) -> Error {
        let mut shown = value.to_string();
        if shown.len() > 80 {
            shown = "its value".into();
        }
        self.wrong(&format!("{name}: {shown} is not {wanted}"))
    }
}

/// Returns whether a value is neither false nor the whole number 0.
pub(crate) fn is_set(value: &Value) -> bool {
    value != &Value::Bool(false) && value.as_u64() != Some(0)
}
