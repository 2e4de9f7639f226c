//! Plain values to pickles.

use super::encode::{BATCH, Encoder};
use super::error::PickleError;
use super::limits::MAX_DEPTH;
use super::opcode as op;
use crate::value::{Instance, Int, NumpyArray, NumpyScalar, PlainClass, Value, type_string};

/// Pickles a value with a protocol from 2 to 5; Python's `pickle.loads` gives the equal object.
pub fn write_value(value: &Value, protocol: u8) -> Result<Vec<u8>, PickleError> {
    let mut encoder = Encoder::new(protocol)?;
    encoder.value(value)?;
    Ok(encoder.finish())
}

impl Encoder {
    /// Writes a plain value.
    pub fn value(&mut self, value: &Value) -> Result<(), PickleError> {
        self.value_at(value, 0)
    }

    fn value_at(&mut self, value: &Value, depth: usize) -> Result<(), PickleError> {
        if depth > MAX_DEPTH {
            return Err(PickleError::Limit { what: "levels of nesting", limit: MAX_DEPTH as u64, at: 0 });
        }
        self.frame_break();
        match value {
            Value::None => self.none(),
            Value::Bool(value) => self.bool(*value),
            Value::Int(Int::Small(value)) => self.int(*value),
            Value::Int(Int::Big(value)) => self.big_int(value)?,
            Value::Float(value) => self.float(*value),
            Value::Complex(re, im) => {
                self.global("builtins", "complex");
                self.float(*re);
                self.float(*im);
                self.tuple(2);
                self.reduce();
            }
            Value::Str(text) => self.str(text),
            Value::Bytes(bytes) => self.bytes(bytes),
            Value::ByteArray(bytes) => self.byte_array(bytes),
            Value::List(elements) => self.list(elements, depth)?,
            Value::Tuple(elements) => self.tuple_of(elements, depth)?,
            Value::Dict(pairs) => {
                self.empty_dict();
                self.pairs(pairs, depth)?;
            }
            Value::OrderedDict(pairs) => {
                self.global("collections", "OrderedDict");
                self.tuple(0);
                self.reduce();
                self.pairs(pairs, depth)?;
            }
            Value::Set(elements) if self.protocol() >= 4 => {
                self.raw(&[op::EMPTY_SET]);
                for batch in elements.chunks(BATCH) {
                    self.mark();
                    self.all(batch, depth)?;
                    self.raw(&[op::ADDITEMS]);
                }
            }
            Value::FrozenSet(elements) if self.protocol() >= 4 => {
                self.mark();
                self.all(elements, depth)?;
                self.raw(&[op::FROZENSET]);
            }
            Value::Set(elements) | Value::FrozenSet(elements) => {
                let name = if matches!(value, Value::Set(_)) { "set" } else { "frozenset" };
                self.global("builtins", name);
                self.list(elements, depth)?;
                self.tuple(1);
                self.reduce();
            }
            Value::Size(dims) => {
                self.global("torch", "Size");
                if Encoder::tuple_needs_mark(dims.len()) {
                    self.mark();
                }
                dims.iter().for_each(|d| self.int(*d));
                self.tuple(dims.len());
                self.tuple(1);
                self.reduce();
            }
            Value::DType(dtype) => self.global("torch", dtype.name()),
            Value::Device(text) => self.device(text),
            Value::Path(path) => {
                self.global("pathlib", path.class.name());
                self.str(&path.text);
                self.tuple(1);
                self.reduce();
            }
            Value::Numpy(scalar) => self.numpy(scalar),
            Value::Array(array) => self.array(array),
            Value::Instance(instance) => self.instance(instance, depth)?,
        }
        Ok(())
    }

    fn all(&mut self, elements: &[Value], depth: usize) -> Result<(), PickleError> {
        elements.iter().try_for_each(|element| self.value_at(element, depth + 1))
    }

    fn list(&mut self, elements: &[Value], depth: usize) -> Result<(), PickleError> {
        self.empty_list();
        for batch in elements.chunks(BATCH) {
            if let [one] = batch {
                self.value_at(one, depth + 1)?;
                self.raw(&[op::APPEND]);
                continue;
            }
            self.mark();
            self.all(batch, depth)?;
            self.append_items();
        }
        Ok(())
    }

    fn tuple_of(&mut self, elements: &[Value], depth: usize) -> Result<(), PickleError> {
        if Encoder::tuple_needs_mark(elements.len()) {
            self.mark();
        }
        self.all(elements, depth)?;
        self.tuple(elements.len());
        Ok(())
    }

    fn pairs(&mut self, pairs: &[(Value, Value)], depth: usize) -> Result<(), PickleError> {
        for batch in pairs.chunks(BATCH) {
            if let [(key, value)] = batch {
                self.value_at(key, depth + 1)?;
                self.value_at(value, depth + 1)?;
                self.raw(&[op::SETITEM]);
                continue;
            }
            self.mark();
            for (key, value) in batch {
                self.value_at(key, depth + 1)?;
                self.value_at(value, depth + 1)?;
            }
            self.set_items();
        }
        Ok(())
    }

