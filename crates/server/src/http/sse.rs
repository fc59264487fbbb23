//! Server-sent events: the framing of a stream of JSON values.

use serde_json::Value;

/// The last event of a successful stream.
pub const DONE: &str = "data: [DONE]\n\n";

/// Returns an event with a value. JSON on one line contains no line breaks, which would end the event.
pub fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_event_is_one_line_and_an_empty_one() {
        let framed = event(&json!({ "text": "two\nlines\r\nand data: \u{2028}" }));
        let data = framed.strip_prefix("data: ").and_then(|rest| rest.strip_suffix("\n\n"));
        let data = data.expect("a field and the end of the event");
        assert!(!data.contains(['\n', '\r']));
        let value: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(value["text"], "two\nlines\r\nand data: \u{2028}");
        assert_eq!(DONE, "data: [DONE]\n\n");
    }
}
