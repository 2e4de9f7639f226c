//! Elements that are computed while they are read: codes times their scales, weights as codes and scales, a low-rank update added
//! to its weight.
//!
//! Geometry says where an element lies; what lies here is made. A [`Computed`] is a whole tensor with a formula and the tensors
//! that it needs. Whoever reads a region of it reads the regions of those that the region needs and no more, part by part in
//! bounded memory. Windows of views lie on top of it as they do on stored chunks: it behaves like a file in row-major order.

mod enclosing;
mod formula;

use std::sync::Arc;

use reshard_formats::DType;
use reshard_layout::{ByteLayout, Dims, Region};

pub(crate) use self::formula::Formula;
use super::catalog::{CatalogTensor, ChunkLocation, StoredChunk};
use crate::error::Result;

/// A tensor that is computed from others.
#[derive(Debug)]
pub struct Computed {
    formula: Formula,
    inputs: Vec<Input>,
    shape: Dims,
    dtype: DType,
}

/// A tensor that a formula needs, and what it is called in messages.
#[derive(Debug)]
pub(crate) struct Input {
    pub(crate) key: String,
    pub(crate) tensor: CatalogTensor,
}

impl Computed {
    /// A formula of these tensors, or why they do not fit it.
    pub(crate) fn new(formula: Formula, inputs: Vec<Input>) -> std::result::Result<Computed, String> {
        let (shape, dtype) = formula.result(&inputs)?;
        reshard_layout::volume_of(&shape).map_err(|error| error.to_string())?;
        Ok(Computed { formula, inputs, shape, dtype })
    }

    /// The element type of what is computed.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The keys of the tensors that it is computed from.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.inputs.iter().map(|input| input.key.as_str())
    }

    /// It as a tensor of a catalog: one chunk.
    pub(crate) fn into_tensor(self) -> std::result::Result<CatalogTensor, String> {
        let requires_grad = self.inputs.iter().any(|input| input.tensor.requires_grad);
        let (dtype, shape) = (self.dtype, self.shape.clone());
        let region = Region::whole(&shape).map_err(|error| error.to_string())?;
        // Where most of what it is computed from lies, for whoever shows files.
        let file = self.inputs.first().and_then(|input| input.tensor.files().first().copied());
        let (file, location) = (file.unwrap_or(StoredChunk::NO_FILE), ChunkLocation::Computed(Arc::new(self)));
        Ok(CatalogTensor::new(dtype, shape, requires_grad, vec![StoredChunk { region, file, location }]))
    }

    /// The bytes of all that it is computed from.
    pub(crate) fn input_bytes(&self) -> u64 {
        self.inputs.iter().map(|input| input.tensor.needed_bytes()).fold(0, u64::saturating_add)
    }

    /// How many elements it has.
    pub(crate) fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// The tensors that it is computed from.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &CatalogTensor> {
        self.inputs.iter().map(|input| &input.tensor)
    }

    /// The tensors that it is computed from, with their keys.
    pub(crate) fn inputs(&self) -> &[Input] {
        &self.inputs
    }

    /// The box that holds a part, and where the part's elements lie in it, packed. The part is of a chunk whose elements lie as
    /// `layout` says.
    pub(crate) fn enclosing(&self, layout: &ByteLayout, part: &Region) -> Result<(Region, ByteLayout)> {
        enclosing::enclosing(&self.shape, layout, part)
    }

    /// What of each input a region needs.
    pub(crate) fn needs(&self, region: &Region) -> Result<Vec<Region>> {
        self.formula.needs(&self.inputs, region)
    }

    /// Computes a region from what it needs of each input, all packed in row-major order.
    pub(crate) fn compute(&self, region: &Region, needs: &[Region], contents: &[Vec<u8>]) -> Result<Vec<u8>> {
        self.formula.compute(&self.inputs, region, needs, contents)
    }

    /// What of each input a part needs. The part is of a chunk whose elements lie as `layout` says.
    pub(crate) fn needed(&self, layout: &ByteLayout, part: &Region) -> Result<Vec<(&str, &CatalogTensor, Region)>> {
        if part.is_empty() {
            return Ok(Vec::new());
        }
        let regions = self.needs(&self.enclosing(layout, part)?.0)?;
        Ok(self.inputs.iter().zip(regions).map(|(input, region)| (input.key.as_str(), &input.tensor, region)).collect())
    }
}
