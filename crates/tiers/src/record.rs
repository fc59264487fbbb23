//! Record format v1: pages of one group at consecutive places, with everything that a reader must compare.
//!
//! All numbers are little-endian; big-endian machines cannot build the crate, because pages have the machine's order.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | `KVARENA\0` |
//! | 8 | 2 | version, 1 |
//! | 10 | 2 | group of layers |
//! | 12 | 4 | flags: bit 0 is set if the checks are keyed; others are 0 |
//! | 16 | 4 | tokens of a page |
//! | 20 | 4 | first place: the number of pages of the prompt before the record |
//! | 24 | 4 | places |
//! | 28 | 4 | pages: one for each place and track |
//! | 32 | 4 | bytes of a page |
//! | 36 | 4 | stride: bytes of a page, rounded up to 4,096 |
//! | 40 | 8 | 0 |
//! | 48 | 32 | [`Fingerprint`] |
//! | 80 | 16 | [`Space`] |
//! | 96 | 32 | hash of the page before the first place; zeros at place 0 |
//! | 128 | 32 | key: hash of the last page |
//! | 160 | 16 | zeros |
//! | 176 | 16 | check of bytes 0 to 176, all page checks and the tokens |
//! | 192 | 16 each | check of each page, without its padding |
//! | | 4 each | tokens of the places |
//! | | | zeros, to a multiple of 4,096: the end of the head |
//! | | stride each | the pages, each followed by zeros to the stride |
//!
//! A check is 16 bytes of XXH3-128 in canonical form, or of BLAKE3 with the host's [`Secret`]. The header's check
//! covers the page checks, so a reader may take some of the pages.

use kvarena::id::TokenId;

use crate::check::{CHECK_BYTES, Checker, Secret, check};
use crate::miss::Miss;
use crate::name::{Fingerprint, Name, Space};

#[cfg(target_endian = "big")]
compile_error!("records have the order of bytes of little-endian machines");

/// The head and every page begin at multiples of this number of bytes.
pub const BLOCK: usize = 4096;
/// Bytes of the header.
pub const HEADER: usize = 192;
/// Offset of the header's check.
const CHECK_AT: usize = HEADER - CHECK_BYTES;
const MAGIC: &[u8; 8] = b"KVARENA\0";
const VERSION: u16 = 1;
const KEYED: u32 = 1;

/// A record without its pages: what a writer describes, and a reader requires.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// The model's fingerprint.
    pub fingerprint: Fingerprint,
    /// The namespace.
    pub space: Space,
    /// The group of layers.
    pub group: u16,
    /// Tokens of a page.
    pub page_size: u32,
    /// The place of the first page.
    pub first: u32,
    /// Number of pages.
    pub pages: u32,
    /// Bytes of a page.
    pub page_bytes: u32,
    /// Hash of the page before the first one, if there is one.
    pub parent: Option<[u8; 32]>,
    /// Hash of the last page.
    pub key: [u8; 32],
    /// Tokens of the places.
    pub tokens: &'a [TokenId],
}

