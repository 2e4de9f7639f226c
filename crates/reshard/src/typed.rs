//! Typed slices in and out: what most Rust programs need, in few lines.
//!
//! [`SaveState`] and [`LoadState`] take slices of numbers and say by a mesh and placements which part of a tensor they
//! are; [`Checkpoint`] reads tensors, or slices of them, as numbers. Everything here is a few lines over the pieces,
//! regions and bytes that the rest of the crate works with.

use std::ops::Range;

use float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};
use reshard_formats::{DType, Value};
use reshard_layout::{ByteLayout, Dims, Mesh, Placement, Region, local_regions, local_shape};

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Geometry, Result};
use crate::group::Group;
use crate::leaf::{LoadLeaf, LoadPiece, LoadState, LoadTensor, SaveLeaf, SavePiece, SaveState, SaveTensor, Scope};
use crate::memory::{Plain, Source, Target, as_bytes, as_bytes_mut};

/// A number type that tensors are made of: `f32`, `f64`, [`half::f16`], [`half::bf16`], [`float8::F8E4M3`],
/// [`float8::F8E5M2`], and integers of 8 to 64 bits.
///
/// `bool` is missing because a file may hold bytes that are no `bool`; read such tensors with
/// [`Checkpoint::read_bytes`].
pub trait Element: Plain {
    /// The dtype that it is stored as.
    const DTYPE: DType;
    /// Zero.
    const ZERO: Self;
}

macro_rules! elements {
    ($($type:ty = $dtype:ident, $zero:expr;)*) => {
        $(impl Element for $type {
            const DTYPE: DType = DType::$dtype;
            const ZERO: Self = $zero;
        })*
    };
}

elements! {
    f32 = Float32, 0.0;
    f64 = Float64, 0.0;
    f16 = Float16, f16::ZERO;
    bf16 = BFloat16, bf16::ZERO;
    F8E4M3 = Float8E4M3Fn, F8E4M3::from_bits(0);
    F8E5M2 = Float8E5M2, F8E5M2::from_bits(0);
    i8 = Int8, 0;
    i16 = Int16, 0;
    i32 = Int32, 0;
    i64 = Int64, 0;
    u8 = UInt8, 0;
    u16 = UInt16, 0;
    u32 = UInt32, 0;
    u64 = UInt64, 0;
}

/// The ranges of a slice of a tensor: one of its first dimension (`2..4`), or one for each of its first dimensions
/// (`[2..4, 0..8]`). All of the others belong to it.
pub trait Ranges {
    /// The ranges, from the first dimension on.
    fn ranges(&self) -> &[Range<u64>];
}

impl Ranges for Range<u64> {
    fn ranges(&self) -> &[Range<u64>] {
        std::slice::from_ref(self)
    }
}

impl<const N: usize> Ranges for [Range<u64>; N] {
    fn ranges(&self) -> &[Range<u64>] {
        self
    }
}

impl Ranges for [Range<u64>] {
    fn ranges(&self) -> &[Range<u64>] {
        self
    }
}

impl Ranges for Vec<Range<u64>> {
    fn ranges(&self) -> &[Range<u64>] {
        self
    }
}

impl<R: Ranges + ?Sized> Ranges for &R {
    fn ranges(&self) -> &[Range<u64>] {
        (**self).ranges()
    }
}

/// The regions of a shard with the layout of each in the rank's local tensor, which is contiguous, and that tensor's shape.
pub(crate) fn shard_pieces(
    key: &str,
    (mesh, placements, shape): (&Mesh, &[Placement], &[u64]),
    rank: u64,
    dtype: DType,
) -> Result<(Vec<(Region, ByteLayout)>, Dims)> {
    let named = |error: reshard_layout::LayoutError| Error::invalid(format!("{key:?}: {error}"));
    let local = local_shape(mesh, placements, shape, rank).map_err(named)?;
    let whole = ByteLayout::contiguous(&local, dtype.size()).map_err(named)?;
    let mut pieces = Vec::new();
    for piece in local_regions(mesh, placements, shape, rank).map_err(named)? {
        if piece.global.is_empty() {
            continue;
        }
        let strides: Dims = whole.byte_strides().iter().map(|stride| stride / dtype.size()).collect();
        let layout = ByteLayout::strided(piece.global.sizes(), &strides, dtype.size())
            .and_then(|layout| layout.try_at(whole.position(&piece.local)))
            .map_err(named)?;
        pieces.push((piece.global, layout));
    }
    Ok((pieces, local))
}

