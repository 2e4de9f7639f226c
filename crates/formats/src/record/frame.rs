//! Writing one record: the bytes before and after a tensor's data, exactly as torch's own writer makes them.
//!
//! The data itself never passes through here: a caller writes `head`, then the tensor straight from its
//! memory, then `tail`. Only the tail needs the data's CRC-32, so data can be checksummed as it is written.

use super::envelope::{Closing, push_preamble};
use super::error::RecordError;
use super::tensor_pickle::push_tensor_pickle;
use super::zip_write::{Align, ZipEntry};
use crate::pickle::write_value;
use crate::{DType, Value};

const DATA: &str = "archive/data/0";

/// What torch makes of the entry names of a record with one tensor, and of one with none: the first half of
/// the serialization id. A constant, because it depends on how one C++ library hashes strings.
const NAMES_WITH_DATA: u64 = 15_728_199_511_854_643_026;
const NAMES_WITHOUT_DATA: u64 = 2_908_468_677_762_923_104;

/// Room for a head and for a tail without a note; only hints for single allocations.
const HEAD_CAPACITY: usize = 896;
const TAIL_CAPACITY: usize = 1024;

/// What a record is to hold.
#[derive(Clone, Copy, Debug)]
pub struct RecordSpec<'a> {
    /// The element type.
    pub dtype: DType,
    /// The shape; data is row-major.
    pub shape: &'a [u64],
    /// Torch's `requires_grad` of the tensor when it is loaded.
    pub requires_grad: bool,
    /// Content of an extra entry `archive/.reshard`, which lets a record describe itself; torch ignores it.
    pub note: Option<&'a [u8]>,
}

/// The frame of one tensor's record, around `data_len` bytes of data at `data_offset`.
///
/// ```
/// use reshard_formats::{DType, RecordFrame, RecordSpec};
///
/// let spec = RecordSpec { dtype: DType::Float32, shape: &[2], requires_grad: false, note: None };
/// let frame = RecordFrame::new(&spec)?;
/// let data = [1.0f32.to_le_bytes(), 2.0f32.to_le_bytes()].concat();
/// let mut file = frame.head.clone();
/// file.extend_from_slice(&data);
/// file.extend_from_slice(&frame.tail(crc32fast::hash(&data)));
/// assert_eq!(file.len() as u64, frame.total_len());
/// # Ok::<(), reshard_formats::RecordError>(())
/// ```
#[derive(Clone, Debug)]
pub struct RecordFrame {
    /// Everything before the data.
    pub head: Vec<u8>,
    entries: [ZipEntry<&'static str>; 5],
    closing: Closing,
    note: Option<Vec<u8>>,
}

impl RecordFrame {
    /// Lays out the record of a tensor.
    pub fn new(spec: &RecordSpec<'_>) -> Result<RecordFrame, RecordError> {
        let data_len = data_len(spec.dtype, spec.shape)?;
        let mut pickle = Vec::with_capacity(192 + 20 * spec.shape.len());
        push_tensor_pickle(&mut pickle, spec.dtype, spec.shape, spec.requires_grad);

        let mut head = Vec::with_capacity(HEAD_CAPACITY + 20 * spec.shape.len());
        let [pickle, version, alignment, byte_order] = push_preamble(&mut head, &pickle);
        let data = ZipEntry { name: DATA, header: head.len() as u64, size: data_len, crc32: 0 };
        data.push_local(&mut head, Align::Padded);
        Ok(RecordFrame {
            head,
            entries: [pickle, version, alignment, byte_order, data],
            closing: Closing::new(data.end(Align::Padded), spec.note),
            note: spec.note.map(<[u8]>::to_vec),
        })
    }

    /// Where the data starts, from the start of the record: a multiple of 64.
    pub fn data_offset(&self) -> u64 {
        self.head.len() as u64
    }

    /// Bytes of data.
    pub fn data_len(&self) -> u64 {
        self.entries[4].size
    }

    /// Bytes of the whole record.
    pub fn total_len(&self) -> u64 {
        self.closing.total_len(self.entries.iter().map(ZipEntry::central_len).sum())
    }

    /// Everything after the data, given the data's CRC-32 (IEEE, as in zip).
    pub fn tail(&self, crc32: u32) -> Vec<u8> {
        let mut out = Vec::with_capacity(TAIL_CAPACITY + self.note.as_ref().map_or(0, |note| note.len() + 128));
        self.push_tail(crc32, &mut out);
        out
    }

    /// Appends [`RecordFrame::tail`].
    pub fn push_tail(&self, crc32: u32, out: &mut Vec<u8>) {
        let mut entries = self.entries;
        entries[4].crc32 = if self.data_len() == 0 { 0 } else { crc32 };
        entries[4].push_descriptor(out);
        self.closing.push(out, &entries, NAMES_WITH_DATA, self.note.as_deref());
    }
}

/// The whole record of a plain value, as `torch.save` would write it.
pub fn value_record(value: &Value, note: Option<&[u8]>) -> Result<Vec<u8>, RecordError> {
    let pickle = write_value(value, 2).map_err(RecordError::Pickle)?;
    pickle_record(&pickle, note)
}

/// Wraps an already pickled object (protocol 2, without storages) into a whole record.
pub fn pickle_record(data_pkl: &[u8], note: Option<&[u8]>) -> Result<Vec<u8>, RecordError> {
    let mut out = Vec::with_capacity(2048 + data_pkl.len() + note.map_or(0, <[u8]>::len));
    let entries = push_preamble(&mut out, data_pkl);
    let closing = Closing::new(out.len() as u64, note);
    closing.push(&mut out, &entries, NAMES_WITHOUT_DATA, note);
    Ok(out)
}

/// Bytes of a tensor's data; limited to 63 bits less room for the frame, so that no position overflows.
pub(crate) fn data_len(dtype: DType, shape: &[u64]) -> Result<u64, RecordError> {
    let mut bytes = dtype.size();
    // Strides are products that skip zeros, so they can overflow where the volume doesn't.
    let mut spread = Some(dtype.size());
    for &size in shape {
        spread = spread.and_then(|spread| spread.checked_mul(size.max(1)));
        bytes = bytes.wrapping_mul(size);
    }
    match spread {
        Some(spread) if spread <= i64::MAX as u64 - (1 << 32) && shape.len() <= MAX_DIMS => Ok(bytes),
        _ => Err(RecordError::TensorTooLarge { shape: shape.to_vec(), dtype }),
    }
}

/// More dimensions than torch itself accepts (64), so only a nonsensical shape is refused.
const MAX_DIMS: usize = 64;
