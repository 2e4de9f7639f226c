//! Plain Python values to the engine's inert ones and back. What is not plain is for the caller to pickle.

use num_bigint::BigInt;
use pyo3::prelude::*;
use pyo3::types::{
    IntoPyDict, PyBool, PyByteArray, PyBytes, PyComplex, PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PySet, PyString, PyTuple,
};
use reshard::formats::{BUILTIN_CLASSES, Instance, Int, NumpyArray, NumpyScalar, PathClass, PathValue, PlainClass};
use reshard::{DType, Value};

use crate::errors::invalid;

/// Deeper values are pickled instead.
const DEEPEST: usize = 100;

/// Whether an object is plain: it is stored as data and comes back without running anything.
#[pyfunction]
pub(crate) fn is_plain(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(from_python(object, 0)?.is_some())
}

/// The value of a Python object, or `None` when it is not plain.
pub(crate) fn plain(object: &Bound<'_, PyAny>) -> PyResult<Option<Value>> {
    from_python(object, 0)
}

fn from_python(object: &Bound<'_, PyAny>, depth: usize) -> PyResult<Option<Value>> {
    if depth > DEEPEST {
        return Ok(None);
    }
    if object.is_none() {
        return Ok(Some(Value::None));
    }
    // Subclasses carry more than their base knows, so only the exact types are plain.
    if let Ok(text) = object.cast_exact::<PyString>() {
        // A lone surrogate is not text; pickle knows how to store it.
        return Ok(text.to_str().ok().map(|text| Value::Str(text.to_owned())));
    }
    if let Ok(flag) = object.cast_exact::<PyBool>() {
        return Ok(Some(Value::Bool(flag.is_true())));
    }
    if object.cast_exact::<PyInt>().is_ok() {
        return Ok(Some(Value::Int(match object.extract::<i64>() {
            Ok(small) => Int::Small(small),
            Err(_) => big_int(object)?,
        })));
    }
    if let Ok(float) = object.cast_exact::<PyFloat>() {
        return Ok(Some(Value::Float(float.value())));
    }
    if let Ok(list) = object.cast_exact::<PyList>() {
        return Ok(all(list.iter(), depth)?.map(Value::List));
    }
    if let Ok(tuple) = object.cast_exact::<PyTuple>() {
        return Ok(all(tuple.iter(), depth)?.map(Value::Tuple));
    }
    if let Ok(dict) = object.cast_exact::<PyDict>() {
        return Ok(pairs(dict, depth)?.map(Value::Dict));
    }
    if let Ok(bytes) = object.cast_exact::<PyBytes>() {
        return Ok(Some(Value::Bytes(bytes.as_bytes().to_vec())));
    }
    if let Ok(bytes) = object.cast_exact::<PyByteArray>() {
        return Ok(Some(Value::ByteArray(bytes.to_vec())));
    }
    if let Ok(set) = object.cast_exact::<PySet>() {
        return Ok(all(set.iter(), depth)?.map(Value::Set));
    }
    if let Ok(set) = object.cast_exact::<PyFrozenSet>() {
        return Ok(all(set.iter(), depth)?.map(Value::FrozenSet));
    }
    if let Ok(complex) = object.cast_exact::<PyComplex>() {
        return Ok(Some(Value::Complex(complex.getattr("real")?.extract()?, complex.getattr("imag")?.extract()?)));
    }
    from_library(object, depth)
}

/// An integer beyond 64 bits.
fn big_int(object: &Bound<'_, PyAny>) -> PyResult<Int> {
    let bits: usize = object.call_method0("bit_length")?.extract()?;
    let signed = [("signed", true)].into_py_dict(object.py())?;
    let bytes = object.call_method("to_bytes", (bits / 8 + 1, "little"), Some(&signed))?;
    Ok(Int::from(BigInt::from_signed_bytes_le(bytes.cast::<PyBytes>()?.as_bytes())))
}

/// Values of the few library classes that count as plain.
fn from_library(object: &Bound<'_, PyAny>, depth: usize) -> PyResult<Option<Value>> {
    let class = object.get_type();
    let (module, name) = (class.module()?, class.qualname()?);
    let (module, name) = (module.to_str()?, name.to_str()?);
    Ok(match (module, name) {
        ("torch", "Size") => Some(Value::Size(object.extract()?)),
        ("torch", "dtype") => {
            let text = object.str()?;
            text.to_str()?.strip_prefix("torch.").and_then(DType::from_name).map(Value::DType)
        }
        ("torch", "device") => Some(Value::Device(object.str()?.to_str()?.to_owned())),
        ("collections", "OrderedDict") => match object.cast::<PyDict>() {
            Ok(dict) if attributes(object)? == 0 => pairs(dict, depth)?.map(Value::OrderedDict),
            _ => None,
        },
        ("pathlib" | "pathlib._local", _) => match PathClass::from_name(name) {
            Some(class) => Some(Value::Path(PathValue { class, text: object.str()?.to_str()?.to_owned() })),
            None => None,
        },
        ("numpy", "ndarray") => numpy_array(object)?,
        ("numpy" | "numpy.dtypes", _) => numpy_value(object)?,
        _ => instance(object, module, name, depth)?,
    })
}

