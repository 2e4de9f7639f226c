//! The bytes of a box of memory in row-major order, block by block.

use reshard_formats::DType;
use reshard_layout::{ByteLayout, Dims, Run, Runs, runs};

use crate::error::{Geometry, Result};
use crate::memory::{Source, outside};

/// Large records are checksummed and written in blocks of this size, so that a block is still in the cache when written.
pub(crate) const BLOCK: usize = 1 << 20;
/// Device memory is fetched in parts of this size.
const FETCH: usize = 4 << 20;

/// Gives a box of memory in row-major order, in blocks of at most [`BLOCK`] bytes: as it lies there where it lies in a
/// piece, through a buffer where it does not.
pub(super) fn each_block(
    memory: &Source<'_>,
    layout: &ByteLayout,
    offsets: &[u64],
    sizes: &[u64],
    dtype: DType,
    mut sink: impl FnMut(&[u8]),
) -> Result<()> {
    // The whole of packed memory: most pieces.
    if sizes == layout.shape()
        && layout.is_contiguous()
        && let Some(bytes) = memory.bytes()
    {
        let whole = bytes.get(layout.base() as usize..layout.end() as usize).ok_or_else(outside)?;
        whole.chunks(BLOCK).for_each(sink);
        return Ok(());
    }
    let packed = ByteLayout::contiguous(sizes, dtype.size()).proven()?;
    let zero = Dims::from_elem(0, sizes.len());
    // Runs come in the order of their source, and the order wanted here is that of the packed box.
    let all = || runs(sizes, &packed, &zero, layout, offsets);
    if let Some(bytes) = memory.bytes() {
        return each_run(bytes, 0, all().proven()?, sink);
    }
    let mut fetched: Vec<u8> = Vec::new();
    if all().proven()?.run_len() >= BLOCK as u64 / 4 || all().proven()?.count_runs() <= 1 {
        for Run { dst: at, len, .. } in all().proven()? {
            for start in (0..len).step_by(FETCH) {
                fetched.resize((len - start).min(FETCH as u64) as usize, 0);
                memory.read(at + start, &mut fetched)?;
                fetched.chunks(BLOCK).for_each(&mut sink);
            }
        }
        return Ok(());
    }
    // Many short runs: all that lies between the first and the last comes at once.
    let (start, end) =
        all().proven()?.fold((u64::MAX, 0), |(start, end), run| (run.dst.min(start), (run.dst + run.len).max(end)));
    fetched.resize(end.saturating_sub(start) as usize, 0);
    memory.read(start, &mut fetched)?;
    each_run(&fetched, start, all().proven()?, sink)
}

/// Gives runs in blocks; `bytes` start at `base`.
fn each_run(bytes: &[u8], base: u64, runs: Runs, mut sink: impl FnMut(&[u8])) -> Result<()> {
    let mut buffer: Vec<u8> = Vec::new();
    for Run { dst, len, .. } in runs {
        let at = dst.checked_sub(base).ok_or_else(outside)?;
        let run = bytes.get(at as usize..(at + len) as usize).ok_or_else(outside)?;
        if run.len() >= BLOCK / 4 {
            if !buffer.is_empty() {
                sink(&buffer);
                buffer.clear();
            }
            run.chunks(BLOCK).for_each(&mut sink);
            continue;
        }
        if buffer.len() + run.len() > BLOCK {
            sink(&buffer);
            buffer.clear();
        }
        buffer.extend_from_slice(run);
    }
    if !buffer.is_empty() {
        sink(&buffer);
    }
    Ok(())
}
