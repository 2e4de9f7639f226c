//! How a rank holds a sharded parameter, for slots that an optimizer made as plain tensors beside it.

use indexmap::IndexMap;
use reshard_layout::{Dims, LayoutError, LocalRegion, Region};

use crate::{OptimizerState, SlotPiece, SlotTensor, TensorLike, Tree};

/// How a rank holds a tensor: the shape of its memory, and which region of the whole lies where in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamLayout {
    /// Shape of the whole.
    pub shape: Dims,
    /// Shape of this rank's memory.
    pub local_shape: Dims,
    /// Its parts; the source of each is nothing but a place.
    pub pieces: Vec<SlotPiece<()>>,
}

impl ParamLayout {
    /// Parts of a local tensor.
    pub fn from_regions(shape: &[u64], local_shape: &[u64], regions: Vec<LocalRegion>) -> Result<ParamLayout, LayoutError> {
        let local = Dims::from_slice(local_shape);
        let mut pieces = Vec::with_capacity(regions.len());
        for region in regions {
            region.global.check_inside(shape)?;
            let box_in_memory = Region::new(&region.local, region.global.sizes())?;
            box_in_memory.check_inside(local_shape)?;
            pieces.push(SlotPiece { source: (), start: 0, within: local.clone(), at: region.local, region: region.global });
        }
        Ok(ParamLayout { shape: Dims::from_slice(shape), local_shape: local, pieces })
    }
}

/// Gives slots that an optimizer made as plain tensors beside sharded parameters the layout of their parameters. Such a
/// slot has the shape of the rank's part; taken for the whole it would be saved once instead of once per part.
pub fn adopt_layouts<T: TensorLike>(state: &mut OptimizerState<SlotTensor<T>>, params: &IndexMap<String, ParamLayout>) {
    for (name, slots) in &mut state.state {
        let Some(layout) = params.get(name).filter(|layout| layout.local_shape != layout.shape) else { continue };
        for value in slots.values_mut() {
            let local = match value {
                Tree::Tensor(SlotTensor::Whole(tensor)) if tensor.shape() == layout.local_shape.as_slice() => tensor.clone(),
                _ => continue,
            };
            let piece = |place: &SlotPiece<()>| SlotPiece {
                source: local.clone(),
                start: place.start,
                within: place.within.clone(),
                at: place.at.clone(),
                region: place.region.clone(),
            };
            let pieces = layout.pieces.iter().map(piece).collect();
            *value = Tree::Tensor(SlotTensor::Sharded { dtype: local.dtype(), shape: layout.shape.clone(), pieces });
        }
    }
}
