//! The element types a tensor can have, under torch's own names.
//!
//! One table says everything that a file may call a type: torch's name and storage class (the older types have a class each,
//! such as `torch.FloatStorage`; the newer ones are untyped bytes beside the type), the name in safetensors, and the code in
//! our own files.

use std::fmt;

use safetensors::tensor::Dtype;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident, $name:literal, $size:literal, $swap:literal, $storage:expr, $safetensors:expr;)*) => {
        /// The type of a tensor's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum DType {
            $($(#[$doc])* $variant,)*
        }

        impl DType {
            /// Every element type, in declaration order.
            pub const ALL: &[DType] = &[$(DType::$variant,)*];

            /// Its number in files of ours and between ranks: the position in [`DType::ALL`], which only grows at its end.
            pub const fn code(self) -> u8 {
                self as u8
            }

            /// The type with this number.
            pub fn from_code(code: u8) -> Option<DType> {
                DType::ALL.get(usize::from(code)).copied()
            }

            /// Bytes per element.
            pub const fn size(self) -> u64 {
                match self { $(DType::$variant => $size,)* }
            }

            /// Torch's name without the leading `torch.`, such as `bfloat16`.
            pub const fn name(self) -> &'static str {
                match self { $(DType::$variant => $name,)* }
            }

            /// The type that torch calls `name`, given without the leading `torch.`.
            pub fn from_name(name: &str) -> Option<DType> {
                match name { $($name => Some(DType::$variant),)* _ => None }
            }

            /// The unit that changes with byte order: an element, or a component of a complex element.
            pub const fn swap_size(self) -> u64 {
                match self { $(DType::$variant => $swap,)* }
            }

            /// The class in module `torch` whose storages hold this type, such as `FloatStorage`; none for
            /// the types that torch stores as untyped bytes.
            pub const fn storage_class(self) -> Option<&'static str> {
                match self { $(DType::$variant => $storage,)* }
            }

            /// What safetensors calls this type, where it has it.
            pub(crate) const fn safetensors(self) -> Option<Dtype> {
                match self { $(DType::$variant => $safetensors,)* }
            }
        }
    };
}

dtypes! {
    /// IEEE double precision.
    Float64, "float64", 8, 8, Some("DoubleStorage"), Some(Dtype::F64);
    /// IEEE single precision.
    Float32, "float32", 4, 4, Some("FloatStorage"), Some(Dtype::F32);
    /// IEEE half precision.
    Float16, "float16", 2, 2, Some("HalfStorage"), Some(Dtype::F16);
    /// The upper half of a single-precision float.
    BFloat16, "bfloat16", 2, 2, Some("BFloat16Storage"), Some(Dtype::BF16);
    /// 8-bit float with 4 exponent bits, finite.
    Float8E4M3Fn, "float8_e4m3fn", 1, 1, None, Some(Dtype::F8_E4M3);
    /// 8-bit float with 5 exponent bits.
    Float8E5M2, "float8_e5m2", 1, 1, None, Some(Dtype::F8_E5M2);
    /// 8-bit float with 4 exponent bits, finite, no negative zero.
    Float8E4M3Fnuz, "float8_e4m3fnuz", 1, 1, None, Some(Dtype::F8_E4M3FNUZ);
    /// 8-bit float with 5 exponent bits, finite, no negative zero.
    Float8E5M2Fnuz, "float8_e5m2fnuz", 1, 1, None, Some(Dtype::F8_E5M2FNUZ);
    /// 8-bit exponent, used as a block scale.
    Float8E8M0Fnu, "float8_e8m0fnu", 1, 1, None, Some(Dtype::F8_E8M0);
    /// Two 4-bit floats in one byte; shapes count bytes, as in torch.
    Float4E2M1FnX2, "float4_e2m1fn_x2", 1, 1, None, Some(Dtype::F4);
    /// Signed 8-bit integer.
    Int8, "int8", 1, 1, Some("CharStorage"), Some(Dtype::I8);
    /// Signed 16-bit integer.
    Int16, "int16", 2, 2, Some("ShortStorage"), Some(Dtype::I16);
    /// Signed 32-bit integer.
    Int32, "int32", 4, 4, Some("IntStorage"), Some(Dtype::I32);
    /// Signed 64-bit integer.
    Int64, "int64", 8, 8, Some("LongStorage"), Some(Dtype::I64);
    /// Unsigned 8-bit integer.
    UInt8, "uint8", 1, 1, Some("ByteStorage"), Some(Dtype::U8);
    /// Unsigned 16-bit integer.
    UInt16, "uint16", 2, 2, None, Some(Dtype::U16);
    /// Unsigned 32-bit integer.
    UInt32, "uint32", 4, 4, None, Some(Dtype::U32);
    /// Unsigned 64-bit integer.
    UInt64, "uint64", 8, 8, None, Some(Dtype::U64);
    /// One byte, 0 or 1.
    Bool, "bool", 1, 1, Some("BoolStorage"), Some(Dtype::BOOL);
    /// Two half-precision floats.
    Complex32, "complex32", 4, 2, None, None;
    /// Two single-precision floats.
    Complex64, "complex64", 8, 4, Some("ComplexFloatStorage"), Some(Dtype::C64);
    /// Two double-precision floats.
    Complex128, "complex128", 16, 8, Some("ComplexDoubleStorage"), None;
}

