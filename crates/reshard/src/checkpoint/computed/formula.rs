//! What is computed: shapes, what of the inputs a region needs, and the arithmetic, all of it in float32.

use reshard_formats::DType;
use reshard_layout::{Dims, Region};

use super::Input;
use crate::cast::{can_cast, cast};
use crate::error::{Geometry, Result};

/// How a tensor is computed from its inputs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Formula {
    /// Codes, each times the scale of its block. Blocks at the edges need not be full.
    Scaled { block: Dims },
    /// Pairs of four-bit codes (E2M1) in bytes, low half first, and a power of two for each row of bytes: MXFP4.
    Packed,
    /// A weight as codes of an eight-bit type, each block of its own scale.
    Codes { block: Dims, dtype: DType },
    /// The scales of these.
    Scales { block: Dims, dtype: DType },
    /// A weight `[out, in]` plus `scale` times `B · A`, with A `[rank, in]` and B `[out, rank]`; the transpose of the product
    /// where the weight is `[in, out]`.
    LowRank { scale: f32, transposed: bool },
    /// The input as it is, so that what was cast can be cast again.
    Same,
}

/// What the codes of four bits stand for.
const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

impl Formula {
    /// Shape and element type of what is computed, or why the inputs do not fit.
    pub(super) fn result(&self, inputs: &[Input]) -> std::result::Result<(Dims, DType), String> {
        let number = |input: &Input| match can_cast(input.tensor.dtype, DType::Float32) {
            true => Ok(()),
            false => Err(format!("{:?} is {}, which has no numbers", input.key, input.tensor.dtype.name())),
        };
        if !matches!(self, Formula::Same) {
            inputs.iter().try_for_each(number)?;
        }
        match (self, inputs) {
            (Formula::Scaled { block }, [codes, scales]) => {
                let expected = grid(&codes.tensor.shape, block);
                if expected.as_deref() != Some(&scales.tensor.shape[..]) {
                    return Err(format!(
                        "{:?} has shape {:?}, and blocks of {:?} of {:?} of shape {:?} need other scales",
                        scales.key,
                        &scales.tensor.shape[..],
                        &block[..],
                        codes.key,
                        &codes.tensor.shape[..],
                    ));
                }
                Ok((codes.tensor.shape.clone(), DType::Float32))
            }
            (Formula::Packed, [blocks, scales]) => {
                let (shape, small) = (&blocks.tensor.shape, &scales.tensor.shape);
                let fits = shape.len() >= 2 && shape[..shape.len() - 1] == small[..];
                let types = matches!(blocks.tensor.dtype, DType::UInt8 | DType::Int8)
                    && matches!(scales.tensor.dtype, DType::UInt8 | DType::Float8E8M0Fnu);
                if !fits || !types {
                    let (a, b) = (blocks.tensor.dtype.name(), scales.tensor.dtype.name());
                    return Err(format!(
                        "{:?} ({a} {:?}) and {:?} ({b} {:?}) are not blocks of four-bit codes and their scales",
                        blocks.key,
                        &shape[..],
                        scales.key,
                        &small[..],
                    ));
                }
                let mut whole = Dims::from_slice(&shape[..shape.len() - 2]);
                let columns = shape[shape.len() - 2].checked_mul(shape[shape.len() - 1]).and_then(|bytes| bytes.checked_mul(2));
                whole.push(columns.ok_or_else(|| format!("{:?} is too large", blocks.key))?);
                Ok((whole, DType::Float32))
            }
            (Formula::Codes { block, dtype }, [weight]) => match grid(&weight.tensor.shape, block) {
                Some(_) => Ok((weight.tensor.shape.clone(), *dtype)),
                None => Err(no_blocks(weight, block)),
            },
            (Formula::Scales { block, .. }, [weight]) => match grid(&weight.tensor.shape, block) {
                Some(grid) => Ok((grid, DType::Float32)),
                None => Err(no_blocks(weight, block)),
            },
            (Formula::LowRank { transposed, .. }, [weight, a, b]) => {
                let shapes = (&weight.tensor.shape[..], &a.tensor.shape[..], &b.tensor.shape[..]);
                let fits = match shapes {
                    (&[rows, columns], &[rank, inputs], &[outputs, same]) => {
                        let expected = if *transposed { (inputs, outputs) } else { (outputs, inputs) };
                        rank == same && (rows, columns) == expected
                    }
                    _ => false,
                };
                if !fits {
                    let ((w, a_shape, b_shape), (a, b)) = (shapes, (&a.key, &b.key));
                    return Err(format!("{:?} {w:?}, {a:?} {a_shape:?} and {b:?} {b_shape:?} do not fit each other", weight.key));
                }
                Ok((weight.tensor.shape.clone(), DType::Float32))
            }
            (Formula::Same, [only]) => Ok((only.tensor.shape.clone(), only.tensor.dtype)),
            _ => Err(format!("{} tensors are given", inputs.len())),
        }
    }

