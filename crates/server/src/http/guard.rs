//! Access control: an API key, compared in constant time, and origins of browsers.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::Response;
use subtle::ConstantTimeEq;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::api_error::ApiError;
use super::options::Secret;
use kvarena_host::error::{Error, Result};

/// Maximum number of bytes of a key; the server rejects longer ones at start-up. This many bytes are compared for every
/// request.
pub const KEY_BYTES_MAX: usize = 512;

/// Answers 401 unless the request has the key.
pub async fn check(State(key): State<Secret>, request: Request, next: Next) -> Response {
    if has_key(&key, request.headers()) { next.run(request).await } else { ApiError::wrong_key().response() }
}

fn has_key(key: &Secret, headers: &HeaderMap) -> bool {
    let given = headers.get(header::AUTHORIZATION).map_or(&b""[..], HeaderValue::as_bytes);
    let given = given.strip_prefix(b"Bearer ").unwrap_or_default();
    let padded = |bytes: &[u8]| {
        let mut padded = [0; KEY_BYTES_MAX + 8];
        let len = bytes.len().min(KEY_BYTES_MAX);
        padded[..len].copy_from_slice(&bytes[..len]);
        padded[KEY_BYTES_MAX..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        padded
    };
    padded(given).ct_eq(&padded(key.bytes())).into()
}

/// Returns the CORS headers for pages of these origins.
///
/// # Errors
/// An origin is invalid.
pub fn cors(origins: &[String]) -> Result<CorsLayer> {
    let origin = |origin: &String| {
        let wrong = || Error::request(format!("--cors-origin {origin:?} is no origin"));
        origin.parse::<HeaderValue>().ok().filter(|_| origin.contains("://")).ok_or_else(wrong)
    };
    let allowed = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().map(origin).collect::<Result<Vec<_>>>()?)
    };
    let layer = CorsLayer::new().allow_origin(allowed).allow_methods([Method::GET, Method::POST]);
    Ok(layer.allow_headers(AllowHeaders::mirror_request()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_key_is_accepted() {
        let has = |given: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, given.parse().expect("a value"));
            has_key(&"sesame".into(), &headers)
        };
        assert!(has("Bearer sesame"));
        for wrong in ["Bearer sesam", "Bearer sesamee", "Bearer Sesame", "sesame", "Basic sesame", "Bearer ", ""] {
            assert!(!has(wrong), "{wrong:?}");
        }
        assert!(
            !has(&format!("Bearer sesame{}", "\t".repeat(600))),
            "a key with more bytes than are compared is wrong"
        );
        assert!(!has_key(&"sesame".into(), &HeaderMap::new()));
    }

    #[test]
    fn origins_have_a_scheme() {
        assert!(cors(&["https://a.example".into(), "http://localhost:3000".into()]).is_ok());
        assert!(cors(&["*".into()]).is_ok());
        assert!(cors(&["a.example".into()]).is_err());
    }
}
