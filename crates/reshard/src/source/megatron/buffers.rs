//! Flat buffers of the distributed optimizer, seen as the parameters that a map says lie in them.

use std::collections::{BTreeMap, HashMap, HashSet};

use indexmap::IndexMap;
use reshard_layout::{ByteLayout, Dims, LayoutError, Region, flat_pieces, volume_of};

use super::flattened::part_of;
use super::parameter_map::{MappedBucket, MappedParameter, ParameterMap};
use crate::checkpoint::{
    BUFFER_BUCKET as BUCKET, BUFFER_GROUP as GROUP, CatalogEntry, CatalogKind, CatalogTensor, Checkpoint, StoredChunk,
    is_flat_buffer,
};
use crate::error::{Error, Result};

/// What `fully_reshardable` checkpoints call the optimizer's state: slot and parameter follow.
const STATE: &str = "optimizer.state";

impl Checkpoint {
    /// This checkpoint of Megatron's distributed optimizer with its state by parameter, `optimizer.state.<slot>.<parameter>`, as
    /// in a `fully_reshardable` one. Nothing is read for it.
    pub fn with_parameters(self, map: &ParameterMap) -> Result<Checkpoint> {
        let entries = seen(&self, map)?;
        Ok(self.seen_as(entries))
    }
}

/// A bucket's place in a stored tensor: those that one rank gathered lie end to end.
struct Bucket<'m> {
    mapped: &'m MappedBucket,
    start: u64,
}

fn seen(checkpoint: &Checkpoint, map: &ParameterMap) -> Result<IndexMap<String, CatalogEntry>> {
    let wrong = |detail: String| Error::invalid(format!("{} does not fit {}: {detail}", map.origin, checkpoint.path()));
    // A checkpoint beside it, which a comparison or an average opens with the same map, may have its state by name.
    if !checkpoint.catalog.has_flat_buffers() {
        return Ok(checkpoint.catalog.entries.iter().map(|(key, entry)| (key.clone(), entry.copied())).collect());
    }
    let by_prefix = by_prefix(checkpoint, map);
    let mut entries = IndexMap::with_capacity(checkpoint.catalog.entries.len());
    let mut made: IndexMap<String, CatalogTensor> = IndexMap::new();
    let mut used: HashSet<&str> = HashSet::new();
    for (key, entry) in &checkpoint.catalog.entries {
        let found = key.rsplit_once('.').and_then(|(prefix, slot)| Some((by_prefix.get(prefix)?, slot)));
        let (Some((buckets, slot)), CatalogKind::Tensor(tensor)) = (found, &entry.kind) else {
            if is_flat_buffer(key, entry) {
                return Err(wrong(format!("it does not say which parameters lie in {key:?}")));
            }
            entries.insert(key.clone(), entry.copied());
            continue;
        };
        let elements = buckets.iter().map(|bucket| bucket.mapped.elements).fold(0, u64::saturating_add);
        let stored = tensor.shape.as_slice();
        // Older checkpoints keep the padding at a bucket's end.
        let padded = buckets.len() == 1 && matches!(stored, [stored] if *stored > elements);
        if stored != [elements] && !padded {
            let detail = format!("it has {elements} elements for {key:?}, which is of shape {stored:?}: sizes disagree");
            return Err(wrong(detail));
        }
        for bucket in buckets {
            used.insert(&bucket.mapped.key);
            for parameter in &bucket.mapped.parameters {
                let name = format!("{STATE}.{slot}.{}", parameter.name);
                let whole = parameter.whole();
                let new = || CatalogTensor::new(tensor.dtype, Dims::from_slice(whole), false, Vec::new());
                let into = made.entry(name).or_insert_with(new);
                if into.shape.as_slice() != whole || into.dtype != tensor.dtype {
                    let (a, b) = (into.shape.as_slice(), whole);
                    return Err(wrong(format!("{:?} is {a:?} in one bucket and {b:?} in another", parameter.name)));
                }
                place(into, tensor, bucket.start, parameter).map_err(|error| wrong(format!("{:?}: {error}", parameter.name)))?;
            }
        }
    }
    if let Some(unused) = map.buckets.iter().find(|bucket| !used.contains(bucket.key.as_str())) {
        return Err(wrong(format!("the checkpoint has no {:?}, which the map names", unused.key)));
    }
    for (name, tensor) in made {
        let held = tensor.chunks.iter().map(|chunk| chunk.region.volume()).fold(0, u64::saturating_add);
        let all = tensor.elements();
        if held != all {
            return Err(wrong(format!(
                "its buckets have {held} of the {all} elements of {name:?}; name the buckets of all ranks"
            )));
        }
        if entries.insert(name.clone(), CatalogEntry::tensor(None, tensor)).is_some() {
            return Err(wrong(format!("there is a {name:?} already")));
        }
    }
    Ok(entries)
}

