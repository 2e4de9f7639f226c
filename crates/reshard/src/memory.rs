//! Memory that belongs to the caller, also of a device.
//!
//! A state dict's tensors live in the caller's memory (a Rust slice, a torch tensor) and are read and written by many
//! threads at once. [`Source`] and [`Target`] carry a pointer, a length and the borrow that keeps the memory alive. Memory
//! that the CPU cannot read is a [`DeviceMemory`].
#![allow(unsafe_code)]

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::error::{Error, Result};

/// Memory that the CPU cannot read, such as that of an accelerator. It is read in parts, by several threads at once.
pub trait DeviceMemory: Debug + Send + Sync {
    /// Fills `into` with the bytes from `offset` on, or says why it cannot.
    fn read(&self, offset: u64, into: &mut [u8]) -> std::result::Result<(), String>;
}

/// Memory that the CPU can neither read nor write by itself. It is written in boxes, by several threads at once.
pub trait DeviceMemoryMut: DeviceMemory {
    /// A number that is the same for the same memory, such as its address there.
    fn address(&self) -> usize;

    /// Writes elements that lie packed in `bytes`, in row-major order, or says why it cannot.
    fn write(&self, to: StridedBox<'_>, bytes: &[u8]) -> std::result::Result<(), String>;
}

/// A box of elements in memory.
#[derive(Debug, Clone, Copy)]
pub struct StridedBox<'s> {
    /// Where the first element is, in bytes.
    pub offset: u64,
    /// How many elements there are, in each dimension.
    pub sizes: &'s [u64],
    /// How far neighbours are from each other in bytes, in each dimension.
    pub byte_strides: &'s [u64],
    /// Bytes of an element.
    pub element_size: u64,
}

/// Bytes to save, borrowed for `'a`.
#[derive(Debug, Clone)]
pub struct Source<'a> {
    length: usize,
    place: Place<'a>,
}

#[derive(Debug, Clone)]
enum Place<'a> {
    Here(*const u8, PhantomData<&'a [u8]>),
    Device(Arc<dyn DeviceMemory>),
}

// SAFETY: a Source is a shared borrow of plain bytes; the constructors demand that nobody writes them for 'a. What lies
// elsewhere is itself Send.
unsafe impl Send for Source<'_> {}
// SAFETY: as above; only shared reads are made through it, and device memory is itself Sync.
unsafe impl Sync for Source<'_> {}

impl<'a> Source<'a> {
    /// Borrows a slice.
    pub fn new(bytes: &'a [u8]) -> Source<'a> {
        Source { length: bytes.len(), place: Place::Here(bytes.as_ptr(), PhantomData) }
    }

    /// Memory that is read only when its content is about to be written or staged, so that nothing has to be copied ahead.
    pub fn device(length: usize, memory: Arc<dyn DeviceMemory>) -> Source<'a> {
        Source { length, place: Place::Device(memory) }
    }

    /// Memory of a foreign owner.
    ///
    /// # Safety
    /// `pointer` must be valid for reads of `length` bytes for all of `'a`, and nobody may write them meanwhile. A null
    /// pointer is allowed when `length` is zero.
    pub unsafe fn from_raw(pointer: *const u8, length: usize) -> Source<'a> {
        let pointer = if length == 0 { std::ptr::NonNull::<u8>::dangling().as_ptr() as *const u8 } else { pointer };
        Source { length, place: Place::Here(pointer, PhantomData) }
    }

    /// Bytes of a memory mapping that travels to another thread together with this: a mapping does not move when its handle
    /// does.
    ///
    /// # Safety
    /// The mapping must outlive the source, and nobody may write these bytes while the source is read.
    pub(crate) unsafe fn kept_alive(bytes: &[u8]) -> Source<'static> {
        Source { length: bytes.len(), place: Place::Here(bytes.as_ptr(), PhantomData) }
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The bytes, where the CPU can read them.
    pub fn bytes(&self) -> Option<&'a [u8]> {
        match self.place {
            // SAFETY: the constructors' contract: valid for reads and unwritten for 'a; non-null when empty.
            Place::Here(pointer, _) => Some(unsafe { std::slice::from_raw_parts(pointer, self.length) }),
            Place::Device(_) => None,
        }
    }

    /// Fills `into` with the bytes from `offset` on, wherever they lie.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let start = usize::try_from(offset).ok();
        let end = start.and_then(|start| start.checked_add(into.len())).filter(|&end| end <= self.length);
        let (Some(start), Some(end)) = (start, end) else { return Err(outside()) };
        match (&self.place, self.bytes()) {
            (Place::Device(memory), _) => memory
                .read(offset, into)
                .map_err(|detail| Error::exhausted(format!("a tensor's memory could not be read: {detail}"))),
            (Place::Here(..), bytes) => {
                into.copy_from_slice(bytes.and_then(|bytes| bytes.get(start..end)).ok_or_else(outside)?);
                Ok(())
            }
        }
    }
}

/// What a piece is that its memory does not hold.
pub(crate) fn outside() -> Error {
    Error::internal("a piece reaches outside its memory")
}

/// Memory to load into, borrowed for `'a`.
#[derive(Debug)]
pub struct Target<'a> {
    length: usize,
    place: PlaceMut<'a>,
}

