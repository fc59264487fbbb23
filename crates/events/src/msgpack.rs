//! Reads MessagePack value by value from untrusted bytes. After an error, [`Reader::at`] returns the offset of the
//! value that failed.

use std::fmt;

/// MessagePack value. Arrays and maps contain their length; their items follow as values.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Value<'a> {
    Nil,
    Bool(bool),
    Unsigned(u64),
    Negative(i64),
    Float(f64),
    Text(&'a str),
    Bytes(&'a [u8]),
    /// Array of this many values.
    Array(usize),
    /// Map of this many pairs of values.
    Map(usize),
    Extension,
}

impl Value<'_> {
    /// Returns the name of the type, for error messages.
    pub fn name(&self) -> &'static str {
        match self {
            Value::Nil => "nil",
            Value::Bool(_) => "a truth value",
            Value::Unsigned(_) | Value::Negative(_) => "a whole number",
            Value::Float(_) => "a number with a fraction",
            Value::Text(_) => "text",
            Value::Bytes(_) => "bytes",
            Value::Array(_) => "an array",
            Value::Map(_) => "a map",
            Value::Extension => "an extension",
        }
    }
}

/// Reason why bytes are not MessagePack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Malformed {
    /// The bytes end within a value.
    Short,
    /// No value begins with this byte.
    Marker(u8),
    /// Text is not UTF-8.
    Text,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short => write!(f, "the bytes end within a value"),
            Self::Marker(marker) => write!(f, "no value begins with {marker:#04x}"),
            Self::Text => write!(f, "text is not UTF-8"),
        }
    }
}

/// Cursor over MessagePack values.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// Creates a reader at the first byte.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Returns the offset of the next value.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Returns the number of unread bytes.
    pub fn rest(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let taken = self.bytes[self.at..].get(..len).ok_or(Malformed::Short)?;
        self.at += len;
        Ok(taken)
    }

    /// Reads a big-endian number of `len` bytes.
    fn number(&mut self, len: usize) -> Result<u64, Malformed> {
        Ok(self.take(len)?.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn text(&mut self, len: u64) -> Result<Value<'a>, Malformed> {
        let bytes = self.take(len as usize)?;
        std::str::from_utf8(bytes).map(Value::Text).map_err(|_| Malformed::Text)
    }

    fn extension(&mut self, len: u64) -> Result<Value<'a>, Malformed> {
        self.take(len as usize + 1).map(|_| Value::Extension)
    }

    /// Reads the next value. An error leaves the position unchanged.
    pub fn value(&mut self) -> Result<Value<'a>, Malformed> {
        let start = self.at;
        let value = self.any();
        if value.is_err() {
            self.at = start;
        }
        value
    }

    fn any(&mut self) -> Result<Value<'a>, Malformed> {
        let marker = self.take(1)?[0];
        let low = |mask: u8| u64::from(marker & mask);
        Ok(match marker {
            0x00..=0x7f => Value::Unsigned(marker.into()),
            0x80..=0x8f => Value::Map(low(0x0f) as usize),
            0x90..=0x9f => Value::Array(low(0x0f) as usize),
            0xa0..=0xbf => self.text(low(0x1f))?,
            0xc0 => Value::Nil,
            0xc1 => return Err(Malformed::Marker(marker)),
            0xc2 | 0xc3 => Value::Bool(marker == 0xc3),
            0xc4..=0xc6 => {
                let len = self.number(1 << (marker - 0xc4))?;
                Value::Bytes(self.take(len as usize)?)
            }
            0xc7..=0xc9 => {
                let len = self.number(1 << (marker - 0xc7))?;
                self.extension(len)?
            }
            0xca => Value::Float(f32::from_bits(self.number(4)? as u32).into()),
            0xcb => Value::Float(f64::from_bits(self.number(8)?)),
            0xcc..=0xcf => Value::Unsigned(self.number(1 << (marker - 0xcc))?),
            0xd0..=0xd3 => {
                let len = 1 << (marker - 0xd0);
                let shift = 64 - 8 * len as u32;
                let number = (self.number(len)? << shift).cast_signed() >> shift;
                u64::try_from(number).map_or(Value::Negative(number), Value::Unsigned)
            }
            0xd4..=0xd8 => self.extension(1 << (marker - 0xd4))?,
            0xd9..=0xdb => {
                let len = self.number(1 << (marker - 0xd9))?;
                self.text(len)?
            }
            0xdc | 0xdd => Value::Array(self.number(2 << (marker - 0xdc))? as usize),
            0xde | 0xdf => Value::Map(self.number(2 << (marker - 0xde))? as usize),
            0xe0..=0xff => Value::Negative(i64::from(marker.cast_signed())),
        })
    }

    /// Skips a value and the values that it contains.
    pub fn skip(&mut self) -> Result<(), Malformed> {
        // If a length is too large, `value` fails at the end of the bytes, which ends the loop.
        let mut left: u64 = 1;
        while left > 0 {
            left -= 1;
            left += match self.value()? {
                Value::Array(len) => len as u64,
                Value::Map(len) => 2 * len as u64,
                _ => 0,
            };
        }
        Ok(())
    }
}
