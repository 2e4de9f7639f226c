//! Objects of classes that are data: dates, fractions, ranges, counters, arrays. Recognised by name, never made.

use std::borrow::Cow;

use super::document::{Global, Made, Object, View};
use super::error::PickleError;
use super::node::Node;
use super::read_value::Reader;
use crate::value::{Instance, Int, MEMORY_FORMATS, NumpyArray, NumpyScalar, PlainClass, Value};

/// A class or constant that is a value by its name alone.
pub(super) fn named(global: &Global<'_>) -> Option<Value> {
    let (class, name) = match (global.module(), global.name()) {
        // What protocol 2 calls Python 3's classes.
        ("builtins", "long") => (PlainClass::Class, "int"),
        ("builtins", "unicode") => (PlainClass::Class, "str"),
        ("builtins", "xrange") => (PlainClass::Class, "range"),
        ("builtins", name) => (PlainClass::Class, name),
        ("torch", name) if MEMORY_FORMATS.contains(&name) => (PlainClass::MemoryFormat, name),
        _ => return None,
    };
    Instance::new(class, vec![Value::from(name)]).map(Value::Instance)
}

impl<'d> Reader<'d, '_> {
    /// The value of an object, if it is of a class that is data and made of what it should be.
    pub(super) fn known(
        &mut self,
        node: Node,
        class: &Global<'_>,
        object: Object<'d>,
        args: &'d [Node],
        only_args: bool,
    ) -> Result<Option<Value>, PickleError> {
        let kind = match (class.module(), class.name()) {
            ("numpy", "dtype") => {
                let text = self.numpy_type(node).map(|(code, little)| crate::value::type_string(&code, little));
                return Ok(text.and_then(|text| instance(PlainClass::NumpyDType, vec![Value::Str(text)])));
            }
            ("numpy._core.multiarray", "_reconstruct") => return self.array(object, args),
            ("uuid", "UUID") => return self.uuid(object),
            ("collections", "defaultdict") => return self.default_dict(node, object, args),
            _ if !only_args => return Ok(None),
            ("datetime", "datetime") => PlainClass::DateTime,
            ("datetime", "date") => PlainClass::Date,
            ("datetime", "time") => PlainClass::Time,
            ("datetime", "timedelta") => PlainClass::TimeDelta,
            ("datetime", "timezone") => PlainClass::TimeZone,
            ("fractions", "Fraction") => PlainClass::Fraction,
            ("decimal", "Decimal") => PlainClass::Decimal,
            ("builtins", "range" | "xrange") => PlainClass::Range,
            ("builtins", "slice") => PlainClass::Slice,
            ("collections", "Counter") => PlainClass::Counter,
            ("torch.serialization", "_get_layout") => PlainClass::Layout,
            _ => return Ok(None),
        };
        if args.len() > 3 {
            return Ok(None);
        }
        let mut values = Vec::with_capacity(args.len());
        for arg in args {
            values.push(self.inner(node, *arg)?);
        }
        let mut values = match (kind, values.as_slice()) {
            (PlainClass::Fraction, [Value::Str(text)]) => match fraction(text) {
                Some(parts) => parts,
                None => return Ok(None),
            },
            (PlainClass::Counter, []) => vec![Value::Dict(Vec::new())],
            _ => values,
        };
        if kind == PlainClass::Fraction {
            values.truncate(2);
        }
        Ok(instance(kind, values))
    }

    /// `defaultdict(factory)`, filled afterwards.
    fn default_dict(&mut self, node: Node, object: Object<'d>, args: &'d [Node]) -> Result<Option<Value>, PickleError> {
        if object.made != Made::Call || object.state.is_some() || !object.items.is_empty() {
            return Ok(None);
        }
        let factory = match args {
            [] => Value::None,
            [factory] => self.inner(node, *factory)?,
            _ => return Ok(None),
        };
        let pairs = self.pairs(node, object.pairs)?;
        Ok(instance(PlainClass::DefaultDict, vec![factory, Value::Dict(pairs)]))
    }

    /// `UUID.__new__(UUID)` with the state `{"int": …}`.
    fn uuid(&mut self, object: Object<'d>) -> Result<Option<Value>, PickleError> {
        let bare = object.made == Made::New && object.args == Node::EMPTY_TUPLE && object.items.is_empty();
        let state = object.state.filter(|_| bare && object.pairs.is_empty()).map(|state| self.document.view(state));
        let Some(View::Dict([[name, number]])) = state else { return Ok(None) };
        if self.document.as_str(*name) != Some("int") {
            return Ok(None);
        }
        let number = self.value(*number)?;
        Ok(instance(PlainClass::Uuid, vec![number]))
    }

    /// `_reconstruct(ndarray, (0,), b"b")` with the state `(1, shape, dtype, fortran, data)`.
    fn array(&mut self, object: Object<'d>, args: &'d [Node]) -> Result<Option<Value>, PickleError> {
        let document = self.document;
        let [class, shape, kind] = args else { return Ok(None) };
        let empty = document.as_tuple(*shape).is_some_and(|dims| matches!(dims, [dim] if document.as_i64(*dim) == Some(0)));
        let plain = document.as_global(*class).is_some_and(|class| class.is("numpy", "ndarray"))
            && empty
            && matches!(document.view(*kind), View::Bytes(b"b"));
        if !plain || object.made != Made::Call || !object.items.is_empty() || !object.pairs.is_empty() {
            return Ok(None);
        }
        let Some(&[version, shape, dtype, fortran, data]) = object.state.and_then(|state| document.as_tuple(state)) else {
            return Ok(None);
        };
        let shape: Option<Vec<u64>> =
            document.as_tuple(shape).and_then(|dims| dims.iter().map(|dim| document.as_u64(*dim)).collect());
        let (View::Bool(false), View::Bytes(data), Some(1)) =
            (document.view(fortran), document.view(data), document.as_i64(version))
        else {
            return self.fortran(version, shape, dtype, fortran, data);
        };
        let (Some(shape), Some((code, little_endian))) = (shape, self.numpy_type(dtype)) else { return Ok(None) };
        self.charge(data.len())?;
        let array = NumpyArray { code: code.into_owned(), little_endian, shape, data: data.to_vec() };
        Ok(array.is_sound().then(|| Value::Array(Box::new(array))))
    }

    /// An array whose first index varies fastest, turned around.
    fn fortran(
        &mut self,
        version: Node,
        shape: Option<Vec<u64>>,
        dtype: Node,
        fortran: Node,
        data: Node,
    ) -> Result<Option<Value>, PickleError> {
        let document = self.document;
        let (View::Bool(true), View::Bytes(data), Some(1)) =
            (document.view(fortran), document.view(data), document.as_i64(version))
        else {
            return Ok(None);
        };
        let (Some(shape), Some((code, little_endian))) = (shape, self.numpy_type(dtype)) else { return Ok(None) };
        self.charge(data.len())?;
        let size = NumpyArray::item_size(&code).unwrap_or(1);
        let mut array = NumpyArray { code: code.into_owned(), little_endian, shape, data: data.to_vec() };
        if !array.is_sound() {
            return Ok(None);
        }
        array.data = row_major(&array.shape, size, data);
        Ok(Some(Value::Array(Box::new(array))))
    }

    /// Type code and byte order of a `numpy.dtype` of numbers, of dates, or of texts of a fixed length.
    pub(super) fn numpy_type(&self, node: Node) -> Option<(Cow<'d, str>, bool)> {
        let document = self.document;
        let dtype = document.as_object(node)?;
        let only_state = dtype.made == Made::Call && dtype.items.is_empty() && dtype.pairs.is_empty();
        if !only_state || !document.global(dtype.class).is("numpy", "dtype") {
            return None;
        }
        let [code, View::Bool(false), View::Bool(true)] =
            document.as_tuple(dtype.args)?.iter().map(|n| document.view(*n)).collect::<Vec<_>>()[..]
        else {
            return None;
        };
        let View::Str(code) = code else { return None };
        // Version, byte order, sub-array, names, fields; numbers have none of the last three. Dates have their unit at the end.
        let state = document.as_tuple(dtype.state?)?;
        let (state, expected, code) = match (code, state) {
            ("M8" | "m8", [state @ .., unit]) => (state, 4, Cow::Owned(format!("{code}{}", self.time_unit(*unit)?))),
            _ => (state, 3, Cow::Borrowed(code)),
        };
        let [version, order, none @ .., length, alignment, flags] = state else { return None };
        if document.as_i64(*version) != Some(expected)
            || none.len() != 3
            || none.iter().any(|n| !matches!(document.view(*n), View::None))
        {
            return None;
        }
        // Numbers say nothing of their size; texts of a fixed length do, and in which steps their memory is aligned.
        let size = NumpyArray::item_size(&code)? as i64;
        let number = |node: &Node| document.as_i64(*node);
        let says = (number(length)?, number(alignment)?, number(flags)?);
        let right = match NumpyScalar::size_of(&code) {
            Some(_) => says == (-1, -1, 0),
            None => says.0 == size && says.1 == if code.starts_with('U') { 4 } else { 1 } && matches!(says.2, 0 | 8),
        };
        if !right {
            return None;
        }
        match document.as_str(*order)? {
            "<" | "|" => Some((code, true)),
            ">" => Some((code, false)),
            _ => None,
        }
    }

    /// The unit of dates, as a type code has it: `[ms]` of `(None, (b"ms", 1, 1, 1))`, and nothing of generic ones.
    fn time_unit(&self, node: Node) -> Option<String> {
        let document = self.document;
        let [metadata, unit] = document.as_tuple(node)? else { return None };
        if !matches!(document.view(*metadata), View::None | View::Dict([])) {
            return None;
        }
        let [unit, count, numerator, denominator] = document.as_tuple(*unit)? else { return None };
        let View::Bytes(unit) = document.view(*unit) else { return None };
        let unit = std::str::from_utf8(unit).ok()?;
        let number = |node: &Node| document.as_i64(*node);
        match (unit, number(count)?, number(numerator)?, number(denominator)?) {
            ("generic", 1, 1, 1) => Some(String::new()),
            (_, 1, 1, 1) => Some(format!("[{unit}]")),
            (_, count, 1, 1) => Some(format!("[{count}{unit}]")),
            _ => None,
        }
    }
}