/// The pieces of a shard, of which so many values were given.
fn checked_pieces(
    key: &str,
    placed: (&Mesh, &[Placement], &[u64]),
    rank: usize,
    dtype: DType,
    given: usize,
) -> Result<Vec<(Region, ByteLayout)>> {
    let (pieces, local) = shard_pieces(key, placed, rank as u64, dtype)?;
    match local.iter().product::<u64>() {
        wanted if wanted == given as u64 => Ok(pieces),
        wanted => Err(Error::invalid(format!(
            "{key:?}: the shard of rank {rank} has shape {local:?}, which is {wanted} elements; {given} were given"
        ))),
    }
}

impl<'a> SaveState<'a> {
    /// The state of one rank of a group; [`SaveState::shard`] asks it which shard is this rank's.
    pub fn of(group: &dyn Group) -> SaveState<'a> {
        SaveState { rank: group.rank(), ..SaveState::default() }
    }

    /// Adds a whole tensor, in row-major order.
    ///
    /// ```
    /// let mut state = reshard::SaveState::new();
    /// state.tensor("model.weight", &[2, 3], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
    /// assert!(state.tensor("model.bias", &[4], &[1.0f32]).is_err());
    /// # Ok::<(), reshard::Error>(())
    /// ```
    pub fn tensor<T: Element>(&mut self, key: impl Into<String>, shape: &[u64], values: &'a [T]) -> Result<()> {
        let key = key.into();
        check_count(&key, shape, values.len())?;
        self.insert_bytes(key, T::DTYPE, shape, as_bytes(values))
    }

    /// Adds this rank's shard of a tensor of the given shape: what the placements give to the rank, in row-major order.
    pub fn shard<T: Element>(
        &mut self,
        key: impl Into<String>,
        mesh: &Mesh,
        placements: &[Placement],
        shape: &[u64],
        values: &'a [T],
    ) -> Result<()> {
        let key = key.into();
        let bytes = as_bytes(values);
        let pieces = checked_pieces(&key, (mesh, placements, shape), self.rank, T::DTYPE, values.len())?
            .into_iter()
            .map(|(region, layout)| SavePiece::new(region, layout, Source::new(bytes)))
            .collect::<Result<_>>()?;
        let tensor = SaveTensor { dtype: T::DTYPE, shape: Dims::from_slice(shape), requires_grad: false, pieces };
        self.insert(key, None, Scope::Shared, SaveLeaf::Tensor(tensor))
    }

    /// Adds a plain value: a number, text, or a [`Value`].
    pub fn value(&mut self, key: impl Into<String>, value: impl Into<Value>) -> Result<()> {
        self.insert_value(key, value.into())
    }
}

impl<'a> LoadState<'a> {
    /// What one rank of a group wants; [`LoadState::shard`] asks it which shard is this rank's.
    pub fn of(group: &dyn Group) -> LoadState<'a> {
        LoadState { rank: group.rank(), ..LoadState::default() }
    }

    /// Wants a whole tensor, in row-major order.
    pub fn tensor<T: Element>(&mut self, key: impl Into<String>, shape: &[u64], values: &'a mut [T]) -> Result<()> {
        let key = key.into();
        check_count(&key, shape, values.len())?;
        self.insert_bytes(key, T::DTYPE, shape, as_bytes_mut(values))
    }

    /// Wants this rank's shard of a tensor of the given shape, in row-major order.
    pub fn shard<T: Element>(
        &mut self,
        key: impl Into<String>,
        mesh: &Mesh,
        placements: &[Placement],
        shape: &[u64],
        values: &'a mut [T],
    ) -> Result<()> {
        let key = key.into();
        let pieces = checked_pieces(&key, (mesh, placements, shape), self.rank, T::DTYPE, values.len())?;
        let bytes = as_bytes_mut(values);
        // The regions of one shard lie in disjoint parts of its local tensor.
        let targets = Target::disjoint(bytes, pieces.len());
        let pieces = pieces
            .into_iter()
            .zip(targets)
            .map(|((region, layout), memory)| LoadPiece::new(region, layout, memory))
            .collect::<Result<_>>()?;
        let tensor = LoadTensor { dtype: T::DTYPE, shape: Dims::from_slice(shape), pieces };
        self.insert(key, Scope::Shared, LoadLeaf::Tensor(tensor))
    }

    /// Wants a plain value; the load returns it.
    pub fn value(&mut self, key: impl Into<String>) -> Result<()> {
        self.insert_value(key)
    }
}

impl Checkpoint {
    /// Reads a whole tensor, in row-major order. Another dtype than the stored one is an error; nothing is cast.
    ///
    /// ```
    /// # let path = "../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint";
    /// let checkpoint = reshard::Checkpoint::open(path)?;
    /// let weight = checkpoint.read::<f32>("model.embed.weight")?;
    /// let rows = checkpoint.read_slice::<f32>("model.embed.weight", 2..4)?;
    /// let width = checkpoint.tensor("model.embed.weight")?.shape[1] as usize;
    /// assert_eq!(rows, weight[2 * width..4 * width]);
    /// # Ok::<(), reshard::Error>(())
    /// ```
    pub fn read<T: Element>(&self, key: &str) -> Result<Vec<T>> {
        self.read_slice(key, [])
    }

