//! A checkpoint of whole tensors, saved by one rank.

use reshard::layout::{Dims, Region};
use reshard::leaf::{SaveLeaf, SavePiece, SaveTensor, Scope};
use reshard::{SaveOptions, SaveState, Solo, save_with};

use crate::layouts::{Whole, store_at};

pub(crate) fn save_whole(wholes: &[Whole], path: &std::path::Path) {
    let mut state = SaveState::new();
    for whole in wholes {
        let keys = whole.key.split('.').map(Into::into).collect();
        let piece = SavePiece::contiguous(Region::whole(&whole.shape).unwrap(), whole.dtype, &whole.bytes).unwrap();
        let shape = Dims::from_slice(&whole.shape);
        let tensor = SaveTensor { dtype: whole.dtype, shape, requires_grad: false, pieces: vec![piece] };
        state.insert(whole.key.clone(), Some(keys), Scope::Shared, SaveLeaf::Tensor(tensor)).unwrap();
    }
    save_with(&Solo, &state, &store_at(path), &SaveOptions::default()).unwrap();
}
