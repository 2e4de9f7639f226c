//! Block-scaled weights: codes of a small type in one tensor, what to multiply them with in another. The two are one weight, and
//! whoever wants its values gets codes times scales; codes without their scales are no values, and nothing casts them.

mod block;

use indexmap::IndexMap;
use reshard_formats::DType;

use self::block::{block_of, configured};
use crate::cast::holds_values;
use crate::checkpoint::{
    Catalog, CatalogEntry, CatalogKind, CatalogTensor, Checkpoint, Computed, Formula, Input, ScaledWeight, Weights,
};
use crate::error::Result;
use crate::seen;

/// What is put behind the name of a float8 tensor for that of its scales.
const BEHIND: [&str; 4] = ["_scale_inv", "_scales_inv", "_scale", "_scales"];
/// What is behind the name of a weight for that of its packed codes.
const BLOCKS: &str = "_blocks";
/// The scales of a weight that bitsandbytes made eight-bit integers.
const BITSANDBYTES: &str = "SCB";
/// Elements that share one exponent in the MX formats.
const SHARED: u64 = 32;
/// Bytes of a row of four-bit codes that has one scale (MXFP4).
const PACKED: u64 = 16;

pub(crate) fn is_float8(dtype: DType) -> bool {
    matches!(dtype, DType::Float8E4M3Fn | DType::Float8E5M2 | DType::Float8E4M3Fnuz | DType::Float8E5M2Fnuz)
}

/// Whether elements of a type may be codes of eight bits: float8, or integers (`weight` with `weight_scale`).
pub(crate) fn may_be_codes(dtype: DType) -> bool {
    is_float8(dtype) || dtype == DType::Int8
}

/// The key of a stored tensor's scales, if it is one of codes: a tensor of eight bits with scales beside it, or packed blocks.
pub(crate) fn scales_of<'c>(catalog: &'c Catalog, key: &str, entry: &CatalogEntry) -> Option<&'c str> {
    let CatalogKind::Tensor(tensor) = &entry.kind else { return None };
    let found = |name: String| {
        let (_, name, beside) = catalog.entries.get_full(name.as_str())?;
        matches!(beside.kind, CatalogKind::Tensor(_)).then_some(name.as_str())
    };
    if is_float8(tensor.dtype) {
        // DeepSeek's own files have `scale` beside `weight`.
        let beside = key.strip_suffix("weight").filter(|_| tensor.shape.len() >= 2);
        let behind = BEHIND.iter().find_map(|behind| found(format!("{key}{behind}")));
        return behind.or_else(|| found(format!("{}scale", beside?)));
    }
    // Integers are what they are, unless they are a weight.
    if let (DType::Int8, Some(above)) = (tensor.dtype, key.strip_suffix("weight")) {
        return [format!("{key}_scale"), format!("{key}_scale_inv"), format!("{above}{BITSANDBYTES}")]
            .into_iter()
            .find_map(found);
    }
    let packed = key.strip_suffix(BLOCKS).filter(|_| tensor.dtype == DType::UInt8)?;
    found(format!("{packed}_scales"))
}

/// Whether a key is one that only quantised models have: scales of weights or of inputs, under the names of the libraries that
/// write them. `logit_scale` and the like are parameters of plain models.
fn names_scales(key: &str) -> bool {
    let last = key.rsplit('.').next().unwrap_or(key);
    let whole =
        ["weight_scale", "weight_scale_2", "scale_weight", "input_scale", "scale_input", "activation_scale", "scaled_fp8"];
    last.ends_with("_scale_inv") || last.ends_with("_scales_inv") || whole.contains(&last)
}

impl Checkpoint {
    /// The block-scaled weights; looked for on first use.
    pub(crate) fn scaled_weights(&self) -> &Weights {
        self.weights.get_or_init(|| weights(self))
    }

