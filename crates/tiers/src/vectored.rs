//! Records in files, without copies: one call reads or writes the head and all pages.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::record::BLOCK;
use crate::store::{Part, stride};

/// Maximum number of buffers of one call (`IOV_MAX`).
const BUFFERS_MAX: usize = 1024;
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

/// Reads the head and some pages of a record at an offset. Returns false at the end of the file.
pub(crate) fn read_record(
    file: &OwnedFd,
    offset: u64,
    part: Part,
    head: &mut [u8],
    pages: &mut [&mut [u8]],
) -> io::Result<bool> {
    let page_bytes = pages.first().map_or(0, |page| page.len());
    let (start, padding) = (offset + part.start(head.len(), page_bytes), stride(page_bytes) - page_bytes);
    let mut unused = vec![0; padding * pages.len()];
    let mut unused = unused.chunks_mut(padding.max(1));
    let mut buffers = vec![IoSliceMut::new(head)];
    for page in pages {
        buffers.push(IoSliceMut::new(page));
        buffers.extend(unused.next().map(IoSliceMut::new));
    }
    if part.first == 0 {
        return read_all(file, offset, &mut buffers);
    }
    Ok(read_all(file, offset, &mut buffers[..1])? && read_all(file, start, &mut buffers[1..])?)
}

/// Fills all buffers from an offset on. Returns false at the end of the file.
fn read_all(file: &OwnedFd, mut offset: u64, mut buffers: &mut [IoSliceMut]) -> io::Result<bool> {
    while !buffers.is_empty() {
        let count = buffers.len().min(BUFFERS_MAX);
        match rustix::io::preadv(file, &mut buffers[..count], offset) {
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