impl DType {
    /// The type held by storages of the class `name` in module `torch`.
    pub fn from_storage_class(name: &str) -> Option<DType> {
        DType::ALL.iter().copied().find(|dtype| dtype.storage_class() == Some(name))
    }
}

impl DType {
    /// Whether elements have a real and an imaginary part.
    pub fn is_complex(self) -> bool {
        self.name().starts_with("complex")
    }

    /// Whether elements are integers.
    pub fn is_integer(self) -> bool {
        self.name().starts_with("int") || self.name().starts_with("uint")
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How the stored bytes of an element relate to its value.
///
/// Torch stores a view as the memory behind it: a conjugated or negated one without computing anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ElementForm {
    /// The most significant byte comes first.
    pub big_endian: bool,
    /// The value is the complex conjugate of what is stored.
    pub conjugate: bool,
    /// The value is the negative of what is stored.
    pub negative: bool,
}

impl ElementForm {
    /// Whether the stored bytes are the value's own.
    pub fn is_plain(self, dtype: DType) -> bool {
        let swapped = self.big_endian && dtype.swap_size() > 1;
        let conjugated = self.conjugate && dtype.is_complex();
        !(swapped || self.negative || conjugated)
    }

    /// Turns stored elements into their values, in place.
    pub fn decode(self, dtype: DType, data: &mut [u8]) {
        if self.big_endian {
            swap_bytes(dtype, data);
        }
        if self.conjugate && dtype.is_complex() {
            // The imaginary part is the second half of an element, its sign the last bit.
            data.chunks_exact_mut(dtype.size() as usize).filter_map(<[u8]>::last_mut).for_each(|sign| *sign ^= 0x80);
        }
        if self.negative {
            negate(dtype, data);
        }
    }
}

/// Negates elements in place. Only numbers with a sign can be negated, and torch gives no others the bit.
fn negate(dtype: DType, data: &mut [u8]) {
    let unit = dtype.swap_size() as usize;
    if dtype.is_integer() {
        for element in data.chunks_exact_mut(unit) {
            let mut carry = true;
            for byte in element {
                (*byte, carry) = (!*byte).overflowing_add(u8::from(carry));
            }
        }
        return;
    }
    data.chunks_exact_mut(unit).filter_map(<[u8]>::last_mut).for_each(|sign| *sign ^= 0x80);
}

/// Turns elements from one byte order into the other, in place.
///
/// Bytes past the last whole unit (of [`DType::swap_size`]) stay as they are.
pub fn swap_bytes(dtype: DType, data: &mut [u8]) {
    match dtype.swap_size() {
        2 => data.as_chunks_mut::<2>().0.iter_mut().for_each(|unit| unit.reverse()),
        4 => data.as_chunks_mut::<4>().0.iter_mut().for_each(|unit| unit.reverse()),
        8 => data.as_chunks_mut::<8>().0.iter_mut().for_each(|unit| unit.reverse()),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_storage_classes_lead_back_to_their_type() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_name(dtype.name()), Some(dtype));
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
            if let Some(class) = dtype.storage_class() {
                assert_eq!(DType::from_storage_class(class), Some(dtype));
            }
            assert_eq!(dtype.size() % dtype.swap_size(), 0);
        }
        assert_eq!(DType::from_name("torch.float32"), None);
        assert_eq!(DType::from_storage_class("QInt8Storage"), None);
    }

    #[test]
    fn swapping_reverses_each_component_and_twice_is_nothing() {
        let mut data: Vec<u8> = (0..16).collect();
        swap_bytes(DType::Complex64, &mut data);
        assert_eq!(&data[..8], &[3, 2, 1, 0, 7, 6, 5, 4]);
        for &dtype in DType::ALL {
            let mut data: Vec<u8> = (0..48).collect();
            swap_bytes(dtype, &mut data);
            assert_eq!(data[0], (dtype.swap_size() - 1) as u8);
            swap_bytes(dtype, &mut data);
            assert_eq!(data, (0..48).collect::<Vec<u8>>());
        }
    }
}
