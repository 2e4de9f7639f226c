//! FSDP flat parameters: several parameters laid end to end in one tensor, which is cut evenly between ranks. All that a
//! rank holds of every member follows from this description by arithmetic; nobody has to be asked.

use std::ops::Range;

use reshard_formats::DType;
use reshard_layout::{Dims, FlatPiece, Region, flat_pieces};

use crate::{StateError, numel};

/// How a flat parameter is spread over its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ShardingStrategy {
    /// Parameters, gradients and optimizer state are sharded.
    #[default]
    FullShard,
    /// As above, but parameters stay whole between forward and backward. Optimizer state is sharded all the same.
    ShardGradOp,
    /// Nothing is sharded.
    NoShard,
    /// Sharded within a node, the same on all nodes. Rank and world are those within the sharding group.
    HybridShard,
    /// The same with parameters whole between forward and backward.
    HybridShardZero2,
}

/// One parameter inside a flat parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatMember {
    /// Its name.
    pub name: String,
    /// The shape in which it lies in the flat parameter.
    pub shape: Dims,
    /// Where that lies in the parameter, if it is only a slice of it: tensor parallelism below FSDP.
    pub slice: Option<MemberSlice>,
    /// Whether it is trained.
    pub requires_grad: bool,
    /// Other names of the same parameter, where it is shared; it lies in the flat parameter once.
    pub aliases: Vec<String>,
}

/// Which slice of a parameter lies in a flat one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberSlice {
    /// Shape of the parameter.
    pub whole: Dims,
    /// Where in it the slice begins.
    pub offsets: Dims,
}

impl FlatMember {
    /// A trained member.
    pub fn new(name: &str, shape: &[u64]) -> FlatMember {
        let shape = Dims::from_slice(shape);
        FlatMember { name: name.to_owned(), shape, slice: None, requires_grad: true, aliases: Vec::new() }
    }

    /// The same member as a slice of a larger parameter.
    #[must_use]
    pub fn slice_of(mut self, whole: &[u64], offsets: &[u64]) -> FlatMember {
        self.slice = Some(MemberSlice { whole: Dims::from_slice(whole), offsets: Dims::from_slice(offsets) });
        self
    }

    /// Shape of the parameter: what a state dict has under its name.
    pub fn whole_shape(&self) -> &Dims {
        self.slice.as_ref().map_or(&self.shape, |slice| &slice.whole)
    }
}

/// How one flat parameter is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlatSharding {
    /// The strategy.
    pub strategy: ShardingStrategy,
    /// This rank within the sharding group, not within the world: with hybrid sharding they differ.
    pub rank: u64,
    /// Size of the sharding group.
    pub world: u64,
}

/// A stretch of the flat tensor: a member, or padding (None).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index of the member; None for padding.
    pub member: Option<usize>,
    /// Number of elements.
    pub numel: u64,
}

/// The description of a flat parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatParameter {
    name: String,
    dtype: DType,
    members: Vec<FlatMember>,
    starts: Vec<u64>,
    total: u64,
    sharding: FlatSharding,
    use_orig_params: bool,
}

/// What a rank holds of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberRange {
    /// Elements of the flattened member.
    pub range: Range<u64>,
    /// Where they start in the rank's shard of the flat parameter.
    pub in_shard: u64,
}

impl FlatParameter {
    /// Lays members out the way FSDP does: each at a multiple of `aligned` elements (0: no alignment), and where there is
    /// alignment, the end padded to a multiple of the group's size.
    pub fn packed(
        name: &str,
        dtype: DType,
        members: Vec<FlatMember>,
        aligned: u64,
        sharding: FlatSharding,
        use_orig_params: bool,
    ) -> Result<FlatParameter, StateError> {
        let mut extents = Vec::new();
        let mut total = 0_u64;
        let pad_to = |total: &mut u64, multiple: u64, extents: &mut Vec<Extent>| {
            if multiple > 0 && !total.is_multiple_of(multiple) {
                let numel = multiple - *total % multiple;
                extents.push(Extent { member: None, numel });
                *total = total.saturating_add(numel);
            }
        };
        for (index, member) in members.iter().enumerate() {
            pad_to(&mut total, aligned, &mut extents);
            let numel = numel(&member.shape);
            extents.push(Extent { member: Some(index), numel });
            total = total.saturating_add(numel);
        }
        if aligned > 0 {
            pad_to(&mut total, sharding.world, &mut extents);
        }
        FlatParameter::from_extents(name, dtype, members, &extents, sharding, use_orig_params)
    }

