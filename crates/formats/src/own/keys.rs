//! A key and what is known of it without its data: what an index lists, and what ranks tell each other when they plan a save.

use reshard_layout::Dims;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::dtype::DType;
use crate::path::{KeyPath, PathSegment};

/// One key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyEntry {
    /// The flattened name.
    pub key: String,
    /// `None` when the path is the key alone.
    pub path: Option<KeyPath>,
    /// `None` for a value.
    pub tensor: Option<TensorFacts>,
}

/// What is known of a tensor without its elements.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorFacts {
    /// The type of its elements, as its code.
    #[serde(serialize_with = "dtype_code", deserialize_with = "dtype_of")]
    pub dtype: DType,
    /// Whether it is trained.
    pub requires_grad: bool,
    /// Its global shape.
    #[serde(serialize_with = "numbers", deserialize_with = "dims")]
    pub shape: Dims,
}

impl KeyEntry {
    /// The path is left out where the key says it all.
    pub fn new(key: String, path: KeyPath, tensor: Option<TensorFacts>) -> KeyEntry {
        let alone = matches!(path.as_slice(), [PathSegment::Key(only)] if *only == key);
        KeyEntry { key, path: (!alone).then_some(path), tensor }
    }

    /// The path, also where it is the key alone.
    pub fn key_path(&self) -> KeyPath {
        self.path.clone().unwrap_or_else(|| vec![PathSegment::Key(self.key.clone())])
    }
}

fn dtype_code<S: Serializer>(dtype: &DType, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u8(dtype.code())
}

fn dtype_of<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
    let code = u8::deserialize(deserializer)?;
    DType::from_code(code).ok_or_else(|| serde::de::Error::custom(format_args!("unknown dtype code {code}")))
}

fn numbers<S: Serializer>(shape: &Dims, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(shape)
}

fn dims<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Dims, D::Error> {
    Ok(Dims::from_vec(Vec::deserialize(deserializer)?))
}