/// Objects of Python's own classes that are data.
fn instance(object: &Bound<'_, PyAny>, module: &str, name: &str, depth: usize) -> PyResult<Option<Value>> {
    let class = match (module, name) {
        ("datetime", "datetime") => PlainClass::DateTime,
        ("datetime", "date") => PlainClass::Date,
        ("datetime", "time") => PlainClass::Time,
        ("datetime", "timedelta") => PlainClass::TimeDelta,
        ("datetime", "timezone") => PlainClass::TimeZone,
        ("fractions", "Fraction") => PlainClass::Fraction,
        ("decimal", "Decimal") => PlainClass::Decimal,
        ("uuid", "UUID") => PlainClass::Uuid,
        ("builtins", "range") => PlainClass::Range,
        ("builtins", "slice") => PlainClass::Slice,
        ("collections", "Counter") if attributes(object)? == 0 => PlainClass::Counter,
        ("collections", "defaultdict") => PlainClass::DefaultDict,
        ("torch", "layout") => PlainClass::Layout,
        ("torch", "memory_format") => PlainClass::MemoryFormat,
        ("builtins", "type") => PlainClass::Class,
        _ => return Ok(None),
    };
    let py = object.py();
    let parts: Vec<Bound<'_, PyAny>> = match class {
        // What they pickle as: bytes and a timezone, or a timedelta and a name.
        PlainClass::DateTime | PlainClass::Date | PlainClass::Time | PlainClass::TimeZone => {
            let reduced = match class {
                PlainClass::TimeZone => object.call_method0("__getinitargs__")?,
                _ => object.call_method1("__reduce_ex__", (4,))?.get_item(1)?,
            };
            reduced.cast::<PyTuple>()?.iter().collect()
        }
        PlainClass::TimeDelta => get(object, &["days", "seconds", "microseconds"])?,
        PlainClass::Fraction => get(object, &["numerator", "denominator"])?,
        PlainClass::Uuid if object.getattr("is_safe")?.getattr("name")?.extract::<String>()? != "unknown" => return Ok(None),
        PlainClass::Uuid => get(object, &["int"])?,
        PlainClass::Range | PlainClass::Slice => get(object, &["start", "stop", "step"])?,
        PlainClass::Counter => vec![py.get_type::<PyDict>().call1((object,))?],
        PlainClass::DefaultDict => vec![object.getattr("default_factory")?, py.get_type::<PyDict>().call1((object,))?],
        PlainClass::Class => {
            let (module, name): (String, String) =
                (object.getattr("__module__")?.extract()?, object.getattr("__name__")?.extract()?);
            if module != "builtins" || !BUILTIN_CLASSES.contains(&name.as_str()) {
                return Ok(None);
            }
            vec![PyString::new(py, &name).into_any()]
        }
        PlainClass::MemoryFormat => {
            let text = object.str()?;
            vec![PyString::new(py, text.to_str()?.trim_start_matches("torch.")).into_any()]
        }
        _ => vec![object.str()?.into_any()],
    };
    let parts = all(parts.into_iter(), depth)?;
    Ok(parts.and_then(|parts| Instance::new(class, parts)).map(Value::Instance))
}

fn get<'py>(object: &Bound<'py, PyAny>, names: &[&str]) -> PyResult<Vec<Bound<'py, PyAny>>> {
    names.iter().map(|name| object.getattr(*name)).collect()
}

/// An array of numbers, or of texts of a fixed length.
fn numpy_array(object: &Bound<'_, PyAny>) -> PyResult<Option<Value>> {
    let dtype = object.getattr("dtype")?;
    let Some((code, little_endian)) = numpy_code(&dtype)? else { return Ok(None) };
    let data = object.call_method0("tobytes")?.cast::<PyBytes>()?.as_bytes().to_vec();
    let array = NumpyArray { code, little_endian, shape: object.getattr("shape")?.extract()?, data };
    Ok(array.is_sound().then(|| Value::Array(Box::new(array))))
}

