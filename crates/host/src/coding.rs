//! The bytes that a token stands for, if its text depends on its neighbours.
//!
//! Most tokens are whole texts. A token of a byte-level tokenizer is a sequence of bytes, which may end inside a
//! character. Tokenizers with byte fallback have a token for each byte; they decode a run of such tokens together.

use tokenizers::{DecoderWrapper, Tokenizer};

/// The way in which a tokenizer's tokens contain bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Coding {
    /// Each token is a text.
    #[default]
    Texts,
    /// Some tokens are bytes, which a decoder joins before it splits them into characters.
    Fallback,
    /// Each token is a sequence of bytes, written in GPT-2's alphabet.
    Bytes,
    /// As `Bytes`, but other decoders change the text.
    Changed,
}

/// The contents of a token.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Contents {
    /// A text. No later token changes it.
    Text,
    /// Bytes whose text does not depend on earlier characters.
    Bytes(Vec<u8>),
    /// Bytes whose text depends on all bytes up to the next `Text`.
    Part(Vec<u8>),
}

impl Coding {
    /// Returns the coding of a tokenizer.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        tokenizer.get_decoder().map_or(Self::Texts, Self::from_decoder)
    }

    fn from_decoder(decoder: &DecoderWrapper) -> Self {
        let DecoderWrapper::Sequence(parts) = decoder else {
            return match decoder {
                DecoderWrapper::ByteLevel(_) => Self::Bytes,
                DecoderWrapper::ByteFallback(_) => Self::Fallback,
                _ => Self::Texts,
            };
        };
        let parts = parts.get_decoders();
        let mut others = parts.iter().filter(|part| !matches!(part, DecoderWrapper::Fuse(_)));
        let mut kinds = parts.iter().map(Self::from_decoder);
        match kinds.find(|kind| *kind != Self::Texts) {
            Some(Self::Bytes) if others.nth(1).is_some() => Self::Changed,
            kind => kind.unwrap_or_default(),
        }
    }

    /// Returns the contents of a token by its name in the vocabulary.
    pub fn contents(self, name: &str) -> Contents {
        match self {
            Self::Texts => Contents::Text,
            Self::Fallback => byte(name).map_or(Contents::Text, |byte| Contents::Part(vec![byte])),
            Self::Bytes => Contents::Bytes(bytes(name)),
            Self::Changed => match String::from_utf8(bytes(name)) {
                Ok(_) => Contents::Text,
                Err(error) => Contents::Part(error.into_bytes()),
            },
        }
    }
}

/// Returns the byte of a name such as `<0x0A>`.
fn byte(name: &str) -> Option<u8> {
    let digits = name.strip_prefix("<0x")?.strip_suffix('>').filter(|digits| digits.len() == 2)?;
    u8::from_str_radix(digits, 16).ok()
}

/// Returns the bytes of a name in GPT-2's alphabet. A name with another letter is the text itself.
fn bytes(name: &str) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = name.chars().map(letter).collect();
    bytes.unwrap_or_else(|| name.into())
}

/// Returns the byte of a letter. Printable characters of Latin-1 stand for themselves; the letters from 256 on stand
/// for the other bytes, in their order.
fn letter(letter: char) -> Option<u8> {
    match letter {
        '!'..='~' | '\u{A1}'..='\u{AC}' | '\u{AE}'..='\u{FF}' => Some(letter as u8),
        '\u{100}'..='\u{120}' => Some((letter as u32 - 0x100) as u8),
        '\u{121}'..='\u{142}' => Some((letter as u32 - 0x121) as u8 + 0x7F),
        '\u{143}' => Some(0xAD),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_has_a_letter() {
        let mut alphabet: Vec<u8> = ('\0'..'\u{200}').filter_map(letter).collect();
        assert_eq!((letter('A'), letter('\u{120}'), letter('\u{10A}')), (Some(b'A'), Some(b' '), Some(b'\n')));
        alphabet.sort_unstable();
        assert_eq!(alphabet, (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn names_of_bytes() {
        assert_eq!(byte("<0xE2>"), Some(0xE2));
        for name in ["<0xE>", "<0xE2", "0xE2>", "<0xGG>", "<0xE20>", "<0x\u{e9}>"] {
            assert_eq!(byte(name), None, "{name}");
        }
    }
}
