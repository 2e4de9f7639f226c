//! Reading values.

use reshard_formats::own::Checksums;
use reshard_formats::{Content, RecordError, TorchArchive, Value};

use super::Checkpoint;
use super::catalog::{CatalogKind, ValueLocation};
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
        /// What it is: a class that unpickling would import, or what kind of tensor.
        class: String,
        /// All that unpickling would import or rebuild, `class` among it.
        classes: Vec<String>,
        /// The record, to be carried through or unpickled by whoever trusts it.
        record: Vec<u8>,
    },
}

impl LoadedValue {
    /// The first thing in it that is not plain data and that nobody trusts, if there is one.
    pub fn untrusted(&self, trusted: &dyn Fn(&str) -> bool) -> Option<&str> {
        match self {
            LoadedValue::Plain(_) => None,
            LoadedValue::Opaque { class, classes, .. } => {
                std::iter::once(class).chain(classes).map(String::as_str).find(|class| !trusted(class))
            }
        }
    }
}

impl Checkpoint {
    /// Reads a value, wherever it is kept; one that only unpickling could bring back as its class and its record.
    pub fn read_value(&self, key: &str) -> Result<LoadedValue> {
        match self.value_location(key)? {
            ValueLocation::Inline(value) => Ok(LoadedValue::Plain(value.clone())),
            ValueLocation::Opaque { class } => {
                Ok(LoadedValue::Opaque { class: class.clone(), classes: vec![class.clone()], record: Vec::new() })
            }
            ValueLocation::Record { file, offset, length, transform } => {
                if let Some(transform) = transform {
                    self.compression(key, transform)?;
                }
                self.read_record(key, *file, *offset, *length, transform.is_some())
            }
        }
    }

    pub(crate) fn value_location(&self, key: &str) -> Result<&ValueLocation> {
        match &self.entry(key)?.kind {
            CatalogKind::Value(path) => Ok(path),
            _ => Err(Error::invalid(format!("{key:?} in {} is a tensor, not a plain value", self.path))),
        }
    }

    /// Reads a record as it lies in its file, for a caller who can undo the transforms behind which it was stored.
    pub fn stored_record(&self, key: &str, file: &str, offset: u64, length: u64) -> Result<Vec<u8>> {
        let known = self.catalog().files.iter().position(|name| name == file).and_then(|number| u32::try_from(number).ok());
        let file = known.ok_or_else(|| Error::invalid(format!("{} has no data file {file:?}", self.path)))?;
        let most = match &self.entry(key)?.kind {
            // What whoever asked has room for. A transform may add to it, but not make it many times as large.
            CatalogKind::Tensor(tensor) => tensor.bytes().saturating_mul(2).max(MAX_VALUE_BYTES),
            _ => MAX_VALUE_BYTES,
        };
        self.record_bytes(key, file, offset, length, most)
    }

    /// Reads a value's record and decodes it.
    fn read_record(&self, key: &str, file: u32, offset: u64, length: u64, packed: bool) -> Result<LoadedValue> {
        let mut record = self.record_bytes(key, file, offset, length, MAX_VALUE_BYTES)?;
        if packed {
            record = self.unpacked_value(key, file, offset, &record)?;
        }
        decoded(record).map_err(|e| self.corrupt(key, file, offset, chain(&e)))
    }

    /// Reads a record whole and compares it with its checksum where there is one.
    fn record_bytes(&self, key: &str, file: u32, offset: u64, length: u64, most: u64) -> Result<Vec<u8>> {
        let reader = self.reader(file)?;
        let end = offset.checked_add(length);
        if length > most {
            return Err(self.corrupt(key, file, offset, format!("its record says to have {length} bytes, the most is {most}")));
        }
        if end.is_none_or(|end| end > reader.len()) {
            let detail = format!("its record of {length} bytes does not fit into the file of {} bytes", reader.len());
            return Err(self.corrupt(key, file, offset, detail));
        }
        let mut record = vec![0; length as usize];
        reader.read_at(offset, &mut record).doing(|| format!("reading {key:?} from {}", reader.path()))?;
        let sums = self.side().and_then(|side| side.find(self.file_name(file), offset)).and_then(|r| r.sums);
        if let Some(sums) = sums
            && Checksums::of(&record) != sums
        {
            return Err(self.corrupt(key, file, offset, "the checksum of the record is wrong"));
        }
        Ok(record)
    }

    /// Reads a plain value; one that needs unpickling is an error that names its class.
    pub fn value(&self, key: &str) -> Result<Value> {
        match self.read_value(key)? {
            LoadedValue::Plain(value) => Ok(value),
            LoadedValue::Opaque { class, .. } => Err(Error::Untrusted { path: self.path.clone(), key: key.to_owned(), class }),
        }
    }
}

/// What a value's `torch.save` record holds: data, or what unpickling it would import. Nothing in it is run.
pub fn decode_record(record: Vec<u8>) -> Result<LoadedValue> {
    decoded(record).map_err(|error| Error::format("a record", "data.pkl", "torch.save record", error))
}

fn decoded(record: Vec<u8>) -> std::result::Result<LoadedValue, RecordError> {
    let archive = TorchArchive::open(&record, 0, record.len() as u64)?;
    let (content, mut classes) = archive.content_and_classes()?;
    let class = match content {
        Content::Value(value) => return Ok(LoadedValue::Plain(value)),
        Content::Opaque { class } => class,
        _ => "torch.Tensor".to_owned(),
    };
    if !classes.contains(&class) {
        classes.insert(0, class.clone());
    }
    drop(archive);
    Ok(LoadedValue::Opaque { class, classes, record })
}