    /// Reads a slice of a tensor, in row-major order: a range of the first dimension, or of each of the first dimensions.
    ///
    /// ```
    /// # let path = "../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint";
    /// # let checkpoint = reshard::Checkpoint::open(path)?;
    /// let corner = checkpoint.read_slice::<f32>("model.embed.weight", [2..4, 0..3])?;
    /// assert_eq!(corner.len(), 6);
    /// # Ok::<(), reshard::Error>(())
    /// ```
    pub fn read_slice<T: Element>(&self, key: &str, ranges: impl Ranges) -> Result<Vec<T>> {
        let region = self.slice_region(key, ranges.ranges())?;
        let count = usize::try_from(region.volume()).ok().filter(|count| count.checked_mul(size_of::<T>()).is_some());
        let count = count.ok_or_else(|| Error::exhausted(format!("{region} of {key:?} does not fit into memory")))?;
        let mut values = vec![T::ZERO; count];
        self.read_region(key, T::DTYPE, &region, as_bytes_mut(&mut values))?;
        Ok(values)
    }

    /// Reads a whole tensor into given memory, in row-major order.
    pub fn read_into<T: Element>(&self, key: &str, values: &mut [T]) -> Result<()> {
        self.read_slice_into(key, [], values)
    }

    /// Reads a slice of a tensor into given memory, in row-major order.
    pub fn read_slice_into<T: Element>(&self, key: &str, ranges: impl Ranges, values: &mut [T]) -> Result<()> {
        let region = self.slice_region(key, ranges.ranges())?;
        check_count(key, region.sizes(), values.len())?;
        self.read_region(key, T::DTYPE, &region, as_bytes_mut(values))
    }

    /// The region of a slice.
    fn slice_region(&self, key: &str, ranges: &[Range<u64>]) -> Result<Region> {
        let tensor = self.tensor(key)?;
        if ranges.len() > tensor.shape.len() {
            let (given, has) = (ranges.len(), tensor.shape.len());
            return Err(Error::invalid(format!("{key:?} has {has} dimensions; {given} ranges were given")));
        }
        let mut offsets = Dims::from_elem(0, tensor.shape.len());
        let mut sizes = tensor.shape.clone();
        for (dim, range) in ranges.iter().enumerate() {
            if range.start > range.end || range.end > tensor.shape[dim] {
                let size = tensor.shape[dim];
                return Err(Error::invalid(format!("{key:?}: {range:?} is outside of dimension {dim}, which has size {size}")));
            }
            (offsets[dim], sizes[dim]) = (range.start, range.end - range.start);
        }
        Region::new(&offsets, &sizes).proven()
    }
}

fn check_count(key: &str, shape: &[u64], count: usize) -> Result<()> {
    let wanted = Region::whole(shape).map_err(|error| Error::invalid(format!("{key:?}: {error}")))?.volume();
    match wanted == count as u64 {
        true => Ok(()),
        false => Err(Error::invalid(format!("{key:?}: shape {shape:?} is {wanted} elements; {count} were given"))),
    }
}

#[cfg(feature = "ndarray")]
mod arrays {
    use ndarray::{ArrayBase, ArrayD, Data, Dimension, IxDyn};

    use super::{Checkpoint, Element, Error, Result, SaveState};

    impl<'a> SaveState<'a> {
        /// Adds a whole tensor from an array in standard (row-major) order.
        pub fn array<T: Element, S: Data<Elem = T>, D: Dimension>(
            &mut self,
            key: impl Into<String>,
            array: &'a ArrayBase<S, D>,
        ) -> Result<()> {
            let key = key.into();
            let shape: Vec<u64> = array.shape().iter().map(|&size| size as u64).collect();
            let values = array.as_slice().ok_or_else(|| {
                Error::invalid(format!("{key:?}: the array is not in standard order; `as_standard_layout` makes a copy that is"))
            })?;
            self.tensor(key, &shape, values)
        }
    }

    impl Checkpoint {
        /// Reads a whole tensor as an array.
        pub fn read_array<T: Element>(&self, key: &str) -> Result<ArrayD<T>> {
            let shape: Vec<usize> = self.tensor(key)?.shape.iter().map(|&size| size as usize).collect();
            let values = self.read::<T>(key)?;
            ArrayD::from_shape_vec(IxDyn(&shape), values).map_err(|error| Error::internal(format!("{key:?}: {error}")))
        }
    }
}
