//! Which classes and functions a pickle may name, and what naming one means.
//!
//! Nothing is ever called: a known name becomes data that the reader interprets, an unknown one is an
//! error, or is carried along unopened where the caller asked for that.

/// What to do with a class that is not on the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unknown {
    /// Refuse the pickle with an error that names the class and its position.
    Refuse,
    /// Keep the class as a name and its instances as [`View::Object`](super::View::Object); nothing is run.
    Carry,
    /// [`Unknown::Carry`], except for those that are known to act when they are called ([`acts`]).
    CarryInert,
}

/// Which names a pickle may use.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    allowed: &'static [&'static [(&'static str, &'static [&'static str])]],
    unknown: Unknown,
    strict: bool,
}

impl Policy {
    /// Plain values: built-in types, `OrderedDict`, `torch.Size`, dtypes, devices, paths, numpy scalars.
    pub const fn values() -> Policy {
        Policy { allowed: &[VALUES], unknown: Unknown::Refuse, strict: true }
    }

    /// What `torch.save` writes: plain values, tensors, parameters and their storages.
    pub const fn torch() -> Policy {
        Policy { allowed: &[VALUES, TENSORS], unknown: Unknown::Refuse, strict: true }
    }

    /// A checkpoint's `.metadata`: plain values and the classes of `torch.distributed.checkpoint`. Its writers fill the memo
    /// with texts that they drop again, and some put objects of their own beside the data.
    pub const fn metadata() -> Policy {
        Policy { allowed: &[VALUES, METADATA], unknown: Unknown::CarryInert, strict: false }
    }

    /// The same list, with `unknown` deciding about everything else.
    pub const fn with_unknown(self, unknown: Unknown) -> Policy {
        Policy { unknown, ..self }
    }

    /// Whether a name is on the list (after [`modern_module`]).
    pub fn knows(&self, module: &str, name: &str) -> bool {
        let listed = self.allowed.iter().flat_map(|list| list.iter());
        let mut listed = listed.filter(|(m, _)| *m == module).flat_map(|(_, names)| names.iter());
        listed.any(|n| *n == name) || (module == "torch" && is_dtype_name(name))
    }

    /// Also takes pickles that drop values on the way, as picklers write them for values that contain themselves. For data
    /// that is only carried along, or that is looked at to say what it would run.
    pub(crate) const fn lax(self) -> Policy {
        Policy { strict: false, ..self }
    }

    pub(super) fn is_strict(&self) -> bool {
        self.strict
    }

    pub(super) fn unknown(&self) -> Unknown {
        self.unknown
    }
}

/// Python 3's name of a module that protocols 0 to 2 spell as Python 2 did.
pub fn modern_module<'m>(module: &'m str, name: &str) -> &'m str {
    match (module, name) {
        ("__builtin__", _) => "builtins",
        ("copy_reg", _) => "copyreg",
        ("numpy.core.multiarray", _) => "numpy._core.multiarray",
        // Python 3.13 moved the classes into a package of their own.
        ("pathlib._local", _) => "pathlib",
        ("UserDict", "UserDict") => "collections",
        _ => module,
    }
}

/// Whether a class or function (`module.name`) is known to act when it is called: to run programs or code, to open files or
/// connections, to reach any attribute. A file that names one is not an honest checkpoint. There are more than any list
/// has, so that `false` says nothing.
pub fn acts(path: &str) -> bool {
    let inside = |module: &str| path.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'));
    ACTING_MODULES.iter().any(|module| inside(module)) || ACTING.contains(&path)
}

const ACTING_MODULES: [&str; 36] = [
    "os",
    "posix",
    "nt",
    "posixpath",
    "sys",
    "subprocess",
    "_posixsubprocess",
    "commands",
    "importlib",
    "runpy",
    "shutil",
    "socket",
    "_socket",
    "ctypes",
    "_ctypes",
    "pty",
    "code",
    "codeop",
    "pdb",
    "bdb",
    "webbrowser",
    "marshal",
    "pickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "timeit",
    "doctest",
    "http",
    "urllib",
    "requests",
    "ftplib",
    "pip",
    "pydoc",
    "torch.hub",
    "torch.utils.cpp_extension",
];

const ACTING: [&str; 24] = [
    "builtins.eval",
    "builtins.exec",
    "builtins.compile",
    "builtins.execfile",
    "builtins.apply",
    "builtins.open",
    "builtins.__import__",
    "builtins.getattr",
    "builtins.setattr",
    "builtins.delattr",
    "builtins.globals",
    "builtins.input",
    "builtins.breakpoint",
    "io.open",
    "_io.open",
    "io.FileIO",
    "_io.FileIO",
    "types.FunctionType",
    "types.CodeType",
    "torch.load",
    "torch.serialization.load",
    "torch.jit.load",
    "torch.storage._load_from_bytes",
    "numpy.load",
];

/// The names that the decoder itself turns into plain data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Builder {
    /// Stays an object.
    Object,
    Set,
    FrozenSet,
    Bytes,
    ByteArray,
    Encode,
    Complex,
    Size,
    /// `copyreg._reconstructor(class, object, None)`: how protocols 0 and 1 make an instance.
    Instance,
}