    /// A stored tensor as the numbers that it stands for: codes as the weight that they and their scales are, all else as it is.
    pub(crate) fn values(&self, key: &str) -> Result<&CatalogTensor> {
        let stored = self.tensor(key)?;
        let name = match stored.dtype {
            dtype if may_be_codes(dtype) => Some(key),
            DType::UInt8 => key.strip_suffix(BLOCKS),
            _ => None,
        };
        let Some(name) = name else { return Ok(stored) };
        let weight = self.scaled_weights().get(name).and_then(|weight| weight.as_ref().ok());
        Ok(weight.filter(|weight| weight.codes == key).and_then(ScaledWeight::tensor).unwrap_or(stored))
    }
}

fn weights(checkpoint: &Checkpoint) -> Weights {
    let catalog = checkpoint.catalog();
    let small = |tensor: &CatalogTensor| may_be_codes(tensor.dtype) || tensor.dtype == DType::UInt8;
    let mut found = Weights::new();
    let mut bare = Vec::new();
    let mut config = None;
    for (key, entry) in &catalog.entries {
        let CatalogKind::Tensor(tensor) = &entry.kind else { continue };
        if !small(tensor) {
            continue;
        }
        let Some(scales) = scales_of(catalog, key, entry) else {
            let packed = key.ends_with(BLOCKS) && tensor.shape.len() >= 3 && tensor.shape.last() == Some(&PACKED);
            if is_float8(tensor.dtype) || packed {
                bare.push((key, packed));
            }
            continue;
        };
        let config = config.get_or_insert_with(|| configured(checkpoint));
        let made = match config {
            Ok(config) => weight(catalog, key, entry, scales, config.block.as_deref()),
            Err(why) => Err(why.clone()),
        };
        let name = if may_be_codes(tensor.dtype) { Some(key.as_str()) } else { key.strip_suffix(BLOCKS) };
        // Bytes that only look like packed codes.
        let Some(name) = name.filter(|name| *name == key || !catalog.entries.contains_key(*name)) else { continue };
        found.insert(name.to_owned(), made);
    }
    // Plain float8 tensors are numbers as they are. Beside scaled ones, beside scales of whatever else, or by the model's settings
    // they are codes, and their scales are missing. Settings that cannot be read rule nothing out.
    let told =
        || catalog.entries.keys().any(|key| names_scales(key)) || configured(checkpoint).map_or(true, |config| config.scaled);
    let scaled = !found.is_empty() || (!bare.is_empty() && told());
    for (key, packed) in bare.into_iter().filter(|(_, packed)| *packed || scaled) {
        let (name, behind) = match packed {
            true => (key.strip_suffix(BLOCKS).unwrap_or(key), "_scales"),
            false => (key.as_str(), BEHIND[0]),
        };
        found
            .insert(name.to_owned(), Err(format!("{key:?} is codes whose scales, {:?}, are missing", format!("{name}{behind}"))));
    }
    found
}

fn weight(
    catalog: &Catalog,
    key: &str,
    entry: &CatalogEntry,
    scales_key: &str,
    block: Option<&[u64]>,
) -> std::result::Result<ScaledWeight, String> {
    let Some(CatalogEntry { kind: CatalogKind::Tensor(scales), .. }) = catalog.entries.get(scales_key) else {
        return Err(format!("{scales_key:?} is not a tensor"));
    };
    let CatalogKind::Tensor(codes) = &entry.kind else { return Err(format!("{key:?} is not a tensor")) };
    if scales_key.ends_with(BITSANDBYTES) {
        return Err(format!(
            "{key:?} is codes of bitsandbytes, scaled by {scales_key:?}, which are not computed here; dequantise them there"
        ));
    }
    let zero = format!("{key}_zero_point");
    if catalog.entries.contains_key(&zero) {
        return Err(format!(
            "{key:?} is codes with zero points, {zero:?}, which are not computed here; dequantise them where they were made"
        ));
    }
    let input = |key: &str, tensor: &CatalogTensor| Input { key: key.to_owned(), tensor: tensor.copied() };
    let made = dequantised(input(key, codes), input(scales_key, scales), block)?;
    // As the models have them: experts' packed codes are stored row by row, and used as [expert, columns, rows].
    let made = match codes.dtype == DType::UInt8 && made.shape.len() == 3 {
        true => seen::permuted(&made, &[0, 2, 1])?,
        false => made,
    };
    let path = entry.path.clone().map(|mut path| {
        if let (Some(reshard_formats::PathSegment::Key(last)), true) = (path.last_mut(), codes.dtype == DType::UInt8) {
            *last = last.trim_end_matches(BLOCKS).to_owned();
        }
        path
    });
    let entry = CatalogEntry::tensor(path, made);
    Ok(ScaledWeight { codes: key.to_owned(), scales: scales_key.to_owned(), entry })
}

