//! Which parameters lie in the flat buffers of Megatron's distributed optimizer, and where: what `dp_reshardable` checkpoints
//! do not say. Megatron knows it while it runs; written down once it serves every checkpoint of that training.
//!
//! ```json
//! {
//!   "version": 1,
//!   "buckets": [
//!     {
//!       "key": "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0",
//!       "elements": 640,
//!       "parameters": [
//!         { "name": "decoder.layers.0.fc1.weight", "start": 0, "shape": [16, 8], "offset": [0, 0], "of": [32, 8] },
//!         { "name": "decoder.layers.0.fc1.bias", "start": 128, "shape": [16], "offset": [0], "of": [32] }
//!       ]
//!     }
//!   ]
//! }
//! ```

use serde::Deserialize;

use crate::error::{Error, Result};

/// How large a file of a map may be.
const MAX_MAP_BYTES: u64 = 1 << 30;
const VERSION: u64 = 1;

/// Which parameters lie where in the buckets of a distributed optimizer.
#[derive(Debug, Clone)]
pub struct ParameterMap {
    /// What it is called in messages: a file's name.
    pub(super) origin: String,
    /// The buckets of all model parallel ranks.
    pub(super) buckets: Vec<MappedBucket>,
}

/// One bucket of a buffer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MappedBucket {
    /// What its keys in the checkpoint start with: all before `.param`, `.exp_avg`, …
    pub(super) key: String,
    /// How many elements it has, without the padding at its end.
    pub(super) elements: u64,
    /// What lies in it, in any order.
    pub(super) parameters: Vec<MappedParameter>,
}

/// A box of a parameter, whose elements lie end to end in a bucket.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MappedParameter {
    /// The key of the parameter in the model's state dict.
    pub(super) name: String,
    /// The first of its elements in the bucket.
    pub(super) start: u64,
    /// The sizes of the box.
    pub(super) shape: Vec<u64>,
    /// Where the box starts in the parameter; its start, where this is left out.
    #[serde(default)]
    pub(super) offset: Option<Vec<u64>>,
    /// The shape of the whole parameter; that of the box, where this is left out.
    #[serde(default)]
    pub(super) of: Option<Vec<u64>>,
}

impl MappedParameter {
    /// The whole parameter's shape.
    pub(super) fn whole(&self) -> &[u64] {
        self.of.as_deref().unwrap_or(&self.shape)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    version: u64,
    buckets: Vec<MappedBucket>,
}

impl ParameterMap {
    /// Reads a map from JSON. `origin` is what it is called in messages: a file's name.
    pub fn parse(text: &str, origin: &str) -> Result<ParameterMap> {
        let invalid = |detail: String| Error::invalid(format!("{origin} is not a map of parameters: {detail}"));
        let written: Written = serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
        if written.version != VERSION {
            return Err(invalid(format!("it is of version {}, this reshard knows {VERSION}", written.version)));
        }
        for bucket in &written.buckets {
            for parameter in &bucket.parameters {
                let name = &parameter.name;
                let sizes = reshard_layout::volume_of(&parameter.shape);
                let end = sizes.ok().and_then(|elements| parameter.start.checked_add(elements));
                if end.is_none_or(|end| end > bucket.elements) {
                    let (start, shape, elements) = (parameter.start, &parameter.shape, bucket.elements);
                    return Err(invalid(format!(
                        "{name:?}, a box of {shape:?} from element {start} on, does not fit into the {elements} elements of {}",
                        bucket.key
                    )));
                }
                let zeros = vec![0; parameter.shape.len()];
                let offset = parameter.offset.as_ref().unwrap_or(&zeros);
                let inside = reshard_layout::Region::new(offset, &parameter.shape)
                    .and_then(|region| region.check_inside(parameter.whole()));
                if let Err(error) = inside {
                    return Err(invalid(format!("{name:?} in {}: {error}", bucket.key)));
                }
            }
        }
        Ok(ParameterMap { origin: origin.to_owned(), buckets: written.buckets })
    }

    /// Reads a map from a file.
    pub fn read(path: &str) -> Result<ParameterMap> {
        let failed = |error: std::io::Error| Error::invalid(format!("cannot read the map of parameters {path}: {error}"));
        let size = std::fs::metadata(path).map_err(failed)?.len();
        if size > MAX_MAP_BYTES {
            return Err(Error::invalid(format!("the map of parameters {path} has {size} bytes, which is not a map")));
        }
        ParameterMap::parse(&std::fs::read_to_string(path).map_err(failed)?, path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(parameter: &str) -> std::result::Result<ParameterMap, String> {
        let text = format!(r#"{{"version": 1, "buckets": [{{"key": "b", "elements": 10, "parameters": [{parameter}]}}]}}"#);
        ParameterMap::parse(&text, "map.json").map_err(|error| error.to_string())
    }

    #[test]
    fn a_map_is_proven_when_it_is_read() {
        let map = parse(r#"{"name": "w", "start": 4, "shape": [2, 3]}"#).unwrap();
        assert_eq!(map.buckets[0].parameters[0].whole(), [2, 3]);
        for (parameter, words) in [
            (r#"{"name": "w", "start": 5, "shape": [2, 3]}"#, "does not fit into the 10 elements"),
            (r#"{"name": "w", "start": 0, "shape": [4294967296, 4294967296]}"#, "does not fit"),
            (r#"{"name": "w", "start": 0, "shape": [2], "offset": [3], "of": [4]}"#, "\"w\" in b"),
            (r#"{"name": "w", "start": 0, "shape": [2], "of": [4, 4]}"#, "\"w\" in b"),
            (r#"{"name": "w", "start": -1, "shape": [2]}"#, "line 1"),
            (r#"{"name": "w", "shape": [2]}"#, "missing field `start`"),
            (r#"{"name": "w", "start": 0, "shape": [2], "stride": 1}"#, "unknown field `stride`"),
        ] {
            let error = parse(parameter).unwrap_err();
            assert!(error.contains(words) && error.contains("map.json"), "{error}");
        }
        assert!(ParameterMap::parse(r#"{"version": 2, "buckets": []}"#, "m").unwrap_err().to_string().contains("version 2"));
    }
}
