//! The header of a GGUF file (versions 2 and 3, little-endian): metadata, and the place of each tensor.
//!
//! Nothing in the file is trusted. A count or a length is compared with the rest of the file before it is used, and
//! memory grows only with the bytes that were read.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};

use serde_json::{Map, Value};

use super::quants::Quant;
use super::{MAGIC, Tensor};

/// Maximum bytes of a header. A vocabulary of 262,144 tokens takes about 8 MB.
const HEADER_MAX: u64 = 1 << 26;
/// Maximum elements of all lists together. Tokens, scores, types and merges of such a vocabulary are 1.3 million.
const ELEMENTS_MAX: u64 = 1 << 22;
/// Maximum dimensions of a tensor.
const DIMENSIONS_MAX: u32 = 4;

/// Metadata by key, and tensors by name.
pub(super) struct Header {
    pub metadata: Map<String, Value>,
    pub tensors: BTreeMap<String, Tensor>,
}

type Parsed<T> = std::result::Result<T, String>;

/// Reads the header of `file`.
///
/// # Errors
/// A sentence about the first fault.
pub(super) fn read(file: &File) -> Parsed<Header> {
    let size = file.metadata().map_err(|e| format!("cannot read the file: {e}"))?.len();
    let end = size.min(HEADER_MAX);
    let mut reader = Reader { input: BufReader::new(file), at: 0, end, elements: ELEMENTS_MAX };
    let magic: [u8; 4] = reader.array().map_err(|_| not_gguf(&[]))?;
    if magic != MAGIC {
        return Err(not_gguf(&magic));
    }
    match reader.u32()? {
        2 | 3 => {}
        version if matches!(version.swap_bytes(), 2 | 3) => {
            return Err("a big-endian GGUF file is not implemented".into());
        }
        version => {
            return Err(format!("version {version} of GGUF is not implemented, only 2 and 3"));
        }
    }
    let (tensor_count, pair_count) = (reader.u64()?, reader.u64()?);
    let mut metadata = Map::new();
    for _ in 0..pair_count {
        let key = reader.text()?;
        let kind = reader.u32()?;
        let value = reader.value(kind).map_err(|e| format!("{e}, in the metadata {key:?}"))?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(format!("damaged: the metadata {key:?} occurs twice"));
        }
    }
    let mut tensors = BTreeMap::new();
    for _ in 0..tensor_count {
        let name = reader.text()?;
        let tensor = reader.tensor().map_err(|e| format!("{e}, in the tensor {name:?}"))?;
        if tensors.insert(name.clone(), tensor).is_some() {
            return Err(format!("damaged: the tensor {name:?} occurs twice"));
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => 32,
        Some(value) => value
            .as_u64()
            .filter(|n| n.is_power_of_two() && *n <= 1 << 20)
            .ok_or_else(|| format!("general.alignment {value} is not a power of two up to 1,048,576"))?,
    };
    let data = reader.at.next_multiple_of(alignment);
    for (name, tensor) in &mut tensors {
        place(tensor, data, size).map_err(|e| format!("damaged or truncated: tensor {name} {e}"))?;
    }
    Ok(Header { metadata, tensors })
}

fn not_gguf(magic: &[u8]) -> String {
    format!("not a GGUF file: it begins with {:?}", String::from_utf8_lossy(magic))
}

/// Sets the offset of a tensor in the file. `data` is the offset of all tensors' data.
fn place(tensor: &mut Tensor, data: u64, size: u64) -> Parsed<()> {
    let (block, bytes) = tensor.quant.block();
    let row = tensor.shape.last().copied().unwrap_or(1);
    if !row.is_multiple_of(block) {
        return Err(format!("has rows of {row} elements, but {} needs {block}", tensor.quant));
    }
    let count = tensor.shape.iter().try_fold(1_u64, |n, &dim| n.checked_mul(dim as u64));
    let bytes = count.and_then(|count| (count / block as u64).checked_mul(bytes as u64));
    let start = data.checked_add(tensor.start);
    let end = start.zip(bytes).and_then(|(start, bytes)| start.checked_add(bytes));
    if end.is_none_or(|end| end > size) {
        return Err(format!("of shape {:?} exceeds the file of {size} bytes", tensor.shape));
    }
    tensor.start = start.expect("the end exists");
    Ok(())
}

struct Reader<R> {
    input: R,
    at: u64,
    /// Offset that no read may exceed.
    end: u64,
    /// Elements that lists may still have.
    elements: u64,
}

impl<R: Read> Reader<R> {
    /// Checks that `len` more bytes exist, and counts them as read.
    fn take(&mut self, len: u64) -> Parsed<()> {
        if len > self.end - self.at {
            let (at, end) = (self.at, self.end);
            return Err(format!("damaged or truncated: {len} bytes at {at} exceed the header's {end}"));
        }
        self.at += len;
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Parsed<[u8; N]> {
        self.take(N as u64)?;
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes).map_err(|e| format!("cannot read the file: {e}"))?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Parsed<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Parsed<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Parsed<String> {
        let len = self.u64()?;
        self.take(len)?;
        let mut bytes = vec![0; len as usize];
        self.input.read_exact(&mut bytes).map_err(|e| format!("cannot read the file: {e}"))?;
        String::from_utf8(bytes).map_err(|e| format!("damaged: a text is not UTF-8: {e}"))
    }

    /// Reads a value of the type with this number.
    fn value(&mut self, kind: u32) -> Parsed<Value> {
        Ok(match kind {
            0 => self.array().map(u8::from_le_bytes)?.into(),
            1 => self.array().map(i8::from_le_bytes)?.into(),
            2 => self.array().map(u16::from_le_bytes)?.into(),
            3 => self.array().map(i16::from_le_bytes)?.into(),
            4 => self.u32()?.into(),
            5 => self.array().map(i32::from_le_bytes)?.into(),
            6 => f64::from(self.array().map(f32::from_le_bytes)?).into(),
            7 => match self.array()? {
                [0] => false.into(),
                [1] => true.into(),
                [other] => return Err(format!("damaged: {other} is neither true nor false")),
            },
            8 => self.text()?.into(),
            9 => self.list()?,
            10 => self.u64()?.into(),
            11 => self.array().map(i64::from_le_bytes)?.into(),
            12 => self.array().map(f64::from_le_bytes)?.into(),
            other => return Err(format!("damaged: a value has the unknown type {other}")),
        })
    }

    fn list(&mut self) -> Parsed<Value> {
        let (kind, count) = (self.u32()?, self.u64()?);
        if kind == 9 {
            return Err("lists of lists are not implemented".into());
        }
        let left = self.elements.checked_sub(count);
        self.elements = left.ok_or_else(|| format!("damaged: lists of {count} and more elements"))?;
        let mut values = Vec::new();
        for _ in 0..count {
            values.push(self.value(kind)?);
        }
        Ok(values.into())
    }

    /// Reads the description of a tensor. Its place is still relative to the data.
    fn tensor(&mut self) -> Parsed<Tensor> {
        let dimensions = self.u32()?;
        if dimensions > DIMENSIONS_MAX {
            return Err(format!("damaged: {dimensions} dimensions are more than {DIMENSIONS_MAX}"));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.push(usize::try_from(self.u64()?).map_err(|e| format!("damaged: {e}"))?);
        }
        shape.reverse();
        let quant = Quant::new(self.u32()?)?;
        Ok(Tensor { shape, quant, start: self.u64()? })
    }
}