    /// What of each input a region needs.
    pub(super) fn needs(&self, inputs: &[Input], region: &Region) -> Result<Vec<Region>> {
        let shape_of = |input: usize| inputs.get(input).map_or(&[][..], |input| &input.tensor.shape[..]);
        Ok(match self {
            Formula::Scaled { block } => vec![region.clone(), blocks_of(region, block)?],
            Formula::Packed => {
                let width = shape_of(0).last().map_or(1, |bytes| bytes * 2).max(1);
                let mut groups = Dims::from_elem(1, region.ndim());
                groups.last_mut().into_iter().for_each(|last| *last = width);
                let scales = blocks_of(region, &groups)?;
                let (mut offsets, mut sizes) = (Dims::from_slice(scales.offsets()), Dims::from_slice(scales.sizes()));
                offsets.push(0);
                sizes.push(width / 2);
                vec![Region::new(&offsets, &sizes).proven()?, scales]
            }
            Formula::Codes { block, .. } => {
                let touched = blocks_of(region, block)?;
                vec![unblocked(&touched, block, shape_of(0))?]
            }
            Formula::Scales { block, .. } => vec![unblocked(region, block, shape_of(0))?],
            Formula::LowRank { transposed, .. } => {
                let (first, second) = if *transposed { (1, 0) } else { (0, 1) };
                let (offsets, sizes) = (region.offsets(), region.sizes());
                let rank = shape_of(1).first().copied().unwrap_or(0);
                let a = Region::new(&[0, offsets[second]], &[rank, sizes[second]]).proven()?;
                let b = Region::new(&[offsets[first], 0], &[sizes[first], rank]).proven()?;
                vec![region.clone(), a, b]
            }
            Formula::Same => vec![region.clone()],
        })
    }

    /// Computes a region from what it needs; everything is packed in row-major order.
    pub(super) fn compute(&self, inputs: &[Input], region: &Region, needs: &[Region], contents: &[Vec<u8>]) -> Result<Vec<u8>> {
        let floats_of = |input: usize| -> Result<Vec<f32>> {
            match (inputs.get(input), contents.get(input)) {
                (Some(input), Some(content)) => floats(input.tensor.dtype, content),
                _ => Ok(Vec::new()),
            }
        };
        let bytes_of = |input: usize| contents.get(input).map_or(&[][..], Vec::as_slice);
        Ok(match self {
            Formula::Scaled { block } => {
                let table = table(inputs.first().map_or(DType::Float8E4M3Fn, |codes| codes.tensor.dtype))?;
                let scales = match inputs.get(1).map(|scales| scales.tensor.dtype) {
                    // Bytes that are scales are exponents.
                    Some(DType::UInt8) => floats(DType::Float8E8M0Fnu, bytes_of(1))?,
                    _ => floats_of(1)?,
                };
                scaled(region, &needs[1], block, bytes_of(0), &table, &scales)
            }
            Formula::Packed => packed(region, &needs[1], needs[0].sizes().last().copied().unwrap_or(1), bytes_of(0), bytes_of(1)),
            Formula::Codes { block, dtype } => {
                let values = coded(region, &needs[0], block, &floats_of(0)?, largest(*dtype));
                let mut codes = vec![0; values.len()];
                cast(DType::Float32, &bytes(values.into_iter()), *dtype, &mut codes)?;
                codes
            }
            Formula::Scales { block, dtype } => {
                let most = largest(*dtype);
                bytes(maxima(needs[0].sizes(), block, &floats_of(0)?).into_iter().map(|largest| scale(largest, most)))
            }
            Formula::LowRank { scale, transposed } => {
                let (weight, a, b) = (floats_of(0)?, floats_of(1)?, floats_of(2)?);
                let (rows, columns) = (region.sizes()[0] as usize, region.sizes()[1] as usize);
                let rank = needs[1].sizes()[0] as usize;
                // The product's rows from the left factor [rows, rank], its columns from the right one [rank, columns].
                let (left, right) = match transposed {
                    false => (b, a),
                    true => (turned(&a, rank, rows), turned(&b, columns, rank)),
                };
                bytes(low_rank(weight, &left, &right, (rows, columns, rank), *scale).into_iter())
            }
            Formula::Same => bytes_of(0).to_vec(),
        })
    }
}

/// The largest finite number of an eight-bit type.
fn largest(dtype: DType) -> f32 {
    match dtype {
        DType::Float8E5M2 => 57344.0,
        _ => 448.0,
    }
}

/// The scale of a block whose largest element is this.
fn scale(largest: f32, most: f32) -> f32 {
    if largest > 0.0 { largest / most } else { 1.0 }
}