impl Record<'_> {
    /// Returns the record's name.
    pub fn name(&self) -> Name {
        Name::new(&self.fingerprint, self.space, self.key, self.group)
    }

    /// Returns the number of bytes of the head.
    pub fn head_bytes(&self) -> usize {
        (HEADER + CHECK_BYTES * self.pages as usize + 4 * self.tokens.len()).next_multiple_of(BLOCK)
    }

    /// Returns the number of bytes of the whole record.
    pub fn bytes(&self) -> u64 {
        self.head_bytes() as u64 + u64::from(self.pages) * (self.page_bytes as usize).next_multiple_of(BLOCK) as u64
    }

    /// Writes the head of a record with these pages. O(bytes).
    ///
    /// # Panics
    /// If the number or length of the pages or the number of tokens differs from the fields.
    pub fn write_head(&self, pages: &[impl AsRef<[u8]>], secret: Option<&Secret>) -> Vec<u8> {
        let page_bytes = self.page_bytes as usize;
        assert!(pages.len() == self.pages as usize && pages.iter().all(|page| page.as_ref().len() == page_bytes));
        assert!(self.tokens.len().is_multiple_of(self.page_size as usize) && !self.tokens.is_empty());
        let mut head = vec![0; self.head_bytes()];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            head[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(MAGIC);
        put(&VERSION.to_le_bytes());
        put(&self.group.to_le_bytes());
        let places = self.tokens.len() as u32 / self.page_size;
        let stride = self.page_bytes.next_multiple_of(BLOCK as u32);
        let flags = if secret.is_some() { KEYED } else { 0 };
        [flags, self.page_size, self.first, places, self.pages, self.page_bytes, stride, 0, 0]
            .iter()
            .for_each(|number| put(&number.to_le_bytes()));
        put(&self.fingerprint.0);
        put(&self.space.0);
        put(&self.parent.unwrap_or_default());
        put(&self.key);
        put(&[0; 32]);
        pages.iter().for_each(|page| put(&check(&[page.as_ref()], secret)));
        self.tokens.iter().for_each(|token| put(&token.raw().to_le_bytes()));
        let checked = check(&[&head[..CHECK_AT], &head[HEADER..self.checked_end()]], secret);
        head[CHECK_AT..HEADER].copy_from_slice(&checked);
        head
    }

    /// Checks that a stored head is the head of this record.
    ///
    /// # Errors
    /// The first difference; damage is found before differences of intact heads.
    pub fn check_head(&self, head: &[u8], secret: Option<&Secret>) -> Result<(), Miss> {
        let header = Header::read(head)?;
        header.check(head, secret)?;
        let places = self.tokens.len() as u32 / self.page_size;
        let sizes = (self.page_size, places, self.pages, self.page_bytes);
        let comparisons = [
            (header.fingerprint == self.fingerprint, Miss::Fingerprint),
            (header.space == self.space, Miss::Space),
            (header.group == self.group, Miss::Group),
            ((header.page_size, header.places, header.pages, header.page_bytes) == sizes, Miss::Sizes),
            (header.first == self.first, Miss::Place),
            (header.parent == self.parent.unwrap_or_default(), Miss::Parent),
            (header.key == self.key, Miss::Key),
        ];
        if let Some(&(_, miss)) = comparisons.iter().find(|(equal, _)| !equal) {
            return Err(miss);
        }
        let tokens = &head[self.checked_end() - 4 * self.tokens.len()..self.checked_end()];
        let equal = tokens.chunks_exact(4).zip(self.tokens).all(|(bytes, token)| *bytes == token.raw().to_le_bytes());
        if equal { Ok(()) } else { Err(Miss::Tokens) }
    }

    /// Returns the end of the tokens.
    fn checked_end(&self) -> usize {
        HEADER + CHECK_BYTES * self.pages as usize + 4 * self.tokens.len()
    }
}

/// Checks a page against a head that [`Record::check_head`] or [`Header::check`] has accepted.
///
/// # Errors
/// [`Miss::PageCheck`].
pub fn check_page(head: &[u8], index: usize, page: &[u8], secret: Option<&Secret>) -> Result<(), Miss> {
    let at = HEADER + CHECK_BYTES * index;
    let stored = head.get(at..at + CHECK_BYTES).ok_or(Miss::PageCheck)?;
    if stored == check(&[page], secret) { Ok(()) } else { Err(Miss::PageCheck) }
}

/// Checks of consecutive pages that arrive in pieces, as [`Store::get`](crate::store::Store::get) reads them.
pub struct PageChecks<'a> {
    secret: Option<&'a Secret>,
    page_bytes: usize,
    /// The check of the present page, and the number of its bytes so far.
    page: Option<(Checker, usize)>,
    checks: Vec<[u8; CHECK_BYTES]>,
}

impl<'a> PageChecks<'a> {
    /// Creates checks of pages of `page_bytes` bytes.
    pub fn new(page_bytes: usize, secret: Option<&'a Secret>) -> Self {
        Self { secret, page_bytes, page: None, checks: Vec::new() }
    }

    /// Adds the next piece of a page.
    pub fn update(&mut self, piece: &[u8]) {
        let (checker, bytes) = self.page.get_or_insert_with(|| (Checker::new(self.secret), 0));
        checker.update(piece);
        *bytes += piece.len();
        if *bytes == self.page_bytes {
            self.checks.push(checker.finish());
            self.page = None;
        }
    }

    /// Compares the pages with a head that [`Record::check_head`] has accepted. `first` is the index of the first page.
    ///
    /// # Errors
    /// [`Miss::PageCheck`], also if there are not exactly `count` pages.
    pub fn compare(&self, head: &[u8], first: usize, count: usize) -> Result<(), Miss> {
        let stored = head.get(HEADER + CHECK_BYTES * first..HEADER + CHECK_BYTES * (first + count));
        let is_equal = stored.is_some_and(|stored| stored == self.checks.as_flattened());
        if is_equal && self.page.is_none() { Ok(()) } else { Err(Miss::PageCheck) }
    }
}