/// Type code and byte order, for types that are data and carry nothing else.
fn numpy_code(dtype: &Bound<'_, PyAny>) -> PyResult<Option<(String, bool)>> {
    let text: String = dtype.getattr("str")?.extract()?;
    let code = text.trim_start_matches(['<', '>', '|', '=']).to_owned();
    let bare = dtype.getattr("metadata")?.is_none() && dtype.getattr("names")?.is_none() && dtype.getattr("subdtype")?.is_none();
    Ok((bare && NumpyArray::item_size(&code).is_some()).then(|| (code, !text.starts_with('>'))))
}

/// A numpy scalar or dtype.
fn numpy_value(object: &Bound<'_, PyAny>) -> PyResult<Option<Value>> {
    if !object.is_instance(&object.py().import("numpy")?.getattr("dtype")?)? {
        return numpy_scalar(object);
    }
    let Some((code, little_endian)) = numpy_code(object)? else { return Ok(None) };
    let array = NumpyArray { code, little_endian, shape: Vec::new(), data: Vec::new() };
    Ok(Instance::new(PlainClass::NumpyDType, vec![Value::Str(array.type_string())]).map(Value::Instance))
}

/// How many attributes an instance has of its own.
fn attributes(object: &Bound<'_, PyAny>) -> PyResult<usize> {
    match object.getattr("__dict__") {
        Ok(dict) => dict.len(),
        Err(_) => Ok(0),
    }
}

fn numpy_scalar(object: &Bound<'_, PyAny>) -> PyResult<Option<Value>> {
    if !object.is_instance(&object.py().import("numpy")?.getattr("generic")?)? {
        return Ok(None);
    }
    let text: String = object.getattr("dtype")?.getattr("str")?.extract()?;
    let code = text.trim_start_matches(['<', '>', '|', '=']).to_owned();
    if NumpyScalar::size_of(&code).is_none() {
        return Ok(None);
    }
    let data: Vec<u8> = object.call_method0("tobytes")?.cast::<PyBytes>()?.as_bytes().to_vec();
    Ok(Some(Value::Numpy(NumpyScalar { code, little_endian: !text.starts_with('>'), data })))
}

fn all<'py>(items: impl Iterator<Item = Bound<'py, PyAny>>, depth: usize) -> PyResult<Option<Vec<Value>>> {
    let mut values = Vec::new();
    for item in items {
        match from_python(&item, depth + 1)? {
            Some(value) => values.push(value),
            None => return Ok(None),
        }
    }
    Ok(Some(values))
}

fn pairs(dict: &Bound<'_, PyDict>, depth: usize) -> PyResult<Option<Vec<(Value, Value)>>> {
    let mut pairs = Vec::with_capacity(dict.len());
    for (key, value) in dict.iter() {
        match (from_python(&key, depth + 1)?, from_python(&value, depth + 1)?) {
            (Some(key), Some(value)) => pairs.push((key, value)),
            _ => return Ok(None),
        }
    }
    Ok(Some(pairs))
}

/// The Python object of a value. Without torch a `torch.Size` is a tuple, a dtype and a device are their names.
pub(crate) fn to_python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    let list = |items: &[Value]| -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, items.iter().map(|item| to_python(py, item)).collect::<PyResult<Vec<_>>>()?)
    };
    Ok(match value {
        Value::None => py.None().into_bound(py),
        Value::Bool(flag) => PyBool::new(py, *flag).to_owned().into_any(),
        Value::Int(Int::Small(number)) => number.into_pyobject(py)?.into_any(),
        Value::Int(Int::Big(number)) => {
            let bytes = PyBytes::new(py, &number.to_signed_bytes_le());
            let signed = [("signed", true)].into_py_dict(py)?;
            py.get_type::<PyInt>().call_method("from_bytes", (bytes, "little"), Some(&signed))?
        }
        Value::Float(number) => PyFloat::new(py, *number).into_any(),
        Value::Complex(real, imaginary) => PyComplex::from_doubles(py, *real, *imaginary).into_any(),
        Value::Str(text) => PyString::new(py, text).into_any(),
        Value::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
        Value::ByteArray(bytes) => PyByteArray::new(py, bytes).into_any(),
        Value::List(items) => list(items)?.into_any(),
        Value::Tuple(items) => list(items)?.to_tuple().into_any(),
        Value::Dict(pairs) => dict(py, pairs)?.into_any(),
        Value::OrderedDict(pairs) => py.import("collections")?.getattr("OrderedDict")?.call1((dict(py, pairs)?,))?,
        Value::Set(items) => PySet::new(py, list(items)?)?.into_any(),
        Value::FrozenSet(items) => PyFrozenSet::new(py, list(items)?)?.into_any(),
        Value::Size(sizes) => match torch(py)? {
            Some(torch) => torch.getattr("Size")?.call1((sizes,))?,
            None => PyTuple::new(py, sizes)?.into_any(),
        },
        Value::DType(dtype) => match torch(py)? {
            Some(torch) => torch.getattr(dtype.name())?,
            None => PyString::new(py, dtype.name()).into_any(),
        },
        Value::Device(name) => match torch(py)? {
            Some(torch) => {
                let device = torch.getattr("device")?.call1((name,));
                device.map_err(|_| invalid(py, format!("{name:?} is a device that this torch does not know")))?
            }
            None => PyString::new(py, name).into_any(),
        },
        Value::Path(path) => path_object(py, path)?,
        Value::Numpy(scalar) => numpy_object(py, scalar)?,
        Value::Array(array) => {
            // A copy, because the bytes cannot be written to.
            let flat = py.import("numpy")?.call_method1("frombuffer", (PyBytes::new(py, &array.data), array.type_string()))?;
            flat.call_method1("reshape", (PyTuple::new(py, &array.shape)?,))?.call_method0("copy")?
        }
        Value::Instance(instance) => instance_object(py, instance)?,
        other => PyString::new(py, &other.python_repr()).into_any(),
    })
}