/// The buckets of the map by what the keys of the checkpoint start with.
fn by_prefix<'m>(checkpoint: &Checkpoint, map: &'m ParameterMap) -> HashMap<String, Vec<Bucket<'m>>> {
    let mut gathered: BTreeMap<(&str, u64, &str, &str), BTreeMap<u64, &MappedBucket>> = BTreeMap::new();
    let mut all: HashMap<String, Vec<Bucket<'m>>> = HashMap::new();
    for mapped in &map.buckets {
        if let Some((chain, group, buffer, dtype, number)) = parsed(&mapped.key) {
            gathered.entry((chain, group, buffer, dtype)).or_default().insert(number, mapped);
        }
        all.insert(mapped.key.clone(), vec![Bucket { mapped, start: 0 }]);
    }
    // The same buckets where one rank gathered them: in a record of its own, or in the older format's file.
    let ranks = older_ranks(checkpoint);
    for ((chain, group, buffer, dtype), buckets) in gathered {
        let mut prefixes = vec![format!("{chain}{GROUP}{group}.param_state.{buffer}.{dtype}")];
        let rank = usize::try_from(group).ok().and_then(|group| ranks.get(group));
        prefixes.extend(rank.map(|rank| format!("{rank}distrib_optim.{buffer}.{dtype}")));
        for prefix in prefixes {
            let mut start = 0u64;
            let mut list = Vec::new();
            for mapped in buckets.values() {
                list.push(Bucket { mapped, start });
                start = start.saturating_add(mapped.elements);
            }
            all.insert(prefix, list);
        }
    }
    all
}

/// What comes before, model parallel rank, number of the buffer, its dtypes, and number of the bucket, as a bucket's key has
/// them.
fn parsed(key: &str) -> Option<(&str, u64, &str, &str, u64)> {
    let (chain, rest) = key.split_once(GROUP)?;
    let (group, rest) = rest.split_once(".gbuf_idx_")?;
    let (buffer, rest) = rest.split_once(".dtype_")?;
    let (dtype, bucket) = rest.rsplit_once(BUCKET)?;
    Some((chain, group.parse().ok()?, buffer, dtype, bucket.parse().ok()?))
}

/// The prefixes of the older format's ranks in the order in which Megatron numbers them: tensor parallel ranks first.
fn older_ranks(checkpoint: &Checkpoint) -> Vec<String> {
    let mut ranks: Vec<(Vec<u64>, String)> = Vec::new();
    let mut seen: HashSet<&str> = HashSet::new();
    for key in checkpoint.catalog.entries.keys() {
        let Some((rank, _)) = key.split_once(".distrib_optim.").filter(|(rank, _)| seen.insert(rank)) else { continue };
        let Some(numbers) = rank.strip_prefix("mp_rank_") else { continue };
        let mut numbers: Vec<u64> = numbers.split('_').filter_map(|text| text.parse().ok()).collect();
        numbers.reverse();
        ranks.push((numbers, format!("{rank}.")));
    }
    ranks.sort();
    match ranks.is_empty() {
        true => vec![String::new()],
        false => ranks.into_iter().map(|(_, prefix)| prefix).collect(),
    }
}

/// Adds the part of a parameter that lies in a bucket, which starts at element `start` of the stored tensor.
fn place(
    into: &mut CatalogTensor,
    stored: &CatalogTensor,
    start: u64,
    parameter: &MappedParameter,
) -> std::result::Result<(), LayoutError> {
    let zeros = vec![0; parameter.shape.len()];
    let offset = parameter.offset.as_ref().unwrap_or(&zeros);
    let region = Region::new(offset, &parameter.shape)?;
    // Ranks that hold the same part hold the same.
    if into.chunks.iter().any(|chunk| region.contains(&chunk.region)) {
        return Ok(());
    }
    let first = start.saturating_add(parameter.start);
    let range = Region::new(&[first], &[volume_of(&parameter.shape)?])?;
    for chunk in &stored.chunks {
        let Some(common) = chunk.region.intersection(&range) else { continue };
        let (from, count) = (common.offsets()[0], common.sizes()[0]);
        // In the parameter's box, and in the chunk.
        let (in_box, in_chunk) = (from - first, from - chunk.region.offsets()[0]);
        for piece in flat_pieces(&parameter.shape, in_box, in_box + count)? {
            let window = ByteLayout::contiguous(piece.region.sizes(), 1)?.try_at(in_chunk + piece.start)?;
            let location = part_of(chunk, stored.dtype, window)?;
            into.chunks.push(StoredChunk { region: piece.region.translated(offset)?, file: chunk.file, location });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_buckets_say_which_buffer_they_are_of() {
        let key = "optimizer.distributed.dp_group_idx_3.gbuf_idx_1.dtype_(torch.bfloat16, torch.float32).bucket_idx_12";
        assert_eq!(parsed(key), Some(("", 3, "1", "(torch.bfloat16, torch.float32)", 12)));
    }
}