/// Codes times scales. The size of the blocks follows from the shapes where it is not given.
pub(crate) fn dequantised(codes: Input, scales: Input, block: Option<&[u64]>) -> std::result::Result<CatalogTensor, String> {
    if codes.tensor.dtype == DType::UInt8 {
        return Computed::new(Formula::Packed, vec![codes, scales])?.into_tensor();
    }
    if codes.tensor.dtype == DType::Int8 && matches!(scales.tensor.dtype, DType::Float8E8M0Fnu | DType::UInt8) {
        return packed_in_rows(codes, scales);
    }
    if codes.tensor.dtype == DType::Int8 && scales.key.ends_with("_inv") {
        let (codes, scales) = (codes.key, scales.key);
        return Err(format!("{codes:?} with {scales:?} may be integers or four-bit codes, and nothing says which"));
    }
    if !may_be_codes(codes.tensor.dtype) {
        let dtype = codes.tensor.dtype.name();
        return Err(format!("{:?} is {dtype}; float8, int8 and uint8 (MXFP4) codes have scales", codes.key));
    }
    let shape = codes.tensor.shape.clone();
    let fitted = match fitted(&shape, &scales.tensor.shape) {
        Some(fitted) => seen::reshaped(&scales.tensor, &fitted)?,
        None => scales.tensor,
    };
    let scales = Input { tensor: fitted, ..scales };
    let block = block_of(&codes.key, &shape, &scales.key, &scales.tensor.shape, block)?;
    // Bytes are exponents in the MX formats, which share one among the elements of a row's stretch; elsewhere nothing says what they are.
    let shared = || shape.last().map(|size| size.div_ceil(SHARED)) == scales.tensor.shape.last().copied();
    if !(holds_values(scales.tensor.dtype)
        || scales.tensor.dtype == DType::Float8E8M0Fnu
        || (scales.tensor.dtype == DType::UInt8 && shared()))
    {
        let dtype = scales.tensor.dtype.name();
        return Err(format!("{:?} are scales of type {dtype}, of which it is not known what they stand for", scales.key));
    }
    Computed::new(Formula::Scaled { block }, vec![codes, scales])?.into_tensor()
}

/// Four-bit codes, two in a byte, whose rows are not cut into blocks: each sixteen bytes of a row share an exponent.
fn packed_in_rows(codes: Input, scales: Input) -> std::result::Result<CatalogTensor, String> {
    let (shape, groups) = (codes.tensor.shape.clone(), scales.tensor.shape.clone());
    let fits = match (shape.split_last(), groups.split_last()) {
        (Some((bytes, rows)), Some((count, same))) => rows == same && count.checked_mul(PACKED) == Some(*bytes),
        _ => false,
    };
    if !fits {
        return Err(format!(
            "{:?} of shape {:?} and {:?} of shape {:?} are not rows of four-bit codes and an exponent for each 32 of them",
            codes.key,
            &shape[..],
            scales.key,
            &groups[..]
        ));
    }
    let mut blocks = groups.to_vec();
    blocks.push(PACKED);
    let codes = Input { tensor: seen::reshaped(&codes.tensor, &blocks)?, ..codes };
    Computed::new(Formula::Packed, vec![codes, scales])?.into_tensor()
}