    fn device(&mut self, text: &str) {
        self.global("torch", "device");
        let index = text.split_once(':').and_then(|(kind, i)| Some((kind, i.parse().ok()?)));
        match index {
            Some((kind, index)) => {
                self.str(kind);
                self.int(index);
                self.tuple(2);
            }
            None => {
                self.str(text);
                self.tuple(1);
            }
        }
        self.reduce();
    }

    fn numpy(&mut self, scalar: &NumpyScalar) {
        // The module's name of numpy 1, which numpy 2 keeps for pickles.
        self.global("numpy.core.multiarray", "scalar");
        self.numpy_type(&scalar.code, scalar.little_endian);
        self.bytes(&scalar.data);
        self.tuple(2);
        self.reduce();
    }

    fn array(&mut self, array: &NumpyArray) {
        self.global("numpy.core.multiarray", "_reconstruct");
        self.global("numpy", "ndarray");
        self.int(0);
        self.tuple(1);
        self.bytes(b"b");
        self.tuple(3);
        self.reduce();
        self.mark();
        self.int(1);
        if Encoder::tuple_needs_mark(array.shape.len()) {
            self.mark();
        }
        array.shape.iter().for_each(|dim| self.uint(*dim));
        self.tuple(array.shape.len());
        self.numpy_type(&array.code, array.little_endian);
        self.bool(false);
        self.bytes(&array.data);
        self.tuple(5);
        self.build();
    }

    fn numpy_type(&mut self, code: &str, little_endian: bool) {
        let unit = NumpyScalar::time_unit(code);
        self.global("numpy", "dtype");
        self.str(unit.and(code.get(..2)).unwrap_or(code));
        self.bool(false);
        self.bool(true);
        self.tuple(3);
        self.reduce();
        // Texts of a fixed length say how long, and in which steps their memory is aligned.
        let (size, alignment) = match (NumpyScalar::size_of(code), NumpyArray::item_size(code)) {
            (None, Some(size)) => (size as i64, if code.starts_with('U') { 4 } else { 1 }),
            _ => (-1, -1),
        };
        let order = type_string(code, little_endian);
        self.mark();
        self.int(if unit.is_some() { 4 } else { 3 });
        self.str(&order[..1]);
        (0..3).for_each(|_| self.none());
        self.int(size);
        self.int(alignment);
        self.int(0);
        if let Some((count, unit)) = unit {
            self.none();
            self.mark();
            self.bytes(unit.as_bytes());
            self.uint(u64::from(count));
            self.int(1);
            self.int(1);
            self.tuple(4);
            self.tuple(2);
        }
        self.tuple(if unit.is_some() { 9 } else { 8 });
        self.build();
    }

    fn instance(&mut self, instance: &Instance, depth: usize) -> Result<(), PickleError> {
        let (module, name) = match instance.class {
            PlainClass::DateTime => ("datetime", "datetime"),
            PlainClass::Date => ("datetime", "date"),
            PlainClass::Time => ("datetime", "time"),
            PlainClass::TimeDelta => ("datetime", "timedelta"),
            PlainClass::TimeZone => ("datetime", "timezone"),
            PlainClass::Fraction => ("fractions", "Fraction"),
            PlainClass::Decimal => ("decimal", "Decimal"),
            PlainClass::Uuid => ("uuid", "UUID"),
            PlainClass::Range => ("builtins", "range"),
            PlainClass::Slice => ("builtins", "slice"),
            PlainClass::Counter => ("collections", "Counter"),
            PlainClass::DefaultDict => ("collections", "defaultdict"),
            PlainClass::Layout => ("torch.serialization", "_get_layout"),
            PlainClass::MemoryFormat => ("torch", ""),
            PlainClass::Class => ("builtins", ""),
            PlainClass::NumpyDType => ("numpy", ""),
        };
        match (instance.class, instance.args.as_slice()) {
            (PlainClass::MemoryFormat | PlainClass::Class, [Value::Str(name)]) => self.global(module, name),
            (PlainClass::NumpyDType, [Value::Str(text)]) => {
                self.numpy_type(text.get(1..).unwrap_or_default(), !text.starts_with('>'))
            }
            (PlainClass::Uuid, [number]) => {
                self.global(module, name);
                self.tuple(0);
                self.raw(&[op::NEWOBJ]);
                self.empty_dict();
                self.str("int");
                self.value_at(number, depth + 1)?;
                self.raw(&[op::SETITEM]);
                self.build();
            }
            (PlainClass::DefaultDict, [factory, Value::Dict(pairs)]) => {
                self.global(module, name);
                self.value_at(factory, depth + 1)?;
                self.tuple(1);
                self.reduce();
                self.pairs(pairs, depth)?;
            }
            (_, args) => {
                self.global(module, name);
                self.tuple_of(args, depth)?;
                self.reduce();
            }
        }
        Ok(())
    }
}
