//! Reading values.

use reshard_formats::{Content, RecordError, TorchArchive, Value};

use super::Checkpoint;
use super::catalog::{CatalogKind, ValuePlace};
use crate::error::{Error, Result, StorageContext, chain};
use crate::sums::Summer;

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

impl Checkpoint {
    /// Reads a value; one that needs unpickling comes as its record.
    pub fn read_value(&self, key: &str) -> Result<LoadedValue> {
        let CatalogKind::Value(place) = &self.entry(key)?.kind else {
            return Err(Error::invalid(format!("{key:?} in {} is a tensor, not a plain value", self.place)));
        };
        let (file, offset, length) = match place {
            ValuePlace::Inline(value) => return Ok(LoadedValue::Plain(value.clone())),
            ValuePlace::Opaque { class } => return Ok(LoadedValue::Opaque { class: class.clone(), record: Vec::new() }),
            ValuePlace::Record { file, offset, length } => (*file, *offset, *length),
        };
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
            && Summer::of(&record) != sums
        {
            return Err(self.corrupt(key, file, offset, "the checksum of the value's record is wrong"));
        }
        let archive = TorchArchive::open(&record, 0, length).map_err(|e| self.corrupt(key, file, offset, chain(&e)))?;
        let content = match archive.content() {
            // Nothing is wrong with it: a tensor that has no plain memory is for its own library to read.
            Err(RecordError::Unsupported { what, .. }) => return Ok(LoadedValue::Opaque { class: what, record }),
            content => content.map_err(|e| self.corrupt(key, file, offset, chain(&e)))?,
        };
        match content {
            Content::Value(value) => Ok(LoadedValue::Plain(value)),
            Content::Opaque { class } => Ok(LoadedValue::Opaque { class, record }),
            _ => Ok(LoadedValue::Opaque { class: "torch.Tensor".into(), record }),
        }
    }

    /// Reads a plain value; one that needs unpickling is an error that names its class.
    pub fn value(&self, key: &str) -> Result<Value> {
        match self.read_value(key)? {
            LoadedValue::Plain(value) => Ok(value),
            LoadedValue::Opaque { class, .. } => Err(Error::Untrusted { place: self.place.clone(), key: key.to_owned(), class }),
        }
    }
}
