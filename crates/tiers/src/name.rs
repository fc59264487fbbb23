//! Names of records in stores.

use std::fmt;
use std::str::FromStr;

/// Identifies everything that gives bytes of K and V their meaning: see [`Identity`](crate::identity::Identity).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fingerprint(pub [u8; 32]);

/// Identifies a namespace. Zeros are the default namespace: see [`Space::of`](crate::name::Space::of).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Space(pub [u8; 16]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0[..8])
    }
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0[..8])
    }
}

/// The name of a record: `v1/<fingerprint>/<space>/<key 2>/<key 62>[.<group>]`, in hexadecimal digits.
///
/// A name contains 8 bytes of the fingerprint and of the space; the record contains all. Group 0 has no suffix.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// The first bytes of the fingerprint.
    pub fingerprint: [u8; 8],
    /// The first bytes of the space.
    pub space: [u8; 8],
    /// The hash of the last page of the record.
    pub key: [u8; 32],
    /// The group of layers.
    pub group: u16,
}

impl Name {
    /// Creates the name of a record.
    pub fn new(fingerprint: &Fingerprint, space: Space, key: [u8; 32], group: u16) -> Self {
        let short = |bytes: &[u8]| bytes[..8].try_into().expect("8 bytes");
        Self { fingerprint: short(&fingerprint.0), space: short(&space.0), key, group }
    }

    /// Returns the path of the folder that contains the record.
    pub fn folder(&self) -> String {
        let name = self.to_string();
        name[..FOLDER].to_owned()
    }

    /// Returns the name of the record in its folder.
    pub fn file(&self) -> String {
        let name = self.to_string();
        name[FOLDER + 1..].to_owned()
    }

    /// Returns the name with another separator than `/`.
    pub fn separated_by(&self, separator: &str) -> String {
        self.to_string().replace('/', separator)
    }
}

/// Length of `v1/<fingerprint>/<space>/<key 2>`.
const FOLDER: usize = 3 + 17 + 17 + 2;

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("v1/")?;
        write_hex(f, &self.fingerprint)?;
        f.write_str("/")?;
        write_hex(f, &self.space)?;
        f.write_str("/")?;
        write_hex(f, &self.key[..1])?;
        f.write_str("/")?;
        write_hex(f, &self.key[1..])?;
        if self.group > 0 { write!(f, ".{}", self.group) } else { Ok(()) }
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The error of a text that is no name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotAName;

impl fmt::Display for NotAName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not the name of a record")
    }
}

impl std::error::Error for NotAName {}

impl FromStr for Name {
    type Err = NotAName;

    /// Parses the form that `Display` writes, and no other.
    fn from_str(text: &str) -> Result<Self, NotAName> {
        let mut parts = text.split('/');
        let mut next = || parts.next().ok_or(NotAName);
        if next()? != "v1" {
            return Err(NotAName);
        }
        let (fingerprint, space) = (read_hex(next()?)?, read_hex(next()?)?);
        let ([first], rest) = (read_hex::<1>(next()?)?, next()?);
        let (rest, group) = match rest.split_once('.') {
            None => (rest, 0),
            Some((rest, group)) => (rest, group.parse().map_err(|_| NotAName)?),
        };
        let mut key = [first; 32];
        key[1..].copy_from_slice(&read_hex::<31>(rest)?);
        let name = Self { fingerprint, space, key, group };
        if name.to_string() == text { Ok(name) } else { Err(NotAName) }
    }
}

fn write_hex(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    // Formatting each byte takes longer than a look-up on a disk.
    let (mut digits, mut len) = ([0; 64], 0);
    for byte in bytes {
        for digit in [byte >> 4, byte & 15] {
            digits[len] = b"0123456789abcdef"[digit as usize];
            len += 1;
        }
    }
    f.write_str(str::from_utf8(&digits[..len]).expect("digits"))
}

/// Parses `2 * N` hexadecimal digits.
///
/// # Errors
/// [`NotAName`] for another number of digits, or other characters.
pub fn read_hex<const N: usize>(text: &str) -> Result<[u8; N], NotAName> {
    let mut bytes = [0; N];
    if text.len() != 2 * N || !text.bytes().all(|c| c.is_ascii_hexdigit()) {
        return Err(NotAName);
    }
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&text[at..at + 2], 16).map_err(|_| NotAName)?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_as_they_are_written() {
        let key = std::array::from_fn(|i| (i * 37) as u8);
        for group in [0, 1, 15, u16::MAX] {
            let name = Name::new(&Fingerprint([0xab; 32]), Space([1; 16]), key, group);
            let text = name.to_string();
            assert_eq!(text.parse(), Ok(name));
            assert_eq!(format!("{}/{}", name.folder(), name.file()), text);
            for cut in 0..text.len() {
                assert!(text[..cut].parse::<Name>() != Ok(name));
            }
            for wrong in ["/x", ".0", ".01", ".+1", "0"] {
                assert_eq!(format!("{text}{wrong}").parse::<Name>().ok().filter(|&other| other == name), None);
            }
            assert!(text.replace("v1", "v2").parse::<Name>().is_err());
            assert!(text.to_uppercase().parse::<Name>().is_err());
        }
        assert!("v1/../0000000000000000/00/00".parse::<Name>().is_err());
    }
}
