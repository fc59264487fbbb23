//! Records in files, without copies: calls that read or write several buffers.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::record::BLOCK;
use crate::store::{Buffers, stride};

/// Maximum number of buffers of one call (`IOV_MAX`).
const BUFFERS_MAX: usize = 1024;
/// Maximum number of bytes of a page between a read and its check: they fit a processor's cache, where a check costs a
/// third of the time.
const PIECE: usize = 256 << 10;
const ZEROS: [u8; BLOCK] = [0; BLOCK];

/// Writes a record at an offset: the head, and each page with its padding.
pub(crate) fn write_record(file: &OwnedFd, mut offset: u64, head: &[u8], pages: &[&[u8]]) -> io::Result<()> {
    let mut buffers = vec![IoSlice::new(head)];
    for page in pages {
        buffers.push(IoSlice::new(page));
        buffers.push(IoSlice::new(&ZEROS[..stride(page.len()) - page.len()]));
    }
    let mut buffers = &mut buffers[..];
    while !buffers.is_empty() {
        match rustix::io::pwritev(file, &buffers[..buffers.len().min(BUFFERS_MAX)], offset) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => {
                offset += written as u64;
                IoSlice::advance_slices(&mut buffers, written);
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Consecutive bytes of a record: a head, a piece of a page, or padding.
pub(crate) struct Piece<'a> {
    pub bytes: &'a mut [u8],
    pub is_page: bool,
}

/// Returns memory for the padding of pages.
pub(crate) fn unused(pages: &[&mut [u8]]) -> Vec<u8> {
    vec![0; pages.iter().map(|page| stride(page.len()) - page.len()).sum()]
}

/// Returns the pieces of a head and pages in order.
pub(crate) fn pieces<'a>(head: &'a mut [u8], pages: &'a mut [&mut [u8]], mut unused: &'a mut [u8]) -> Vec<Piece<'a>> {
    let mut pieces = vec![Piece { bytes: head, is_page: false }];
    for page in pages {
        let (padding, rest) = unused.split_at_mut(stride(page.len()) - page.len());
        pieces.extend(page.chunks_mut(PIECE).map(|bytes| Piece { bytes, is_page: true }));
        pieces.extend((!padding.is_empty()).then_some(Piece { bytes: padding, is_page: false }));
        unused = rest;
    }
    pieces
}

/// Reads the head and some pages of a record at an offset. Calls `seen` with pieces of the pages in order, soon after
/// each was read. Returns false at the end of the file.
pub(crate) fn read_record(file: &OwnedFd, mut offset: u64, into: &mut Buffers) -> io::Result<bool> {
    let (start, first) = (offset + into.range().start, into.first);
    let mut unused = unused(into.pages);
    let mut pieces = pieces(into.head, into.pages, &mut unused);
    // One call reads about as many bytes as a piece has. The head does not lie before a later page.
    let (mut rest, mut is_head) = (&mut pieces[..], true);
    while !rest.is_empty() {
        let (mut bytes, mut count) = (0, 0);
        while count < rest.len().min(BUFFERS_MAX) && bytes < PIECE && (count == 0 || !is_head || first == 0) {
            bytes += rest[count].bytes.len();
            count += 1;
        }
        let (batch, others) = rest.split_at_mut(count);
        let mut slices: Vec<_> = batch.iter_mut().map(|piece| IoSliceMut::new(piece.bytes)).collect();
        if !read_all(file, offset, &mut slices)? {
            return Ok(false);
        }
        batch.iter().filter(|piece| piece.is_page).for_each(|piece| (into.seen)(piece.bytes));
        offset = if is_head && first > 0 { start } else { offset + bytes as u64 };
        (rest, is_head) = (others, false);
    }
    Ok(true)
}

/// Fills all buffers from an offset on. Returns false at the end of the file.
fn read_all(file: &OwnedFd, mut offset: u64, mut buffers: &mut [IoSliceMut]) -> io::Result<bool> {
    while !buffers.is_empty() {
        match rustix::io::preadv(file, buffers, offset) {
            Ok(0) => return Ok(false),
            Ok(read) => {
                offset += read as u64;
                IoSliceMut::advance_slices(&mut buffers, read);
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}