fn no_blocks(weight: &Input, block: &[u64]) -> String {
    format!("blocks of {block:?} do not fit {:?} of shape {:?}", weight.key, &weight.tensor.shape[..])
}

/// How many blocks there are along each dimension.
fn grid(shape: &[u64], block: &[u64]) -> Option<Dims> {
    if shape.len() != block.len() || block.contains(&0) {
        return None;
    }
    Some(shape.iter().zip(block).map(|(size, block)| size.div_ceil(*block)).collect())
}

/// The blocks that a region touches.
fn blocks_of(region: &Region, block: &[u64]) -> Result<Region> {
    let offsets: Dims = region.offsets().iter().zip(block).map(|(offset, block)| offset / block).collect();
    let sizes: Dims = (0..region.ndim())
        .map(|dim| match region.sizes()[dim] {
            0 => 0,
            _ => region.end(dim).div_ceil(block[dim]) - offsets[dim],
        })
        .collect();
    Region::new(&offsets, &sizes).proven()
}

/// The elements of blocks.
fn unblocked(blocks: &Region, block: &[u64], shape: &[u64]) -> Result<Region> {
    let offsets: Dims = blocks.offsets().iter().zip(block).map(|(offset, block)| offset.saturating_mul(*block)).collect();
    let sizes: Dims = (0..blocks.ndim())
        .map(|dim| blocks.end(dim).saturating_mul(block[dim]).min(shape[dim]).saturating_sub(offsets[dim]))
        .collect();
    Region::new(&offsets, &sizes).proven()
}

fn bytes(values: impl Iterator<Item = f32>) -> Vec<u8> {
    values.flat_map(f32::to_le_bytes).collect()
}

fn floats(dtype: DType, content: &[u8]) -> Result<Vec<f32>> {
    let read = |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|element| f32::from_le_bytes(*element)).collect();
    if dtype == DType::Float32 {
        return Ok(read(content));
    }
    let mut wide = vec![0; content.len() / dtype.size() as usize * 4];
    cast(dtype, content, DType::Float32, &mut wide)?;
    Ok(read(&wide))
}

/// What each code of an eight-bit type stands for.
fn table(dtype: DType) -> Result<Vec<f32>> {
    floats(dtype, &(0..=u8::MAX).collect::<Vec<_>>())
}

/// The first elements of a region's rows, as indices of all dimensions but the last, and how long a row is.
fn rows(sizes: &[u64]) -> (impl Iterator<Item = Dims> + use<>, usize) {
    let outer = Dims::from_slice(sizes.split_last().map_or(&[][..], |(_, outer)| outer));
    let count: u64 = if sizes.contains(&0) { 0 } else { outer.iter().product() };
    let rows = (0..count).map(move |mut row| {
        let mut index = Dims::from_elem(0, outer.len());
        for dim in (0..outer.len()).rev() {
            index[dim] = row % outer[dim];
            row /= outer[dim];
        }
        index
    });
    (rows, sizes.last().map_or(1, |&length| length as usize))
}

/// Where the blocks of a row lie in packed blocks: the row starts at `index` of a region, and blocks start at `first`.
fn block_row(index: &[u64], region: &Region, block: &[u64], first: &Region) -> usize {
    let outer = region.ndim().saturating_sub(1);
    let at = (0..outer)
        .fold(0, |at, dim| at * first.sizes()[dim] + (region.offsets()[dim] + index[dim]) / block[dim] - first.offsets()[dim]);
    (at * first.sizes().last().copied().unwrap_or(1)) as usize
}

/// The stretches of a row that are of one block: start, end, and the block's number in the row.
fn stretches(region: &Region, block: &[u64], first: &Region) -> Vec<(usize, usize, usize)> {
    let (Some(&offset), Some(&length), Some(&block), Some(&from)) =
        (region.offsets().last(), region.sizes().last(), block.last(), first.offsets().last())
    else {
        return vec![(0, 1, 0)];
    };
    let mut found = Vec::new();
    let mut at = 0;
    while at < length {
        let number = (offset + at) / block;
        let end = ((number + 1).saturating_mul(block) - offset).min(length);
        found.push((at as usize, end as usize, (number - from) as usize));
        at = end;
    }
    found
}

fn scaled(region: &Region, blocks: &Region, block: &[u64], codes: &[u8], table: &[f32], scales: &[f32]) -> Vec<u8> {
    let mut out = vec![0; codes.len() * 4];
    let (rows, length) = rows(region.sizes());
    let stretches = stretches(region, block, blocks);
    let lines = codes.chunks_exact(length.max(1)).zip(out.chunks_exact_mut(length.max(1) * 4));
    for (index, (codes, out)) in rows.zip(lines) {
        let scales = &scales[block_row(&index, region, block, blocks)..];
        for &(start, end, number) in &stretches {
            let scale = scales[number];
            for (code, out) in codes[start..end].iter().zip(out[start * 4..end * 4].as_chunks_mut::<4>().0) {
                *out = (table[*code as usize] * scale).to_le_bytes();
            }
        }
    }
    out
}