    /// Takes the layout as FSDP describes it: numel with padding, and what is padding.
    pub fn from_extents(
        name: &str,
        dtype: DType,
        members: Vec<FlatMember>,
        extents: &[Extent],
        sharding: FlatSharding,
        use_orig_params: bool,
    ) -> Result<FlatParameter, StateError> {
        let invalid = |reason: String| StateError::InvalidFlatParameter { name: name.to_owned(), reason };
        if sharding.rank >= sharding.world {
            return Err(invalid(format!("rank {} of {}", sharding.rank, sharding.world)));
        }
        let mut starts = Vec::with_capacity(members.len());
        let mut total = 0_u64;
        for extent in extents {
            if let Some(index) = extent.member {
                let Some(member) = members.get(index).filter(|_| index == starts.len()) else {
                    return Err(invalid(format!("member {index} is out of order")));
                };
                if numel(&member.shape) != extent.numel {
                    let shape = member.shape.as_slice();
                    return Err(invalid(format!("'{}' of shape {shape:?} takes {} elements", member.name, extent.numel)));
                }
                if let Some(slice) = &member.slice {
                    let region = Region::new(&slice.offsets, &member.shape).map_err(StateError::layout(&member.name))?;
                    region.check_inside(&slice.whole).map_err(StateError::layout(&member.name))?;
                }
                starts.push(total);
            }
            total = total
                .checked_add(extent.numel)
                .filter(|total| *total < u64::MAX)
                .ok_or_else(|| invalid("it has more elements than can be counted".to_owned()))?;
        }
        if starts.len() != members.len() {
            return Err(invalid(format!("{} members, {} extents", members.len(), starts.len())));
        }
        Ok(FlatParameter { name: name.to_owned(), dtype, members, starts, total, sharding, use_orig_params })
    }

    /// Its own name, as the live model has it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Element type of the parameters.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The members, in order.
    pub fn members(&self) -> &[FlatMember] {
        &self.members
    }

    /// How it is cut.
    pub fn sharding(&self) -> FlatSharding {
        self.sharding
    }

    /// Whether the optimizer sees the original parameters (views of this rank's part of each) instead of the flat one.
    pub fn use_orig_params(&self) -> bool {
        self.use_orig_params
    }

    /// Elements of the whole, alignment padding included, padding of the last shards not.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Whether every rank holds only a part.
    pub fn is_sharded(&self) -> bool {
        self.sharding.strategy != ShardingStrategy::NoShard && self.sharding.world > 1
    }

    /// Elements of one shard, padding included; the same on every rank.
    pub fn shard_len(&self) -> u64 {
        if self.is_sharded() { self.total.div_ceil(self.sharding.world) } else { self.total }
    }

    /// The elements of the whole that a rank of the group holds, padding of its shard left out.
    pub fn shard_range(&self, rank: u64) -> Range<u64> {
        if !self.is_sharded() {
            return 0..self.total;
        }
        let start = self.shard_len().saturating_mul(rank).min(self.total);
        start..start.saturating_add(self.shard_len()).min(self.total)
    }

    /// What a rank of the group holds of a member; None where it holds nothing.
    pub fn member_range(&self, member: usize, rank: u64) -> Option<MemberRange> {
        let start = *self.starts.get(member)?;
        let end = start + numel(&self.members.get(member)?.shape);
        let shard = self.shard_range(rank);
        let (from, to) = (start.max(shard.start), end.min(shard.end));
        (from < to).then(|| MemberRange { range: from - start..to - start, in_shard: from - shard.start })
    }

    /// The regions of a member's parameter that a rank holds; `start` of each is its place inside what the rank holds of the
    /// member.
    pub fn member_regions(&self, member: usize, rank: u64) -> Result<Vec<FlatPiece>, StateError> {
        match (self.members.get(member), self.member_range(member, rank)) {
            (Some(info), Some(held)) => {
                let pieces = flat_pieces(&info.shape, held.range.start, held.range.end);
                let mut pieces = pieces.map_err(StateError::layout(&info.name))?;
                if let Some(slice) = &info.slice {
                    for piece in &mut pieces {
                        piece.region = piece.region.translated(&slice.offsets).map_err(StateError::layout(&info.name))?;
                    }
                }
                Ok(pieces)
            }
            _ => Ok(Vec::new()),
        }
    }

    /// The same flat parameter with other names for its members.
    #[must_use]
    pub(crate) fn renamed(mut self, rename: impl Fn(&str) -> String) -> FlatParameter {
        for member in &mut self.members {
            member.name = rename(&member.name);
            member.aliases.iter_mut().for_each(|alias| *alias = rename(alias));
        }
        self
    }
}
