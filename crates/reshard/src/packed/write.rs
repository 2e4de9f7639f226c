//! Compressing records on their way to a file.

use std::io::IoSlice;

use reshard_formats::own::{ChecksumBuilder, Checksums, RecordChecksums};
use reshard_storage::Writer;
use zstd_safe::zstd_sys::ZSTD_EndDirective;
use zstd_safe::{CCtx, CParameter, InBuffer, OutBuffer, ResetDirective};

use super::Compression;
use crate::error::{Error, Result, StorageContext};

/// As PyTorch's extension has it: the compressor's default.
const LEVEL: i32 = 3;
/// Compressed bytes are given on in parts of this size.
const OUTPUT: usize = 128 << 10;

/// Compresses one record after the other.
pub(crate) struct Packer {
    context: CCtx<'static>,
    output: Vec<u8>,
}

impl Packer {
    pub(crate) fn new(compression: Compression) -> Result<Packer> {
        let Compression::Zstd = compression;
        let mut context = CCtx::try_create().ok_or_else(|| Error::exhausted("there is no memory for a compressor"))?;
        context.set_parameter(CParameter::CompressionLevel(LEVEL)).map_err(failed)?;
        Ok(Packer { context, output: Vec::with_capacity(OUTPUT) })
    }

    /// Begins a record of so many bytes.
    pub(crate) fn begin(&mut self, length: u64) -> Result<()> {
        self.context.reset(ResetDirective::SessionOnly).map_err(failed)?;
        self.context.set_pledged_src_size(Some(length)).map_err(failed)?;
        Ok(())
    }

    /// Compresses the next bytes of a record, the last with `end`.
    pub(crate) fn push(&mut self, bytes: &[u8], end: bool, give: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let directive = if end { ZSTD_EndDirective::ZSTD_e_end } else { ZSTD_EndDirective::ZSTD_e_continue };
        let mut input = InBuffer::around(bytes);
        loop {
            self.output.clear();
            let left = {
                let mut output = OutBuffer::around(&mut self.output);
                self.context.compress_stream2(&mut output, &mut input, directive).map_err(failed)?
            };
            if !self.output.is_empty() {
                give(&self.output)?;
            }
            let taken = input.pos() == bytes.len();
            if if end { left == 0 } else { taken } {
                return Ok(());
            }
        }
    }
}

fn failed(code: zstd_safe::ErrorCode) -> Error {
    Error::internal(format!("a record could not be compressed: {}", zstd_safe::get_error_name(code)))
}

/// Compressed records at the end of a file that is being written, one after the other.
pub(crate) struct Appending<'w> {
    pub(crate) writer: &'w dyn Writer,
    /// Where the next record begins.
    pub(crate) at: u64,
    pub(crate) checksums: bool,
}

/// Gives the bytes of a record to whom it is told.
pub(crate) type Feed<'f> = &'f mut dyn FnMut(&mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>;

impl Appending<'_> {
    /// Compresses a record of `length` bytes. What is summed is the whole of what is stored: so the index says that a tensor's record
    /// is compressed.
    pub(crate) fn record(&mut self, packer: &mut Packer, length: u64, feed: Feed<'_>) -> Result<RecordChecksums> {
        let start = self.at;
        let mut summer = self.checksums.then(ChecksumBuilder::new);
        let (writer, at) = (self.writer, &mut self.at);
        let mut give = |bytes: &[u8]| -> Result<()> {
            if let Some(summer) = &mut summer {
                summer.update(bytes);
            }
            writer.write_at(*at, &[IoSlice::new(bytes)]).doing(|| format!("writing a record to {}", writer.path()))?;
            *at += bytes.len() as u64;
            Ok(())
        };
        packer.begin(length)?;
        feed(&mut |bytes| packer.push(bytes, false, &mut give))?;
        packer.push(&[], true, &mut give)?;
        let sums: Option<Checksums> = summer.map(ChecksumBuilder::finish);
        Ok(RecordChecksums::of_value(start, self.at - start, sums))
    }
}
