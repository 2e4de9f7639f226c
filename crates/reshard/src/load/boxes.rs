//! Boxes of elements in the memory of a piece, wherever that is.
#![allow(unsafe_code)]

use reshard_layout::{ByteLayout, Dims, Region, runs};

use crate::error::{Error, Geometry, Result};
use crate::leaf::LoadPiece;
use crate::memory::StridedBox;

pub(super) fn outside() -> Error {
    Error::internal("a planned read reaches outside its memory")
}

/// Copies bytes to their place in a piece's memory, which is here.
pub(super) fn place(piece: &LoadPiece<'_>, at: u64, bytes: &[u8]) -> Result<()> {
    // SAFETY: the plan gives each byte of a piece to one move, moves of one wave run on disjoint memory, and the slice ends
    // with this call.
    let target = unsafe { piece.memory.slice(at, bytes.len() as u64) }.ok_or_else(outside)?;
    target.copy_from_slice(bytes);
    Ok(())
}

/// Puts elements that lie packed in `bytes` into a piece; `region` is in the piece's own coordinates.
pub(super) fn put(piece: &LoadPiece<'_>, region: &Region, bytes: &[u8]) -> Result<()> {
    let Some(memory) = piece.memory.away() else {
        let (packed, zero) = packed(region, piece.layout.element_size())?;
        for run in runs(region.sizes(), &packed, &zero, &piece.layout, region.offsets()).proven()? {
            place(piece, run.dst, &bytes[run.src as usize..(run.src + run.len) as usize])?;
        }
        return Ok(());
    };
    let to = StridedBox {
        offset: piece.layout.position(region.offsets()),
        sizes: region.sizes(),
        byte_strides: piece.layout.byte_strides(),
        element_size: piece.layout.element_size(),
    };
    memory.write(to, bytes).map_err(|detail| Error::exhausted(format!("a tensor's memory could not be written: {detail}")))
}

/// Packs elements of a piece, after all reads, into `into`; `region` is in the piece's own coordinates.
pub(super) fn take(piece: &LoadPiece<'_>, region: &Region, into: &mut [u8]) -> Result<()> {
    let (packed, zero) = packed(region, piece.layout.element_size())?;
    for run in runs(region.sizes(), &piece.layout, region.offsets(), &packed, &zero).proven()? {
        let part = &mut into[run.dst as usize..(run.dst + run.len) as usize];
        match piece.memory.away() {
            Some(memory) => memory
                .read(run.src, part)
                .map_err(|detail| Error::exhausted(format!("a tensor's memory could not be read: {detail}")))?,
            // SAFETY: all reads are done and one thread passes pieces on, so this is the only slice of these bytes.
            None => part.copy_from_slice(unsafe { piece.memory.slice(run.src, run.len) }.ok_or_else(outside)?),
        }
    }
    Ok(())
}

fn packed(region: &Region, element: u64) -> Result<(ByteLayout, Dims)> {
    Ok((ByteLayout::contiguous(region.sizes(), element).proven()?, Dims::from_elem(0, region.ndim())))
}
