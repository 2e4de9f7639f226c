//! The little that this crate needs to know of a tensor. In Rust a tensor is host memory, in Python it is a number that
//! stands for one; nothing here ever touches its bytes.

use reshard_formats::DType;
use reshard_layout::Dims;

/// Where a tensor lives, as far as rules depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// Host memory.
    #[default]
    Cpu,
    /// Memory of an accelerator.
    Accelerator,
    /// No memory at all: only shape and dtype are known.
    Meta,
}

/// Facts about a tensor, or about something that stands for one.
pub trait TensorLike: Clone {
    /// Element type.
    fn dtype(&self) -> DType;
    /// Shape. For a tensor that is spread over ranks this is the shape of the whole.
    fn shape(&self) -> &[u64];
    /// Where it lives.
    fn device(&self) -> DeviceKind {
        DeviceKind::Cpu
    }
    /// Bytes of its only element, where the tensor has exactly one and its value is at hand. Rules that compare scalar
    /// slots between parameters or ranks (`step`) need it; without it the values count as equal.
    fn scalar(&self) -> Option<&[u8]> {
        None
    }

    /// Number of elements; saturates, since a shape may come from a file.
    fn numel(&self) -> u64 {
        numel(self.shape())
    }
}

/// Number of elements of a shape; saturates.
pub fn numel(shape: &[u64]) -> u64 {
    shape.iter().fold(1, |product, size| product.saturating_mul(*size))
}

/// A tensor's facts without the tensor: dtype, shape, device and, for single elements, the value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorFacts {
    /// Element type.
    pub dtype: DType,
    /// Shape of the whole.
    pub shape: Dims,
    /// Where it lives.
    pub device: DeviceKind,
    /// Bytes of the only element, if there is only one and it is known.
    pub scalar: Option<Vec<u8>>,
}

impl TensorFacts {
    /// Facts of a tensor in host memory.
    pub fn new(dtype: DType, shape: &[u64]) -> TensorFacts {
        TensorFacts { dtype, shape: Dims::from_slice(shape), device: DeviceKind::Cpu, scalar: None }
    }

    /// The facts of something tensor-like.
    pub fn of(tensor: &impl TensorLike) -> TensorFacts {
        TensorFacts {
            dtype: tensor.dtype(),
            shape: Dims::from_slice(tensor.shape()),
            device: tensor.device(),
            scalar: tensor.scalar().map(<[u8]>::to_vec),
        }
    }
}

/// Something that carries its facts with it, and is tensor-like by them.
pub trait WithFacts: Clone {
    /// The facts.
    fn facts(&self) -> &TensorFacts;
}

impl WithFacts for TensorFacts {
    fn facts(&self) -> &TensorFacts {
        self
    }
}

impl<T: WithFacts> TensorLike for T {
    fn dtype(&self) -> DType {
        self.facts().dtype
    }

    fn shape(&self) -> &[u64] {
        &self.facts().shape
    }

    fn device(&self) -> DeviceKind {
        self.facts().device
    }

    fn scalar(&self) -> Option<&[u8]> {
        self.facts().scalar.as_deref()
    }
}