#[derive(Debug)]
enum PlaceMut<'a> {
    Here(*mut u8, PhantomData<&'a mut [u8]>),
    Device(Arc<dyn DeviceMemoryMut>),
    /// None at all, for a dry run; told apart by a number.
    Absent(usize),
}

// SAFETY: a Target is an exclusive borrow of plain bytes, which may move between threads. Device memory is itself Send.
unsafe impl Send for Target<'_> {}
// SAFETY: `&Target` gives no access to the bytes except through the unsafe `slice`, whose caller upholds disjointness. What
// lies elsewhere is itself Sync.
unsafe impl Sync for Target<'_> {}

impl<'a> Target<'a> {
    /// Borrows a slice.
    pub fn new(bytes: &'a mut [u8]) -> Target<'a> {
        Target { length: bytes.len(), place: PlaceMut::Here(bytes.as_mut_ptr(), PhantomData) }
    }

    /// Memory that is written when content for it has been read, a bounded part at a time.
    pub fn device(length: usize, memory: Arc<dyn DeviceMemoryMut>) -> Target<'a> {
        Target { length, place: PlaceMut::Device(memory) }
    }

    /// Memory of a foreign owner.
    ///
    /// # Safety
    /// `pointer` must be valid for reads and writes of `length` bytes for all of `'a`. Nobody else may read or write them
    /// meanwhile, except that several targets may name the same memory when they want the same elements of the same
    /// key (tied parameters). A null pointer is allowed when `length` is zero.
    pub unsafe fn from_raw(pointer: *mut u8, length: usize) -> Target<'a> {
        let pointer = if length == 0 { std::ptr::NonNull::<u8>::dangling().as_ptr() } else { pointer };
        Target { length, place: PlaceMut::Here(pointer, PhantomData) }
    }

    /// Several targets in one memory, for layouts that share no byte: the regions of one shard in its local tensor.
    pub(crate) fn disjoint(bytes: &'a mut [u8], count: usize) -> Vec<Target<'a>> {
        let (pointer, length) = (bytes.as_mut_ptr(), bytes.len());
        (0..count).map(|_| Target { length, place: PlaceMut::Here(pointer, PhantomData) }).collect()
    }

    /// No memory: what a dry run loads into. `number` tells one from another.
    pub(crate) fn absent(length: usize, number: usize) -> Target<'a> {
        Target { length, place: PlaceMut::Absent(number) }
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The address, to recognise memory that is wanted twice.
    pub(crate) fn address(&self) -> usize {
        match &self.place {
            PlaceMut::Here(pointer, _) => *pointer as usize,
            PlaceMut::Device(memory) => memory.address(),
            PlaceMut::Absent(number) => *number,
        }
    }

    /// The memory that the CPU cannot write by itself.
    pub(crate) fn away(&self) -> Option<&dyn DeviceMemoryMut> {
        match &self.place {
            PlaceMut::Here(..) | PlaceMut::Absent(_) => None,
            PlaceMut::Device(memory) => Some(memory.as_ref()),
        }
    }

    /// The bytes `start..start + length`, or `None` when they are not inside or not here.
    ///
    /// # Safety
    /// While the slice lives, no other slice of the same bytes may exist: the load plan gives each byte of a target to
    /// exactly one read.
    pub(crate) unsafe fn slice(&self, start: u64, length: u64) -> Option<&'a mut [u8]> {
        let start = usize::try_from(start).ok()?;
        let length = usize::try_from(length).ok()?;
        let PlaceMut::Here(pointer, _) = &self.place else { return None };
        if start.checked_add(length)? > self.length {
            return None;
        }
        // SAFETY: inside the memory by the check above; exclusive by this function's contract.
        Some(unsafe { std::slice::from_raw_parts_mut(pointer.add(start), length) })
    }
}

/// Cuts a copy into parts.
pub(crate) fn split_for_copy<'s, 't>(source: &'s [u8], target: &'t mut [u8], part: usize) -> Vec<(&'s [u8], &'t mut [u8])> {
    source.chunks(part).zip(target.chunks_mut(part)).collect()
}

/// Numbers that are nothing but their bytes.
///
/// # Safety
/// The type has no padding, and every pattern of bits is a value of it.
#[allow(private_bounds)]
pub unsafe trait Plain: Copy + Send + Sync + 'static + Sealed {}

/// Which types are plain is for this crate to say.
trait Sealed {}

macro_rules! plain {
    ($($type:ty)*) => {
        $(
            impl Sealed for $type {}
            // SAFETY: an integer or a float, or a transparent wrapper of one: no padding, no invalid pattern.
            unsafe impl Plain for $type {}
        )*
    };
}

plain!(u8 u16 u32 u64 i8 i16 i32 i64 f32 f64 half::f16 half::bf16 float8::F8E4M3 float8::F8E5M2);

/// The bytes of numbers.
pub(crate) fn as_bytes<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: a plain type has no padding, so every byte is initialised; the slice is borrowed for as long.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of numbers, to be written.
pub(crate) fn as_bytes_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and whatever is written is a value, because every pattern of bits is.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
