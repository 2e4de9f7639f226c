//! Reading the header of a safetensors file.
//!
//! The crate reads headers only from a buffer that holds the whole file, and lets the last of two equal
//! names win; here the JSON is read through positioned reads and names are proven unique, then the
//! crate's own validation decides.

use std::collections::HashMap;
use std::fmt;

use indexmap::IndexMap;
use reshard_layout::{Dims, Region};
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::dtype::to_torch;
use super::error::SafetensorsError;
use crate::DType;
use crate::read_at::{ReadAt, read_vec};

/// Largest header that is read; the limit of the safetensors crate.
const MAX_HEADER_LEN: u64 = 100_000_000;
/// Where DCP keeps the place of each tensor within a larger one.
pub const SHARDING_INFO: &str = "DCP_SHARDING_INFO";
/// The header's entry that is not a tensor.
const METADATA: &str = "__metadata__";

/// The proven header of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SafetensorsFile {
    /// The tensors in the order of the header.
    pub tensors: IndexMap<String, SafetensorsTensor>,
    /// The texts of `__metadata__`, sorted by name.
    pub metadata: IndexMap<String, String>,
    /// Whether the file says where its tensors lie in larger ones, as DCP's files do.
    pub is_dcp: bool,
}

/// One tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SafetensorsTensor {
    /// The element type.
    pub dtype: DType,
    /// The shape of what is in this file; data is row-major and little-endian.
    pub shape: Dims,
    /// Where the data starts in the file.
    pub data_offset: u64,
    /// Bytes of data.
    pub data_len: u64,
    /// Where this lies in the whole tensor: at zero, unless DCP's saved offsets say otherwise.
    pub region: Region,
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

struct RawHeader {
    tensors: IndexMap<String, RawTensor>,
    metadata: IndexMap<String, String>,
}

impl SafetensorsFile {
    /// Reads the header of a file.
    pub fn open(src: &dyn ReadAt) -> Result<SafetensorsFile, SafetensorsError> {
        let file_len = src.len();
        let read =
            |offset, length| read_vec(src, offset, length).map_err(|source| SafetensorsError::Io { offset, length, source });
        let length = read(0, 8)?;
        let length = length.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        if length > MAX_HEADER_LEN || length > file_len - 8 {
            return Err(SafetensorsError::HeaderLength { length, file_len });
        }
        let header = read(8, length)?;
        let file = SafetensorsFile::parse(&header)?;
        let actual = file_len - 8 - length;
        let expected = file.tensors.values().map(|tensor| tensor.data_len).sum();
        if expected != actual {
            return Err(SafetensorsError::DataLength { expected, actual });
        }
        Ok(file)
    }

    /// Parses a header's JSON, given without the eight bytes of its length.
    pub fn parse(header: &[u8]) -> Result<SafetensorsFile, SafetensorsError> {
        let raw: RawHeader = serde_json::from_slice(header).map_err(SafetensorsError::Json)?;
        let data_start = 8 + header.len() as u64;
        let is_dcp = raw.metadata.contains_key(SHARDING_INFO);
        let mut offsets = sharding_info(&raw.metadata)?;
        let mut tensors = IndexMap::with_capacity(raw.tensors.len());
        let mut infos = Vec::with_capacity(raw.tensors.len());
        for (key, tensor) in raw.tensors {
            let (safe, dtype, shape) = to_torch(&key, &tensor.dtype, &tensor.shape)?;
            let bad = |reason: String| SafetensorsError::BadTensor { key: key.clone(), reason };
            let size = |value: u64| usize::try_from(value).map_err(|_| bad("a size past this machine's".to_owned()));
            let (start, end) = tensor.data_offsets;
            infos.push((
                key.clone(),
                TensorInfo {
                    dtype: safe,
                    shape: tensor.shape.iter().map(|&value| size(value)).collect::<Result<_, _>>()?,
                    data_offsets: (size(start)?, size(end)?),
                },
            ));
            let offset = match offsets.remove(&key) {
                Some(offset) => offset,
                None if is_dcp => return Err(bad("DCP_SHARDING_INFO lacks it".to_owned())),
                None => vec![0; shape.len()],
            };
            let region = Region::new(&offset, &shape).map_err(|error| bad(error.to_string()))?;
            let described = SafetensorsTensor {
                dtype,
                shape: Dims::from_slice(&shape),
                data_offset: start.checked_add(data_start).ok_or_else(|| bad("its position overflows".to_owned()))?,
                data_len: end.saturating_sub(start),
                region,
            };
            tensors.insert(key, described);
        }
        infos.sort_by_key(|(_, info)| info.data_offsets);
        Metadata::new(None, infos).map_err(SafetensorsError::Invalid)?;
        Ok(SafetensorsFile { tensors, metadata: raw.metadata, is_dcp })
    }
}

#[derive(Deserialize)]
struct SavedOffsets {
    saved_offsets: Vec<u64>,
}

/// The offsets by tensor that DCP put into the metadata, if any.
fn sharding_info(metadata: &IndexMap<String, String>) -> Result<HashMap<String, Vec<u64>>, SafetensorsError> {
    let Some(text) = metadata.get(SHARDING_INFO) else {
        return Ok(HashMap::new());
    };
    let info: Unique<SavedOffsets> =
        serde_json::from_str(text).map_err(|error| SafetensorsError::ShardingInfo { reason: error.to_string() })?;
    let offsets = info.0.into_iter();
    Ok(offsets.map(|(key, offsets)| (key, offsets.saved_offsets)).collect())
}

/// A JSON object in which no name may occur twice.
pub(super) struct Unique<V>(pub(super) IndexMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Unique<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct UniqueVisitor<V>(std::marker::PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueVisitor<V> {
            type Value = Unique<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique<V>, A::Error> {
                let mut entries = IndexMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    if entries.contains_key(&key) {
                        return Err(A::Error::custom(format_args!("{key:?} occurs twice")));
                    }
                    entries.insert(key, map.next_value()?);
                }
                Ok(Unique(entries))
            }
        }

        deserializer.deserialize_map(UniqueVisitor(std::marker::PhantomData))
    }
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;

        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut tensors = IndexMap::new();
                let mut metadata = None;
                while let Some(key) = map.next_key::<String>()? {
                    if key == METADATA && metadata.is_none() {
                        metadata = Some(map.next_value::<Option<Unique<String>>>()?);
                    } else if key == METADATA || tensors.contains_key(&key) {
                        map.next_value::<IgnoredAny>()?;
                        return Err(A::Error::custom(format_args!("{key:?} occurs twice")));
                    } else {
                        let tensor: RawTensor =
                            map.next_value().map_err(|error| A::Error::custom(format_args!("tensor {key:?}: {error}")))?;
                        tensors.insert(key, tensor);
                    }
                }
                let mut metadata = metadata.flatten().map(|map| map.0).unwrap_or_default();
                // Writers put these in any order.
                metadata.sort_unstable_keys();
                Ok(RawHeader { tensors, metadata })
            }
        }

        deserializer.deserialize_map(HeaderVisitor)
    }
}
