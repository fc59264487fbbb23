//! A tokenizer of single bytes, for tests of text and streaming: characters beyond ASCII take several tokens.

use serde_json::{Value, json};

/// Returns `tokenizer.json` with a token for each byte below `tokens`.
pub fn byte_tokenizer(tokens: u32) -> Value {
    let vocab: serde_json::Map<String, Value> = (0..tokens).map(|id| (format!("<0x{id:02X}>"), json!(id))).collect();
    json!({
        "version": "1.0",
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": { "type": "ByteFallback" },
        "model": { "type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true, "unk_token": null },
    })
}
