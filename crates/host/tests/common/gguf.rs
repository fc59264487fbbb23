//! Builds the header of a GGUF file.

/// Returns a text.
pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Returns a key, the number of a type, and a value.
pub fn pair(key: &str, kind: u32, value: impl AsRef<[u8]>) -> Vec<u8> {
    [&string(key), &kind.to_le_bytes()[..], value.as_ref()].concat()
}

/// Returns the description of a tensor: GGUF's dimensions, the number of a type, and the offset in the data.
pub fn tensor(name: &str, dims: &[u64], kind: u32, start: u64) -> Vec<u8> {
    let dims: Vec<u8> = dims.iter().flat_map(|dim| dim.to_le_bytes()).collect();
    let count = (dims.len() as u32 / 8).to_le_bytes();
    [&string(name), &count[..], &dims, &kind.to_le_bytes(), &start.to_le_bytes()].concat()
}

/// Returns a header with these counts.
pub fn whole(version: u32, tensors: u64, pairs: u64, body: &[Vec<u8>]) -> Vec<u8> {
    let counts = [tensors.to_le_bytes(), pairs.to_le_bytes()].concat();
    [b"GGUF", &version.to_le_bytes()[..], &counts, &body.concat()].concat()
}
