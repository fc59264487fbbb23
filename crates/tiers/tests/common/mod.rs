//! Records and random numbers for tests.
#![allow(dead_code, reason = "every test program uses a part")]

use kvarena::id::TokenId;
use kvarena_tiers::check::Secret;
use kvarena_tiers::name::{Fingerprint, Name, Space};
use kvarena_tiers::record::{BLOCK, Record};
use kvarena_tiers::store::{Buffers, Got, Store, StoreError};
use sha2::{Digest, Sha256};

pub const PAGE_SIZE: u32 = 16;

/// A record with its tokens and pages.
#[derive(Clone)]
pub struct Sample {
    pub group: u16,
    pub secret: Option<Secret>,
    pub tokens: Vec<TokenId>,
    pub parent: [u8; 32],
    pub key: [u8; 32],
    pub pages: Vec<Vec<u8>>,
}

impl Sample {
    pub fn record(&self) -> Record<'_> {
        Record {
            fingerprint: Fingerprint(Sha256::digest("model").into()),
            space: Space(Sha256::digest("")[..16].try_into().expect("16 bytes")),
            group: self.group,
            page_size: PAGE_SIZE,
            first: 1,
            pages: self.pages.len() as u32,
            page_bytes: self.pages[0].len() as u32,
            parent: Some(self.parent),
            key: self.key,
            tokens: &self.tokens,
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.record().write_head(&self.pages, self.secret.as_ref());
        for page in &self.pages {
            bytes.extend(page);
            bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        }
        bytes
    }
}

/// A record of one page of group 0, and a cell of three pages with a secret.
pub fn samples() -> [Sample; 2] {
    // SGLang's recipe: the hash of the page before, then the tokens.
    let hash = |before: &[u8], tokens: std::ops::Range<u32>| -> [u8; 32] {
        let mut hasher = Sha256::new();
        hasher.update(before);
        tokens.for_each(|token| hasher.update(token.to_le_bytes()));
        hasher.finalize().into()
    };
    let page = |i: usize, len: usize| (0..len).map(|j| ((i * 131 + j * 7) % 251) as u8).collect();
    let parent = hash(&[], 7..23);
    let tokens = (23..39).map(TokenId::new).collect();
    let one = Sample { group: 0, secret: None, tokens, parent, key: hash(&parent, 23..39), pages: vec![page(0, 6000)] };
    let secret = Some(Secret::new(Sha256::digest("secret").into()));
    let cell = Sample { group: 2, secret, pages: (0..3).map(|i| page(i, 4096)).collect(), ..one.clone() };
    [one, cell]
}

/// Reads a record of one page. Returns its head and its page as well.
pub fn get(store: &dyn Store, name: &Name, page_bytes: usize) -> Result<(Got, Vec<u8>, Vec<u8>), StoreError> {
    let (mut head, mut page) = (vec![0; BLOCK], vec![0; page_bytes]);
    let into = &mut Buffers { first: 0, of: 1, head: &mut head, pages: &mut [&mut page], seen: &mut |_| () };
    let got = store.get(name, into)?;
    Ok((got, head, page))
}

/// Returns a generator of pseudo-random numbers (xorshift64*).
pub fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}