/// The fields of a stored record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Whether the checks are keyed.
    pub is_keyed: bool,
    /// The group of layers.
    pub group: u16,
    /// Tokens of a page.
    pub page_size: u32,
    /// The place of the first page.
    pub first: u32,
    /// Number of places.
    pub places: u32,
    /// Number of pages.
    pub pages: u32,
    /// Bytes of a page.
    pub page_bytes: u32,
    /// The model's fingerprint.
    pub fingerprint: Fingerprint,
    /// The namespace.
    pub space: Space,
    /// Hash of the page before the first one, or zeros.
    pub parent: [u8; 32],
    /// Hash of the last page.
    pub key: [u8; 32],
}

impl Header {
    /// Reads the fields at the begin of a record. The header's check is not compared.
    ///
    /// # Errors
    /// [`Miss::Length`], [`Miss::Magic`], [`Miss::Version`], [`Miss::Flags`] or [`Miss::Malformed`].
    pub fn read(head: &[u8]) -> Result<Self, Miss> {
        let Some(header) = head.first_chunk::<HEADER>() else { return Err(Miss::Length) };
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
        let bytes = |at: usize| -> [u8; 32] { header[at..at + 32].try_into().expect("32 bytes") };
        let half = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        if &header[..8] != MAGIC {
            return Err(Miss::Magic);
        }
        if half(8) != VERSION {
            return Err(Miss::Version);
        }
        if word(12) & !KEYED != 0 {
            return Err(Miss::Flags);
        }
        let read = Self {
            is_keyed: word(12) == KEYED,
            group: half(10),
            page_size: word(16),
            first: word(20),
            places: word(24),
            pages: word(28),
            page_bytes: word(32),
            fingerprint: Fingerprint(bytes(48)),
            space: Space(header[80..96].try_into().expect("16 bytes")),
            parent: bytes(96),
            key: bytes(128),
        };
        let stride_is_right = u64::from(word(36)) == u64::from(read.page_bytes).next_multiple_of(BLOCK as u64);
        let zeros = header[40..48].iter().chain(&header[160..CHECK_AT]).all(|&byte| byte == 0);
        let sizes = [read.page_size, read.places, read.pages, read.page_bytes];
        if !stride_is_right || !zeros || sizes.contains(&0) {
            return Err(Miss::Malformed);
        }
        Ok(read)
    }

    /// Returns the number of bytes of the head, if it fits `usize`.
    pub fn head_bytes(&self) -> Option<usize> {
        self.checked_end()?.checked_next_multiple_of(BLOCK)
    }

    /// Returns the number of bytes of the record, if it fits 64 bits.
    pub fn bytes(&self) -> Option<u64> {
        let stride = u64::from(self.page_bytes).next_multiple_of(BLOCK as u64);
        u64::from(self.pages).checked_mul(stride)?.checked_add(self.head_bytes()? as u64)
    }

    /// Returns the end of the tokens.
    fn checked_end(&self) -> Option<usize> {
        let tokens = (self.page_size as usize).checked_mul(self.places as usize)?.checked_mul(4)?;
        (self.pages as usize).checked_mul(CHECK_BYTES)?.checked_add(tokens)?.checked_add(HEADER)
    }

    /// Compares the check of a head, of which these are the fields.
    ///
    /// # Errors
    /// [`Miss::Length`], [`Miss::Secret`] or [`Miss::HeadCheck`].
    pub fn check(&self, head: &[u8], secret: Option<&Secret>) -> Result<(), Miss> {
        if self.head_bytes() != Some(head.len()) {
            return Err(Miss::Length);
        }
        if self.is_keyed != secret.is_some() {
            return Err(Miss::Secret);
        }
        let end = self.checked_end().ok_or(Miss::Length)?;
        let expected = check(&[&head[..CHECK_AT], &head[HEADER..end]], secret);
        if head[CHECK_AT..HEADER] == expected { Ok(()) } else { Err(Miss::HeadCheck) }
    }
}

/// Returns the first place in a head. Stores use it to order records by age; no reader relies on it.
pub(crate) fn first_place(head: &[u8]) -> u32 {
    head.get(20..24).map_or(0, |bytes| u32::from_le_bytes(bytes.try_into().expect("4 bytes")))
}