fn packed(region: &Region, groups: &Region, width: u64, blocks: &[u8], scales: &[u8]) -> Vec<u8> {
    let width = width as usize;
    let (rows, _) = rows(region.sizes());
    let count = groups.sizes().last().map_or(1, |&count| count as usize);
    let mut lanes = Dims::from_elem(1, region.ndim());
    lanes.last_mut().into_iter().for_each(|last| *last = width as u64 * 2);
    let stretches = stretches(region, &lanes, groups);
    let first = region.offsets().last().map_or(0, |&offset| offset as usize);
    let start = groups.offsets().last().map_or(0, |&group| group as usize) * width * 2;
    let mut out = Vec::with_capacity(region.volume() as usize * 4);
    for row in 0..rows.count() {
        for &(from, to, number) in &stretches {
            let group = row * count + number;
            let scale = power_of_two(scales[group]);
            let bytes = &blocks[group * width..(group + 1) * width];
            // Positions in the group: the row of codes begins with the first group that is needed.
            let base = number * width * 2;
            for at in from + first - start..to + first - start {
                let pair = bytes[(at - base) / 2];
                let code = if (at - base).is_multiple_of(2) { pair & 0x0f } else { pair >> 4 };
                out.extend_from_slice(&(E2M1[code as usize] * scale).to_le_bytes());
            }
        }
    }
    out
}

/// An exponent of eight bits without a sign (E8M0); all ones are no number.
fn power_of_two(exponent: u8) -> f32 {
    match exponent {
        0xff => f32::NAN,
        // Half of the smallest normal number.
        0 => f32::from_bits(0x0040_0000),
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

/// The largest absolute value of each block of packed values, whose first block is whole or the only one.
fn maxima(sizes: &[u64], block: &[u64], values: &[f32]) -> Vec<f32> {
    let Some(blocks) = grid(sizes, block) else { return Vec::new() };
    let (Ok(region), Ok(first)) = (Region::whole(sizes), Region::whole(&blocks)) else { return Vec::new() };
    let mut found = vec![0f32; first.volume() as usize];
    let (rows, length) = rows(sizes);
    let stretches = stretches(&region, block, &first);
    for (index, values) in rows.zip(values.chunks_exact(length.max(1))) {
        let at = block_row(&index, &region, block, &first);
        for &(start, end, number) in &stretches {
            let most = &mut found[at + number];
            *most = values[start..end].iter().fold(*most, |most, value| most.max(value.abs()));
        }
    }
    found
}

/// Elements of a region over the scale of their block; `whole` are the blocks' elements.
fn coded(region: &Region, whole: &Region, block: &[u64], values: &[f32], most: f32) -> Vec<f32> {
    let scales: Vec<f32> = maxima(whole.sizes(), block, values).into_iter().map(|largest| scale(largest, most)).collect();
    let (Ok(inside), Some(blocks)) = (region.within(whole), grid(whole.sizes(), block)) else { return Vec::new() };
    let Ok(first) = Region::whole(&blocks) else { return Vec::new() };
    let (rows, length) = rows(region.sizes());
    let stretches = stretches(&inside, block, &first);
    let mut out = Vec::with_capacity(region.volume() as usize);
    for index in rows {
        let scales = &scales[block_row(&index, &inside, block, &first)..];
        let outer = index.len();
        let row = (0..outer).fold(0, |at, dim| at * whole.sizes()[dim] + inside.offsets()[dim] + index[dim]);
        let start = (row * whole.sizes().last().copied().unwrap_or(1) + inside.offsets().last().copied().unwrap_or(0)) as usize;
        let values = &values[start..start + length];
        for &(from, to, number) in &stretches {
            out.extend(values[from..to].iter().map(|value| (value / scales[number]).clamp(-most, most)));
        }
    }
    out
}

fn turned(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column])).collect()
}

fn low_rank(
    mut weight: Vec<f32>,
    left: &[f32],
    right: &[f32],
    (rows, columns, rank): (usize, usize, usize),
    scale: f32,
) -> Vec<f32> {
    let mut sums = vec![0f32; columns];
    for row in 0..rows {
        sums.fill(0.0);
        for k in 0..rank {
            let factor = left[row * rank + k];
            for (sum, value) in sums.iter_mut().zip(&right[k * columns..(k + 1) * columns]) {
                *sum += factor * value;
            }
        }
        for (value, sum) in weight[row * columns..(row + 1) * columns].iter_mut().zip(&sums) {
            *value += scale * sum;
        }
    }
    weight
}
