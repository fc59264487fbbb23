//! Text forms of values: those of Python's `json.dumps` and `repr`.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value};

use super::Rendering;

/// Formats a printed value: lists and dictionaries like Python's `repr`, other values like minijinja.
pub(super) fn print(out: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Rendering<()> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => minijinja::escape_formatter(out, state, &string(value)?.into()),
        _ => minijinja::escape_formatter(out, state, value),
    }
}

/// Returns a value as text, in the form of [`print`].
pub(super) fn string(value: &Value) -> Rendering<String> {
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        return Ok(value.to_string());
    }
    let (between, colon) = (", ".to_owned(), ": ".to_owned());
    let form = Form { is_repr: true, indent: None, between, colon, ascii: false, sorted: false };
    let mut out = String::new();
    form.write(value, 0, &mut out)?;
    Ok(out)
}

/// Returns JSON as Python's `json.dumps` writes it, but escapes characters beyond ASCII only on request. By default a
/// space follows `,` and `:`. There are no HTML escapes.
pub(super) fn tojson(value: &Value, kwargs: Kwargs) -> Rendering<Value> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let separators: Option<(String, String)> = match kwargs.get::<Option<Value>>("separators")? {
        Some(pair) if !pair.is_none() => {
            let part = |at: usize| Ok::<_, Error>(pair.get_item_by_index(at)?.to_string());
            Some((part(0)?, part(1)?))
        }
        _ => None,
    };
    let between = if indent.is_some() { "," } else { ", " };
    let (between, colon) = separators.unwrap_or((between.to_owned(), ": ".to_owned()));
    let flag = |name: &str| Ok::<_, Error>(kwargs.get::<Option<bool>>(name)? == Some(true));
    let (ascii, sorted) = (flag("ensure_ascii")?, flag("sort_keys")?);
    kwargs.assert_all_used()?;
    let mut out = String::new();
    Form { is_repr: false, indent, between, colon, ascii, sorted }.write(value, 0, &mut out)?;
    Ok(Value::from_safe_string(out))
}

/// A form, with arguments of Python's `json.dumps`.
struct Form {
    /// Whether this is `repr`'s form, not JSON.
    is_repr: bool,
    indent: Option<usize>,
    between: String,
    colon: String,
    /// Whether characters beyond ASCII, and DEL, are escaped.
    ascii: bool,
    /// Whether keys are sorted.
    sorted: bool,
}

impl Form {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Rendering<()> {
        match value.kind() {
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.items(('{', '}'), &keys, depth, out, |key, out| {
                    if self.is_repr {
                        self.write(key, depth + 1, out)?;
                    } else {
                        self.json_text(&key.to_string(), out);
                    }
                    out.push_str(&self.colon);
                    self.write(&value.get_item(key)?, depth + 1, out)
                })?;
            }
            ValueKind::Iterable if self.is_repr => out.push_str(&value.to_string()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.items(('[', ']'), &items, depth, out, |item, out| self.write(item, depth + 1, out))?;
            }
            ValueKind::String if self.is_repr => repr_text(value.as_str().unwrap_or_default(), out),
            ValueKind::String => self.json_text(value.as_str().unwrap_or_default(), out),
            ValueKind::Number if !value.is_integer() => out.push_str(&float(f64::try_from(value.clone())?)),
            _ if self.is_repr => out.push_str(&value.to_string()),
            _ => {
                let plain = serde_json::to_string(value);
                out.push_str(&plain.map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?);
            }
        }
        Ok(())
    }

    fn items(
        &self,
        (open, close): (char, char),
        items: &[Value],
        depth: usize,
        out: &mut String,
        mut item: impl FnMut(&Value, &mut String) -> Rendering<()>,
    ) -> Rendering<()> {
        let line = |depth: usize| self.indent.map_or(String::new(), |width| format!("\n{}", " ".repeat(width * depth)));
        out.push(open);
        for (i, value) in items.iter().enumerate() {
            out.push_str(if i > 0 { &self.between } else { "" });
            out.push_str(&line(depth + 1));
            item(value, out)?;
        }
        if !items.is_empty() {
            out.push_str(&line(depth));
        }
        out.push(close);
        Ok(())
    }

    fn json_text(&self, text: &str, out: &mut String) {
        let quoted = serde_json::Value::from(text).to_string();
        for character in quoted.chars() {
            if self.ascii && (!character.is_ascii() || character == '\u{7f}') {
                let mut units = [0; 2];
                let units = character.encode_utf16(&mut units);
                units.iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
            } else {
                out.push(character);
            }
        }
    }
}

/// Returns a number as Python's `json.dumps` writes it: with the fewest digits that identify the number, and with an
/// exponent if its magnitude is at least 1e16 or below 1e-4.
fn float(number: f64) -> String {
    if !number.is_finite() {
        let sign = if number < 0.0 { "-" } else { "" };
        return if number.is_nan() { "NaN".to_owned() } else { format!("{sign}Infinity") };
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').expect("the form has an exponent");
    let exponent: i32 = exponent.parse().expect("a number");
    match exponent {
        -4..16 => format!("{number:?}"),
        _ => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

/// Quotes a text with `'`, or with `"` if the text contains `'` but no `"`.
fn repr_text(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\0'..' ' | '\x7f'..='\u{a0}' | '\u{ad}' => {
                out.push_str(&format!("\\x{:02x}", u32::from(character)));
            }
            _ => {
                out.push_str(if character == '\\' || character == quote { "\\" } else { "" });
                out.push(character);
            }
        }
    }
    out.push(quote);
}
