//! Writing the header of a safetensors file, so that data goes straight from memory to its place.

use indexmap::IndexMap;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value, json};

use super::dtype::to_safetensors;
use super::error::SafetensorsError;
use super::header::SHARDING_INFO;
use crate::DType;

/// A tensor that a file is to hold.
#[derive(Clone, Copy, Debug)]
pub struct SafetensorsSpec<'a> {
    /// The tensor's name.
    pub key: &'a str,
    /// The element type.
    pub dtype: DType,
    /// The shape of what this file holds of it.
    pub shape: &'a [u64],
    /// For DCP's variant: where that lies in the whole tensor.
    pub saved_offsets: Option<&'a [u64]>,
}

/// Where everything goes in a safetensors file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SafetensorsHeader {
    /// The bytes at the file's start, up to the data.
    pub head: Vec<u8>,
    /// Position and length in the file of each tensor's data, in the order of the specs.
    pub placements: Vec<(u64, u64)>,
    /// The file's length.
    pub total_len: u64,
}

struct Placed<'a> {
    index: usize,
    key: &'a str,
    dtype: Dtype,
    shape: Vec<u64>,
    len: u64,
}

impl SafetensorsHeader {
    /// Lays out a file: tensors by falling alignment, then by name, as the safetensors library does.
    ///
    /// If any spec has saved offsets, all must, and the file is one of DCP's.
    pub fn new(
        specs: &[SafetensorsSpec<'_>],
        metadata: &IndexMap<String, String>,
    ) -> Result<SafetensorsHeader, SafetensorsError> {
        let mut placed = specs.iter().enumerate().map(|(index, spec)| place(index, spec)).collect::<Result<Vec<_>, _>>()?;
        placed.sort_by(|a, b| b.dtype.cmp(&a.dtype).then(a.key.cmp(b.key)));
        for pair in placed.windows(2) {
            if let [a, b] = pair
                && a.key == b.key
            {
                return Err(duplicate(a.key));
            }
        }

        let mut header = Map::with_capacity(placed.len() + 1);
        let mut texts: Map<String, Value> = Map::new();
        for (key, text) in metadata {
            texts.insert(key.clone(), Value::String(text.clone()));
        }
        if let Some(info) = sharding_info(specs)? {
            texts.entry("format").or_insert_with(|| Value::String("pt".to_owned()));
            texts.insert("DCP_VERSION".to_owned(), Value::String("1.0".to_owned()));
            texts.insert(SHARDING_INFO.to_owned(), Value::String(info));
        }
        if !texts.is_empty() {
            header.insert("__metadata__".to_owned(), Value::Object(texts));
        }
        let mut infos = Vec::with_capacity(placed.len());
        let mut relative = vec![(0, 0); specs.len()];
        let mut cursor: u64 = 0;
        for tensor in &placed {
            let end = cursor.checked_add(tensor.len).ok_or_else(|| too_large(tensor.key))?;
            let described = json!({
                "dtype": tensor.dtype.to_string(),
                "shape": tensor.shape,
                "data_offsets": [cursor, end],
            });
            if header.insert(tensor.key.to_owned(), described).is_some() {
                return Err(duplicate(tensor.key));
            }
            if let Some(slot) = relative.get_mut(tensor.index) {
                *slot = (cursor, tensor.len);
            }
            infos.push((tensor.key.to_owned(), info(tensor, cursor, end)?));
            cursor = end;
        }
        Metadata::new(None, infos).map_err(SafetensorsError::Invalid)?;

        let mut json = serde_json::to_vec(&header).map_err(SafetensorsError::Json)?;
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut head = Vec::with_capacity(8 + json.len());
        head.extend_from_slice(&(json.len() as u64).to_le_bytes());
        head.extend_from_slice(&json);
        let start = head.len() as u64;
        let total_len = start.checked_add(cursor).ok_or_else(|| too_large("the file"))?;
        Ok(SafetensorsHeader {
            head,
            placements: relative.into_iter().map(|(offset, len)| (offset + start, len)).collect(),
            total_len,
        })
    }
}

fn place<'a>(index: usize, spec: &SafetensorsSpec<'a>) -> Result<Placed<'a>, SafetensorsError> {
    if spec.key == "__metadata__" {
        return Err(SafetensorsError::BadTensor {
            key: spec.key.to_owned(),
            reason: "this name is reserved by safetensors".to_owned(),
        });
    }
    let (dtype, shape) = to_safetensors(spec.key, spec.dtype, spec.shape)?;
    let len =
        spec.shape.iter().try_fold(spec.dtype.size(), |len, &size| len.checked_mul(size)).ok_or_else(|| too_large(spec.key))?;
    Ok(Placed { index, key: spec.key, dtype, shape, len })
}

fn info(tensor: &Placed<'_>, start: u64, end: u64) -> Result<TensorInfo, SafetensorsError> {
    let size = |value: u64| usize::try_from(value).map_err(|_| too_large(tensor.key));
    Ok(TensorInfo {
        dtype: tensor.dtype,
        shape: tensor.shape.iter().map(|&value| size(value)).collect::<Result<_, _>>()?,
        data_offsets: (size(start)?, size(end)?),
    })
}

fn sharding_info(specs: &[SafetensorsSpec<'_>]) -> Result<Option<String>, SafetensorsError> {
    if specs.iter().all(|spec| spec.saved_offsets.is_none()) {
        return Ok(None);
    }
    let mut info = Map::with_capacity(specs.len());
    for spec in specs {
        let offsets = spec.saved_offsets.unwrap_or_default();
        if spec.saved_offsets.is_none() || offsets.len() != spec.shape.len() {
            return Err(SafetensorsError::BadTensor {
                key: spec.key.to_owned(),
                reason: format!("saved offsets {:?} don't fit shape {:?}", spec.saved_offsets, spec.shape),
            });
        }
        info.insert(spec.key.to_owned(), json!({ "saved_offsets": offsets }));
    }
    serde_json::to_string(&info).map(Some).map_err(SafetensorsError::Json)
}

fn duplicate(key: &str) -> SafetensorsError {
    SafetensorsError::Duplicate { key: key.to_owned(), place: "the tensors of one file" }
}

fn too_large(key: &str) -> SafetensorsError {
    SafetensorsError::BadTensor { key: key.to_owned(), reason: "its size overflows".to_owned() }
}
