//! What safetensors has no room for — values, and where keys sat in the tree — kept in its free-form metadata.
//!
//! Other readers ignore these entries. Values are pickled plain data in hexadecimal, decoded inertly like any other.

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use crate::path::{KeyPath, PathSegment};
use crate::pickle;
use crate::value::Value;

const VALUES: &str = "reshard.values";
const PATHS: &str = "reshard.paths";

/// Values by key, and paths that differ from their key.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Notes {
    /// Values by key.
    pub values: IndexMap<String, Value>,
    /// Paths of the keys that are not their path alone.
    pub paths: IndexMap<String, KeyPath>,
}

/// Why notes cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotesError {
    /// Not the JSON it should be.
    #[error("{0} is not what reshard writes there")]
    Json(&'static str, #[source] serde_json::Error),
    /// A value that cannot be decoded.
    #[error("the value of {key:?} cannot be decoded: {detail}")]
    Value {
        /// The key.
        key: String,
        /// Why.
        detail: String,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Segment {
    Index(i64),
    Key(String),
}

impl Notes {
    /// Whether an entry of the free-form metadata is one of these.
    pub fn is_ours(name: &str) -> bool {
        name == VALUES || name == PATHS
    }

    /// The entries to add to the metadata.
    pub fn encode(&self) -> Result<Vec<(String, String)>, NotesError> {
        let mut entries = Vec::new();
        if !self.values.is_empty() {
            let mut values: IndexMap<&str, String> = IndexMap::new();
            for (key, value) in &self.values {
                let bytes =
                    pickle::write_value(value, 2).map_err(|e| NotesError::Value { key: key.clone(), detail: e.to_string() })?;
                values.insert(key, to_hex(&bytes));
            }
            entries.push((VALUES.to_owned(), serde_json::to_string(&values).map_err(|e| NotesError::Json(VALUES, e))?));
        }
        let paths: IndexMap<&str, Vec<Segment>> =
            self.paths.iter().map(|(key, path)| (key.as_str(), path.iter().map(segment).collect())).collect();
        if !paths.is_empty() {
            entries.push((PATHS.to_owned(), serde_json::to_string(&paths).map_err(|e| NotesError::Json(PATHS, e))?));
        }
        Ok(entries)
    }

    /// Reads them back.
    pub fn decode(metadata: &IndexMap<String, String>) -> Result<Notes, NotesError> {
        let mut notes = Notes::default();
        if let Some(text) = metadata.get(VALUES) {
            let values: IndexMap<String, String> = serde_json::from_str(text).map_err(|e| NotesError::Json(VALUES, e))?;
            for (key, hex) in values {
                let bytes =
                    from_hex(&hex).ok_or_else(|| NotesError::Value { key: key.clone(), detail: "not hexadecimal".into() })?;
                let value =
                    pickle::read_value(&bytes).map_err(|e| NotesError::Value { key: key.clone(), detail: e.to_string() })?;
                notes.values.insert(key, value);
            }
        }
        if let Some(text) = metadata.get(PATHS) {
            let paths: IndexMap<String, Vec<Segment>> = serde_json::from_str(text).map_err(|e| NotesError::Json(PATHS, e))?;
            for (key, path) in paths {
                let path = path.into_iter().map(|segment| match segment {
                    Segment::Index(index) => PathSegment::Index(index),
                    Segment::Key(key) => PathSegment::Key(key),
                });
                notes.paths.insert(key, path.collect());
            }
        }
        Ok(notes)
    }
}

fn segment(segment: &PathSegment) -> Segment {
    match segment {
        PathSegment::Key(key) => Segment::Key(key.clone()),
        PathSegment::Index(index) => Segment::Index(*index),
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    let digit = |b: u8| (b as char).to_digit(16).map(|d| d as u8);
    digits.chunks(2).map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect()
}
