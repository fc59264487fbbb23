//! Formats lists and dictionaries as Python does.

use minijinja::value::ValueKind;
use minijinja::{Output, State, Value};

use super::{Rendering, python_float};

/// Formats a printed value: lists and dictionaries like Python's `repr`, other values like minijinja.
pub(super) fn format(out: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Rendering<()> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => minijinja::escape_formatter(out, state, &string(value)?.into()),
        _ => minijinja::escape_formatter(out, state, value),
    }
}

/// Returns a value as text: lists and dictionaries like Python's `repr`, other values like minijinja.
pub(super) fn string(value: &Value) -> Rendering<String> {
    let mut out = String::new();
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => write(value, &mut out)?,
        _ => out.push_str(&value.to_string()),
    }
    Ok(out)
}

fn write(value: &Value, out: &mut String) -> Rendering<()> {
    match value.kind() {
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write(&key, out)?;
                out.push_str(": ");
                write(&value.get_item(&key)?, out)?;
            }
            out.push('}');
        }
        ValueKind::Seq => {
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write(&item, out)?;
            }
            out.push(']');
        }
        ValueKind::String => text(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => {
            out.push_str(&python_float(f64::try_from(value.clone())?));
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// Quotes a text with `'`, or with `"` if the text contains `'` but no `"`.
fn text(text: &str, out: &mut String) {
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