fn dict<'py>(py: Python<'py>, pairs: &[(Value, Value)]) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (key, value) in pairs {
        dict.set_item(to_python(py, key)?, to_python(py, value)?)?;
    }
    Ok(dict)
}

/// torch, if the program has imported it; it is never imported from here.
fn torch(py: Python<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    let modules = py.import("sys")?.getattr("modules")?;
    let found = modules.call_method1("get", ("torch",))?;
    Ok(Some(found).filter(|module| !module.is_none()))
}

/// A path of this system's kind becomes what it was; one of another system its pure form.
fn path_object<'py>(py: Python<'py>, path: &PathValue) -> PyResult<Bound<'py, PyAny>> {
    let pathlib = py.import("pathlib")?;
    let foreign = match path.class {
        PathClass::Posix if cfg!(windows) => Some("PurePosixPath"),
        PathClass::Windows if !cfg!(windows) => Some("PureWindowsPath"),
        _ => None,
    };
    pathlib.getattr(foreign.unwrap_or(path.class.name()))?.call1((&path.text,))
}

/// An object of a class that is data, made from the parts that the engine has proven to be right for it.
fn instance_object<'py>(py: Python<'py>, instance: &Instance) -> PyResult<Bound<'py, PyAny>> {
    let (module, name) = match instance.class {
        PlainClass::DateTime => ("datetime", "datetime"),
        PlainClass::Date => ("datetime", "date"),
        PlainClass::Time => ("datetime", "time"),
        PlainClass::TimeDelta => ("datetime", "timedelta"),
        PlainClass::TimeZone => ("datetime", "timezone"),
        PlainClass::Fraction => ("fractions", "Fraction"),
        PlainClass::Decimal => ("decimal", "Decimal"),
        PlainClass::Uuid => ("uuid", "UUID"),
        PlainClass::Counter => ("collections", "Counter"),
        PlainClass::DefaultDict => ("collections", "defaultdict"),
        PlainClass::NumpyDType => ("numpy", "dtype"),
        PlainClass::Range => ("builtins", "range"),
        PlainClass::Slice => ("builtins", "slice"),
        PlainClass::Class => ("builtins", ""),
        _ => ("torch", ""),
    };
    let args = instance.args.iter().map(|arg| to_python(py, arg)).collect::<PyResult<Vec<_>>>()?;
    match (instance.class, instance.args.as_slice()) {
        (PlainClass::Class, [Value::Str(name)]) => py.import(module)?.getattr(name.as_str()),
        // Without torch these are their names, as dtypes are.
        (PlainClass::Layout | PlainClass::MemoryFormat, [Value::Str(name)]) => match torch(py)? {
            Some(torch) => torch.getattr(name.trim_start_matches("torch.")),
            None => Ok(PyString::new(py, name).into_any()),
        },
        (PlainClass::Uuid, _) => {
            let kwargs = PyDict::new(py);
            kwargs.set_item("int", &args[0])?;
            py.import(module)?.getattr(name)?.call((), Some(&kwargs))
        }
        _ => py.import(module)?.getattr(name)?.call1(PyTuple::new(py, args)?),
    }
}

fn numpy_object<'py>(py: Python<'py>, scalar: &NumpyScalar) -> PyResult<Bound<'py, PyAny>> {
    let Ok(numpy) = py.import("numpy") else { return to_python(py, &scalar.to_plain()) };
    let order = if scalar.little_endian { "<" } else { ">" };
    let array = numpy.call_method1("frombuffer", (PyBytes::new(py, &scalar.data), format!("{order}{}", scalar.code)))?;
    array.get_item(0)
}