/// Scales of fewer dimensions, as of as many: one for all, or one for each row.
fn fitted(shape: &[u64], scales: &[u64]) -> Option<Vec<u64>> {
    if scales.len() == shape.len() {
        return None;
    }
    let mut fitted = vec![1; shape.len()];
    match (scales.iter().product::<u64>(), scales, fitted.first_mut()) {
        (1, ..) => Some(fitted),
        (rows, &[_], Some(first)) if shape.first() == Some(&rows) => {
            *first = rows;
            Some(fitted)
        }
        _ => None,
    }
}

/// A weight as codes and scales, in blocks.
pub(crate) fn quantised(
    weight: Input,
    dtype: DType,
    block: &[u64],
) -> std::result::Result<(CatalogTensor, CatalogTensor), String> {
    if !matches!(dtype, DType::Float8E4M3Fn | DType::Float8E5M2) {
        return Err(format!("weights are quantised to float8_e4m3fn or float8_e5m2, not to {}", dtype.name()));
    }
    if !holds_values(weight.tensor.dtype) {
        return Err(format!("{:?} is {}, and not a float of 16 bits or more", weight.key, weight.tensor.dtype.name()));
    }
    let missing = weight.tensor.shape.len().checked_sub(block.len());
    let Some(missing) = missing else {
        return Err(format!("blocks of {block:?} do not fit {:?} of shape {:?}", weight.key, &weight.tensor.shape[..]));
    };
    // Blocks are of the last dimensions; each index of those before has its own.
    let block: reshard_layout::Dims = std::iter::repeat_n(1, missing).chain(block.iter().copied()).collect();
    let again = Input { key: weight.key.clone(), tensor: weight.tensor.copied() };
    let codes = Computed::new(Formula::Codes { block: block.clone(), dtype }, vec![weight])?.into_tensor()?;
    let scales = Computed::new(Formula::Scales { block, dtype }, vec![again])?.into_tensor()?;
    Ok((codes, scales))
}

impl Catalog {
    /// All its entries with weights in place of codes and scales; what is wrong with one is an error.
    pub(crate) fn dequantised(&self, weights: &Weights, dtype: DType) -> std::result::Result<Catalog, String> {
        let mut entries = IndexMap::with_capacity(self.entries.len());
        let mut by_codes: IndexMap<&str, (&str, &ScaledWeight)> = IndexMap::new();
        let mut gone = std::collections::HashSet::new();
        for (name, weight) in weights {
            let weight = weight.as_ref().map_err(Clone::clone)?;
            by_codes.insert(&weight.codes, (name, weight));
            gone.insert(weight.scales.as_str());
        }
        for (key, entry) in &self.entries {
            if gone.contains(key.as_str()) {
                continue;
            }
            let (name, entry) = match by_codes.get(key.as_str()) {
                Some((name, weight)) => ((*name).to_owned(), weight.cast(dtype)?),
                None => (key.clone(), entry.copied()),
            };
            entries.insert(name, entry);
        }
        Ok(Catalog {
            format: self.format,
            files: self.files.clone(),
            entries,
            save_id: self.save_id.clone(),
            dcp_version: self.dcp_version.clone(),
            writer: self.writer.clone(),
            notes: self.notes.clone(),
        })
    }
}

impl ScaledWeight {
    /// The weight in another type.
    fn cast(&self, dtype: DType) -> std::result::Result<CatalogEntry, String> {
        let entry = self.entry.copied();
        Ok(match entry.kind {
            CatalogKind::Tensor(tensor) => CatalogEntry::tensor(entry.path, seen::cast(tensor, dtype)?),
            value @ CatalogKind::Value(_) => CatalogEntry { path: entry.path, kind: value },
        })
    }

    /// The weight's tensor.
    pub(crate) fn tensor(&self) -> Option<&CatalogTensor> {
        match &self.entry.kind {
            CatalogKind::Tensor(tensor) => Some(tensor),
            CatalogKind::Value(_) => None,
        }
    }
}