fn instance(class: PlainClass, args: Vec<Value>) -> Option<Value> {
    Instance::new(class, args).map(Value::Instance)
}

/// Numerator and denominator of `"3/4"`.
fn fraction(text: &str) -> Option<Vec<Value>> {
    let (up, down) = text.split_once('/').unwrap_or((text, "1"));
    let number = |text: &str| -> Option<Value> {
        let digits = text.strip_prefix('-').unwrap_or(text);
        let sane =
            !digits.is_empty() && digits.len() <= super::limits::MAX_INT_DIGITS && digits.bytes().all(|b| b.is_ascii_digit());
        let big: num_bigint::BigInt = text.parse().ok().filter(|_| sane)?;
        Some(Value::Int(Int::from(big)))
    };
    Some(vec![number(up)?, number(down)?])
}

/// Elements in row-major order of ones in column-major order.
fn row_major(shape: &[u64], size: usize, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len());
    let mut index = vec![0u64; shape.len()];
    for _ in 0..data.len() / size.max(1) {
        let mut at = 0;
        for (dim, place) in shape.iter().zip(&index).rev() {
            at = at * dim + place;
        }
        let start = at as usize * size;
        out.extend_from_slice(data.get(start..start + size).unwrap_or_default());
        for (dim, place) in shape.iter().zip(index.iter_mut()).rev() {
            *place += 1;
            if *place < *dim {
                break;
            }
            *place = 0;
        }
    }
    out
}
