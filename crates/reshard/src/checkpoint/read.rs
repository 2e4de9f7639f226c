//! Reading values.

use reshard_formats::{Content, RecordError, TorchArchive, Value};

use super::Checkpoint;
use super::catalog::{CatalogKind, ValuePlace};
use crate::checksums::ChecksumBuilder;
use crate::error::{Error, Result, StorageContext, chain};

/// No value is larger: a record's length comes from a file and is not believed beyond this.
const MAX_VALUE_BYTES: u64 = 1 << 30;

/// A value as it was stored.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum LoadedValue {
    /// Plain data.
    Plain(Value),
    /// An object that only unpickling could bring back: its class, and the `torch.save` record that holds it.
    Opaque {
        /// What unpickling would import.
        class: String,
        /// The record, to be carried through or unpickled by whoever trusts it.
        record: Vec<u8>,
    },
}

/// What a value's record holds: the value, or the class that unpickling it would import.
pub(crate) enum Decoded {
    Plain(Value),
    Opaque(String),
}

impl Checkpoint {
    /// Reads a value, wherever it is kept; one that only unpickling could bring back as its class and its record.
    pub fn read_value(&self, key: &str) -> Result<LoadedValue> {
        let record = match self.value_place(key)? {
            ValuePlace::Inline(value) => return Ok(LoadedValue::Plain(value.clone())),
            ValuePlace::Opaque { class } => return Ok(LoadedValue::Opaque { class: class.clone(), record: Vec::new() }),
            ValuePlace::Record { file, offset, length } => self.read_record(key, *file, *offset, *length)?,
        };
        Ok(match record {
            (Decoded::Plain(value), _) => LoadedValue::Plain(value),
            (Decoded::Opaque(class), record) => LoadedValue::Opaque { class, record },
        })
    }

    pub(crate) fn value_place(&self, key: &str) -> Result<&ValuePlace> {
        match &self.entry(key)?.kind {
            CatalogKind::Value(path) => Ok(path),
            _ => Err(Error::invalid(format!("{key:?} in {} is a tensor, not a plain value", self.path))),
        }
    }

    /// Reads a value's record, compares it with its checksum where there is one, and decodes it.
    pub(crate) fn read_record(&self, key: &str, file: u32, offset: u64, length: u64) -> Result<(Decoded, Vec<u8>)> {
        let reader = self.reader(file)?;
        let end = offset.checked_add(length);
        if length > MAX_VALUE_BYTES || end.is_none_or(|end| end > reader.len()) {
            let detail = format!("its record of {length} bytes does not fit into the file of {} bytes", reader.len());
            return Err(self.corrupt(key, file, offset, detail));
        }
        let mut record = vec![0; length as usize];
        reader.read_at(offset, &mut record).doing(|| format!("reading {key:?} from {}", reader.path()))?;
        let sums = self.side.as_ref().and_then(|side| side.find(self.file_name(file), offset)).and_then(|r| r.sums);
        if let Some(sums) = sums
            && ChecksumBuilder::of(&record) != sums
        {
            return Err(self.corrupt(key, file, offset, "the checksum of the value's record is wrong"));
        }
        let archive = TorchArchive::open(&record, 0, length).map_err(|e| self.corrupt(key, file, offset, chain(&e)))?;
        let decoded = match archive.content() {
            // Nothing is wrong with it: a tensor that has no plain memory is for its own library to read.
            Err(RecordError::Unsupported { what, .. }) => Decoded::Opaque(what),
            content => match content.map_err(|e| self.corrupt(key, file, offset, chain(&e)))? {
                Content::Value(value) => Decoded::Plain(value),
                Content::Opaque { class } => Decoded::Opaque(class),
                _ => Decoded::Opaque("torch.Tensor".into()),
            },
        };
        drop(archive);
        Ok((decoded, record))
    }

    /// Reads a plain value; one that needs unpickling is an error that names its class.
    pub fn value(&self, key: &str) -> Result<Value> {
        match self.read_value(key)? {
            LoadedValue::Plain(value) => Ok(value),
            LoadedValue::Opaque { class, .. } => Err(Error::Untrusted { path: self.path.clone(), key: key.to_owned(), class }),
        }
    }
}
