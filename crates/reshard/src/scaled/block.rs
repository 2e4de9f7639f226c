//! How large the blocks are that have one scale: from the model's settings, or from the shapes.

use reshard_layout::Dims;
use reshard_storage::StorageError;

use crate::checkpoint::Checkpoint;

/// The file beside a model that says how it is quantised.
const CONFIG: &str = "config.json";
/// What ModelOpt puts beside it, instead of an entry in it.
const QUANTISED: &str = "hf_quant_config.json";
/// No such file is larger.
const MOST_BYTES: u64 = 16 << 20;
/// The size that nearly all models have.
const USUAL: u64 = 128;

/// What a model's settings say of its quantisation.
#[derive(Debug, Default)]
pub(super) struct Configured {
    /// Whether weights have scales.
    pub(super) scaled: bool,
    /// `weight_block_size`.
    pub(super) block: Option<Vec<u64>>,
}

/// Reads `quantization_config` of `config.json`, where there is one.
pub(super) fn configured(checkpoint: &Checkpoint) -> Result<Configured, String> {
    let beside = || {
        let there = checkpoint.store().exists(QUANTISED).map_err(|error| format!("{QUANTISED} cannot be looked for: {error}"))?;
        Ok(Configured { scaled: there, block: None })
    };
    let bytes = match checkpoint.store().read(CONFIG, MOST_BYTES) {
        Ok(bytes) => bytes,
        Err(StorageError::NotFound { .. }) => return beside(),
        Err(error) => return Err(format!("{CONFIG}, which says how weights are scaled, cannot be read: {error}")),
    };
    let config: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|error| format!("{CONFIG}, which says how weights are scaled: {error}"))?;
    let Some(quantisation) = config.get("quantization_config").filter(|found| found.is_object()) else {
        return beside();
    };
    let block = match quantisation.get("weight_block_size") {
        None | Some(serde_json::Value::Null) => None,
        Some(sizes) => {
            let read = |sizes: &serde_json::Value| -> Option<Vec<u64>> {
                sizes.as_array()?.iter().map(|size| size.as_u64().filter(|size| *size > 0)).collect()
            };
            let sizes = read(sizes).ok_or_else(|| format!("weight_block_size of {CONFIG} is {sizes}, no list of sizes"))?;
            Some(sizes)
        }
    };
    Ok(Configured { scaled: true, block })
}

/// The size of the blocks of a tensor along each dimension. What is given counts for the last dimensions.
pub(super) fn block_of(
    key: &str,
    shape: &[u64],
    scales_key: &str,
    scales: &[u64],
    given: Option<&[u64]>,
) -> Result<Dims, String> {
    let what = || format!("{scales_key:?} of shape {scales:?} are not scales of {key:?} of shape {shape:?}");
    if shape.len() != scales.len() {
        return Err(what());
    }
    let given = given.filter(|given| given.len() <= shape.len());
    let mut block = Dims::with_capacity(shape.len());
    for (dim, (&size, &count)) in shape.iter().zip(scales).enumerate() {
        let fits = |block: u64| size.div_ceil(block) == count;
        let told = given.and_then(|given| given.get((dim + given.len()).checked_sub(shape.len())?).copied());
        let found = match told {
            // Scales for whole rows, or one for all, whatever the settings say of other weights.
            Some(told) if fits(told) => Some(told),
            _ if size == 0 && count == 0 => Some(1),
            _ if count == size => Some(1),
            _ if count == 1 => Some(size),
            _ => None,
        };
        let found = match found {
            Some(found) => found,
            // Blocks are of rows and columns: no scale is that of several experts.
            None if told.is_none() && dim + 2 < shape.len() => return Err(what()),
            None if told.is_none() => guessed(size, count).ok_or_else(|| {
                format!("{}; if they are, weight_block_size in {CONFIG}, or a step that says block, tells how", what())
            })?,
            None => return Err(format!("{}, in blocks of {:?}", what(), given.unwrap_or_default())),
        };
        block.push(found);
    }
    Ok(block)
}

/// The one size of blocks that makes so many of a dimension: the usual one, else a power of two, else the only one.
fn guessed(size: u64, count: u64) -> Option<u64> {
    if count == 0 || size == 0 || count > size {
        return None;
    }
    if size.div_ceil(USUAL) == count {
        return Some(USUAL);
    }
    // Sizes b with ceil(size / b) == count.
    let (least, most) = (size.div_ceil(count), if count == 1 { size } else { (size - 1) / (count - 1) });
    let power = least.next_power_of_two();
    match (least..=most).contains(&power) {
        true if !(least..=most).contains(&(power * 2)) => Some(power),
        _ if least == most => Some(least),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_from_shapes_where_they_can() {
        let found = |shape: &[u64], scales: &[u64], given: Option<&[u64]>| block_of("w", shape, "s", scales, given);
        assert_eq!(found(&[300, 256], &[3, 2], None).unwrap()[..], [128, 128]);
        assert_eq!(found(&[300, 256], &[3, 2], Some(&[128, 128])).unwrap()[..], [128, 128]);
        assert_eq!(found(&[8, 300, 256], &[8, 3, 2], Some(&[128, 128])).unwrap()[..], [1, 128, 128]);
        assert!(found(&[3, 40, 50], &[2, 3, 4], Some(&[16, 16])).unwrap_err().contains("are not scales of"));
        assert_eq!(found(&[300, 256], &[300, 1], Some(&[128, 128])).unwrap()[..], [1, 256]);
        assert_eq!(found(&[64, 60], &[4, 15], None).unwrap()[..], [16, 4]);
        // Blocks of 34 to 49 rows make three.
        assert!(found(&[100, 7], &[3, 7], None).unwrap_err().contains("weight_block_size"));
        assert!(found(&[64, 64], &[3, 4], Some(&[16, 16])).unwrap_err().contains("in blocks of [16, 16]"));
        assert!(found(&[64, 64], &[4], None).is_err());
    }

    #[test]
    fn no_size_is_guessed_that_does_not_fit() {
        for size in 1..200u64 {
            for count in 1..=size {
                if let Some(block) = guessed(size, count) {
                    assert_eq!(size.div_ceil(block), count, "{size} {count} {block}");
                }
            }
        }
    }
}