impl Builder {
    pub(super) fn of(module: &str, name: &str) -> Builder {
        match (module, name) {
            ("builtins", "set") => Builder::Set,
            ("builtins", "frozenset") => Builder::FrozenSet,
            ("builtins", "bytes") => Builder::Bytes,
            ("builtins", "bytearray") => Builder::ByteArray,
            ("builtins", "complex") => Builder::Complex,
            ("torch", "Size") => Builder::Size,
            ("copyreg", "_reconstructor") => Builder::Instance,
            ("_codecs", "encode") => Builder::Encode,
            _ => Builder::Object,
        }
    }
}

/// Whether `torch.<name>` is spelled like a dtype. Whether it is one that is supported is for the
/// reader to say; a dtype is inert in any case.
fn is_dtype_name(name: &str) -> bool {
    let digits = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
    matches!(name, "bool" | "half" | "float" | "double" | "long" | "int" | "short" | "cfloat" | "cdouble" | "chalf")
        || ["float", "bfloat", "int", "uint", "complex", "qint", "quint", "bits"]
            .iter()
            .any(|prefix| name.strip_prefix(prefix).is_some_and(digits))
}

type List = [(&'static str, &'static [&'static str])];

const VALUES: &List = &[
    (
        "builtins",
        &[
            "set",
            "frozenset",
            "bytes",
            "bytearray",
            "complex",
            "getattr",
            "slice",
            "range",
            "xrange",
            "int",
            "long",
            "unicode",
            "float",
            "str",
            "bool",
            "list",
            "dict",
            "tuple",
            "object",
        ],
    ),
    ("_codecs", &["encode"]),
    ("collections", &["OrderedDict", "defaultdict", "Counter"]),
    ("copyreg", &["_reconstructor"]),
    ("datetime", &["datetime", "date", "time", "timedelta", "timezone"]),
    ("decimal", &["Decimal"]),
    ("fractions", &["Fraction"]),
    ("uuid", &["UUID"]),
    ("pathlib", &["PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path", "PurePath"]),
    ("numpy", &["dtype", "ndarray"]),
    ("numpy._core.multiarray", &["scalar", "_reconstruct"]),
    ("torch", &["Size", "device", "contiguous_format", "preserve_format", "channels_last", "channels_last_3d"]),
    ("torch.serialization", &["_get_layout"]),
];

const TENSORS: &List = &[
    (
        "torch._utils",
        &[
            "_rebuild_tensor",
            "_rebuild_tensor_v2",
            "_rebuild_tensor_v3",
            "_rebuild_parameter",
            "_rebuild_parameter_with_state",
            // Known so that the reader can say what is not supported, with the key.
            "_rebuild_qtensor",
            "_rebuild_sparse_tensor",
            "_rebuild_sparse_csr_tensor",
            "_rebuild_meta_tensor_no_storage",
            "_rebuild_nested_tensor",
            "_rebuild_wrapper_subclass",
            "_rebuild_device_tensor_from_numpy",
            "_rebuild_device_tensor_from_cpu_tensor",
        ],
    ),
    ("torch._tensor", &["_rebuild_from_type_v2"]),
    ("torch.nn.parameter", &["Parameter", "Buffer", "UninitializedParameter"]),
    ("torch.storage", &["UntypedStorage", "TypedStorage"]),
    (
        "torch",
        &[
            "Tensor",
            "DoubleStorage",
            "FloatStorage",
            "HalfStorage",
            "LongStorage",
            "IntStorage",
            "ShortStorage",
            "CharStorage",
            "ByteStorage",
            "BoolStorage",
            "BFloat16Storage",
            "ComplexDoubleStorage",
            "ComplexFloatStorage",
            "QUInt8Storage",
            "QInt8Storage",
            "QInt32Storage",
            "QUInt4x2Storage",
            "QUInt2x4Storage",
            "UntypedStorage",
            "per_tensor_affine",
            "per_channel_affine",
            "per_channel_affine_float_qparams",
            "per_tensor_symmetric",
            "per_channel_symmetric",
        ],
    ),
];

const METADATA: &List = &[
    (
        "torch.distributed.checkpoint.metadata",
        &[
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ],
    ),
    ("torch.distributed.checkpoint.filesystem", &["_StorageInfo", "_StoragePrefix", "SerializationFormat"]),
    // Where these lived before torch 2.3, and the sharded-tensor properties of the same shape.
    ("torch.distributed._shard.sharded_tensor.metadata", &["TensorProperties", "MEM_FORMAT_ENCODING"]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_know_data_and_not_functions_that_act() {
        let p = Policy::metadata();
        assert!(p.knows("torch.distributed.checkpoint.metadata", "Metadata"));
        assert!(p.knows("torch", "bfloat16"));
        assert!(p.knows("torch", "float8_e4m3fn"));
        assert!(p.knows("pathlib", "PosixPath"));
        for (module, name) in [
            ("os", "system"),
            ("posix", "system"),
            ("builtins", "eval"),
            ("builtins", "exec"),
            ("builtins", "__import__"),
            ("subprocess", "Popen"),
            ("torch", "load"),
            ("torch", "floating"),
            ("torch.distributed.checkpoint.metadata", "torch"),
        ] {
            assert!(!p.knows(module, name), "{module}.{name}");
        }
        assert!(!p.knows("torch._utils", "_rebuild_tensor_v2"));
        assert!(Policy::torch().knows("torch._utils", "_rebuild_tensor_v2"));
    }
}
