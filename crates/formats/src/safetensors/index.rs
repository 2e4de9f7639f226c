//! `model.safetensors.index.json`: which file has which tensor.

use indexmap::IndexMap;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::SafetensorsError;
use super::header::Unique;

/// The name that an index has beside its files.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// The index of a model in several files.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct SafetensorsIndex {
    /// File name by tensor; the names stay inside the index's folder.
    pub weight_map: IndexMap<String, String>,
    /// What else the index says; `total_size` usually.
    pub metadata: Map<String, Value>,
}

#[derive(Deserialize)]
struct RawIndex {
    #[serde(default)]
    metadata: Option<Map<String, Value>>,
    weight_map: Unique<String>,
}

impl SafetensorsIndex {
    /// An index of tensors and their files, with the sum of the tensors' bytes.
    pub fn new(weight_map: IndexMap<String, String>, total_size: u64) -> Result<SafetensorsIndex, SafetensorsError> {
        let index =
            SafetensorsIndex { weight_map, metadata: Map::from_iter([("total_size".to_owned(), Value::from(total_size))]) };
        index.check()?;
        Ok(index)
    }

    /// Parses an index.
    pub fn parse(json: &[u8]) -> Result<SafetensorsIndex, SafetensorsError> {
        let raw: RawIndex =
            serde_json::from_slice(json).map_err(|error| SafetensorsError::Index { reason: error.to_string() })?;
        let index = SafetensorsIndex { weight_map: raw.weight_map.0, metadata: raw.metadata.unwrap_or_default() };
        index.check()?;
        Ok(index)
    }

    /// The index as JSON, laid out as Hugging Face's libraries do.
    pub fn to_json(&self) -> Result<Vec<u8>, SafetensorsError> {
        let index = json!({ "metadata": self.metadata, "weight_map": self.weight_map });
        let mut json = serde_json::to_vec_pretty(&index).map_err(SafetensorsError::Json)?;
        json.push(b'\n');
        Ok(json)
    }

    /// The files, each once, in order of first mention.
    pub fn files(&self) -> Vec<&str> {
        let files: indexmap::IndexSet<&str> = self.weight_map.values().map(String::as_str).collect();
        files.into_iter().collect()
    }

    fn check(&self) -> Result<(), SafetensorsError> {
        let escape = self.weight_map.iter().find(|(_, file)| !stays_inside(file));
        match escape {
            None => Ok(()),
            Some((key, file)) => {
                Err(SafetensorsError::Index { reason: format!("{key:?} is said to be in {file:?}, which leaves the folder") })
            }
        }
    }
}

/// Whether a path is relative and made of plain names only.
fn stays_inside(path: &str) -> bool {
    !path.contains(['\\', '\0', ':']) && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
}

/// The name of file `index` (from 1) of `count`, as Hugging Face's libraries give it.
pub fn model_file(index: u64, count: u64) -> String {
    format!("model-{index:05}-of-{count:05}.safetensors")
}

/// The name of file `index` (from 1) of `count` with what rank `shard` (from 1) saved, as DCP gives it.
pub fn dcp_shard_file(shard: u64, index: u64, count: u64) -> String {
    format!("shard-{shard:05}-model-{index:05}-of-{count:05}.safetensors")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_leave_the_folder_are_refused() {
        for path in ["a.safetensors", "sub/a.safetensors", "..a"] {
            assert!(stays_inside(path), "{path}");
        }
        for path in ["", "/a", "../a", "a/../b", "a//b", "./a", "C:\\a", "a\\..\\b", "a\0"] {
            assert!(!stays_inside(path), "{path:?}");
        }
    }

    #[test]
    fn an_index_comes_back_as_it_was_written() {
        let map = [("b", model_file(1, 2)), ("a", model_file(2, 2)), ("c", model_file(1, 2))];
        let map = map.map(|(key, file)| (key.to_owned(), file));
        let index = SafetensorsIndex::new(IndexMap::from(map), 12).unwrap();
        let again = SafetensorsIndex::parse(&index.to_json().unwrap()).unwrap();
        assert_eq!(again, index);
        assert_eq!(again.files(), ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
    }

    #[test]
    fn malformed_indexes_are_refused_with_their_reason() {
        for (json, reason) in [
            (r#"{"weight_map": {"a": "x", "a": "y"}}"#, "\"a\" occurs twice"),
            (r#"{"weight_map": {"a": "../x"}}"#, "leaves the folder"),
            (r#"{"weight_map": {"a": 1}}"#, "expected a string"),
            (r#"{}"#, "missing field `weight_map`"),
            ("", "EOF"),
        ] {
            let error = SafetensorsIndex::parse(json.as_bytes()).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
        }
    }
}
