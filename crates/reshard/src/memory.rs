//! Memory that belongs to the caller: the one place where this crate turns pointers into slices.
//!
//! A state dict's tensors live in the caller's memory (a Rust slice, a torch tensor) and are read and written by many
//! threads at once. [`Source`] and [`Target`] carry a pointer, a length and the borrow that keeps the memory alive.
#![allow(unsafe_code)]

use std::marker::PhantomData;

/// Bytes to save, borrowed for `'a`.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    pointer: *const u8,
    length: usize,
    borrow: PhantomData<&'a [u8]>,
}

// SAFETY: a Source is a shared borrow of plain bytes; the constructors demand that nobody writes them for 'a.
unsafe impl Send for Source<'_> {}
// SAFETY: as above; only shared reads are made through it.
unsafe impl Sync for Source<'_> {}

impl<'a> Source<'a> {
    /// Borrows a slice.
    pub fn new(bytes: &'a [u8]) -> Source<'a> {
        Source { pointer: bytes.as_ptr(), length: bytes.len(), borrow: PhantomData }
    }

    /// Memory of a foreign owner.
    ///
    /// # Safety
    /// `pointer` must be valid for reads of `length` bytes for all of `'a`, and nobody may write them meanwhile. A null
    /// pointer is allowed when `length` is zero.
    pub unsafe fn from_raw(pointer: *const u8, length: usize) -> Source<'a> {
        let pointer = if length == 0 { std::ptr::NonNull::<u8>::dangling().as_ptr() as *const u8 } else { pointer };
        Source { pointer, length, borrow: PhantomData }
    }

    /// Bytes of a memory mapping that travels to another thread together with this: a mapping does not move when its handle
    /// does.
    ///
    /// # Safety
    /// The mapping must outlive the source, and nobody may write these bytes while the source is read.
    pub(crate) unsafe fn kept_alive(bytes: &[u8]) -> Source<'static> {
        Source { pointer: bytes.as_ptr(), length: bytes.len(), borrow: PhantomData }
    }

    /// The bytes.
    pub fn bytes(&self) -> &'a [u8] {
        // SAFETY: the constructors' contract: valid for reads and unwritten for 'a; non-null when empty.
        unsafe { std::slice::from_raw_parts(self.pointer, self.length) }
    }
}

/// Memory to load into, borrowed for `'a`.
#[derive(Debug)]
pub struct Target<'a> {
    pointer: *mut u8,
    length: usize,
    borrow: PhantomData<&'a mut [u8]>,
}

// SAFETY: a Target is an exclusive borrow of plain bytes, which may move between threads.
unsafe impl Send for Target<'_> {}
// SAFETY: `&Target` gives no access to the bytes except through the unsafe `slice`, whose caller upholds disjointness.
unsafe impl Sync for Target<'_> {}

impl<'a> Target<'a> {
    /// Borrows a slice.
    pub fn new(bytes: &'a mut [u8]) -> Target<'a> {
        Target { pointer: bytes.as_mut_ptr(), length: bytes.len(), borrow: PhantomData }
    }

    /// Memory of a foreign owner.
    ///
    /// # Safety
    /// `pointer` must be valid for reads and writes of `length` bytes for all of `'a`. Nobody else may read or write them
    /// meanwhile, except that several targets may name the same memory when they want the same elements of the same
    /// key (tied parameters). A null pointer is allowed when `length` is zero.
    pub unsafe fn from_raw(pointer: *mut u8, length: usize) -> Target<'a> {
        let pointer = if length == 0 { std::ptr::NonNull::<u8>::dangling().as_ptr() } else { pointer };
        Target { pointer, length, borrow: PhantomData }
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
        self.pointer as usize
    }

    /// The bytes `start..start + length`, or `None` when they are not inside.
    ///
    /// # Safety
    /// While the slice lives, no other slice of the same bytes may exist: the load plan gives each byte of a target to
    /// exactly one read.
    pub(crate) unsafe fn slice(&self, start: u64, length: u64) -> Option<&'a mut [u8]> {
        let start = usize::try_from(start).ok()?;
        let length = usize::try_from(length).ok()?;
        if start.checked_add(length)? > self.length {
            return None;
        }
        // SAFETY: inside the memory by the check above; exclusive by this function's contract.
        Some(unsafe { std::slice::from_raw_parts_mut(self.pointer.add(start), length) })
    }
}

/// Cuts a copy into parts.
pub(crate) fn split_for_copy<'s, 't>(source: &'s [u8], target: &'t mut [u8], part: usize) -> Vec<(&'s [u8], &'t mut [u8])> {
    source.chunks(part).zip(target.chunks_mut(part)).collect()
}
