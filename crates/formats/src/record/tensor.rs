//! From the pickled call that rebuilds a tensor to where its bytes lie.
//!
//! Torch pickles a tensor as a call of one of its rebuild functions with a storage, an offset, a size and
//! strides. The storage is a reference to an entry of the archive. Offset and strides are believed only
//! as far as they stay inside that entry.

use std::collections::HashMap;

use reshard_layout::{ByteLayout, Dims};

use super::archive::TorchArchive;
use super::dtensor::{TensorSharding, is_dtensor, is_sharded_tensor};
use super::error::RecordError;
use crate::pickle::{Document, Global, Made, Node, View};
use crate::{DType, ElementForm};

/// Rebuild calls inside each other, such as a parameter around a tensor: more than torch ever nests.
const MAX_NESTING: usize = 8;
/// More dimensions than torch itself accepts.
const MAX_DIMS: usize = 64;

/// A tensor in an archive: what it is and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredTensor {
    /// The element type.
    pub dtype: DType,
    /// The shape.
    pub shape: Dims,
    /// Where the elements are, as positions in the source; proven to stay inside the storage.
    pub layout: ByteLayout,
    /// The storage, which tensors may share and which may hold more than this tensor.
    pub storage: StorageEntry,
    /// How the stored bytes of an element relate to its value.
    pub form: ElementForm,
    /// Torch's `requires_grad`.
    pub requires_grad: bool,
    /// Whether this was a `torch.nn.Parameter`.
    pub parameter: bool,
    /// What it is a part of, if it is one rank's part of a DTensor or of a ShardedTensor: shape and layout are then those of the part.
    pub sharding: Option<Box<TensorSharding>>,
}

impl StoredTensor {
    /// One without elements of its own.
    pub(super) fn empty(dtype: DType, sharding: TensorSharding, fail: &Fail<'_>) -> Result<StoredTensor, RecordError> {
        let shape = Dims::from_slice(&[0]);
        let layout = ByteLayout::contiguous(&shape, dtype.size()).map_err(|error| fail.bad(error.to_string()))?;
        let storage = StorageEntry { offset: 0, length: 0, crc32: None };
        let (form, sharding) = (ElementForm::default(), Some(Box::new(sharding)));
        Ok(StoredTensor { dtype, shape, layout, storage, form, requires_grad: false, parameter: false, sharding })
    }
}

/// The data of a storage in the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StorageEntry {
    /// Where it starts.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// CRC-32 of the data; none if the writer had checksums turned off.
    pub crc32: Option<u32>,
}

/// What a pickled object is, seen from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorKind {
    Plain,
    WithDType,
    Legacy,
    Parameter,
    OnDevice,
    Subclass,
    Unsupported(&'static str),
}

impl TensorKind {
    /// Recognises the functions that rebuild tensors.
    pub(crate) fn of(global: &Global<'_>) -> Option<TensorKind> {
        let kind = match (global.module(), global.name()) {
            ("torch._utils", "_rebuild_tensor_v2") => TensorKind::Plain,
            ("torch._utils", "_rebuild_tensor_v3") => TensorKind::WithDType,
            ("torch._utils", "_rebuild_tensor") => TensorKind::Legacy,
            ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => TensorKind::Parameter,
            ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor") => TensorKind::OnDevice,
            ("torch._tensor", "_rebuild_from_type_v2") => TensorKind::Subclass,
            ("torch._utils", "_rebuild_qtensor") => TensorKind::Unsupported("a quantised tensor"),
            ("torch._utils", "_rebuild_sparse_tensor" | "_rebuild_sparse_csr_tensor") => {
                TensorKind::Unsupported("a sparse tensor")
            }
            ("torch._utils", "_rebuild_meta_tensor_no_storage") => {
                TensorKind::Unsupported("a tensor on the meta device, which has no data,")
            }
            ("torch._utils", "_rebuild_nested_tensor") => TensorKind::Unsupported("a nested tensor"),
            ("torch._utils", "_rebuild_wrapper_subclass") => TensorKind::Unsupported("a tensor subclass without storage"),
            ("torch._utils", "_rebuild_device_tensor_from_numpy") => TensorKind::Unsupported("a tensor pickled as a numpy array"),
            _ => return None,
        };
        Some(kind)
    }
}

/// The storage behind a reference: the archive's entry, and the type that its class stands for.
#[derive(Clone, Copy)]
struct Storage {
    entry: StorageEntry,
    /// None for untyped bytes.
    dtype: Option<DType>,
}

/// Turns pickled tensors into places, remembering the storages it has seen.
pub(crate) struct Rebuilder<'r, 'a> {
    archive: &'r TorchArchive<'a>,
    document: &'r Document<'r>,
    storages: HashMap<&'r str, Storage>,
}

impl<'r, 'a> Rebuilder<'r, 'a> {
    pub(crate) fn new(archive: &'r TorchArchive<'a>, document: &'r Document<'r>) -> Self {
        Rebuilder { archive, document, storages: HashMap::new() }
    }

    pub(super) fn document(&self) -> &'r Document<'r> {
        self.document
    }

    /// The tensor that `node`, whose class [`TensorKind::of`] knows, stands for; `key` names it in errors.
    pub(crate) fn tensor(&mut self, node: Node, key: &dyn Fn() -> String) -> Result<StoredTensor, RecordError> {
        let fail = Fail { key };
        self.nested(node, &fail, 0)
    }

    fn call(&mut self, function: &Global<'_>, args: Node, fail: &Fail<'_>, depth: usize) -> Result<StoredTensor, RecordError> {
        if depth > MAX_NESTING {
            return Err(fail.bad("tensors nested in tensors"));
        }
        let document = self.document;
        let args = document.as_tuple(args).ok_or_else(|| fail.bad("a tensor without arguments"))?;
        let short = || fail.bad("a tensor with too few arguments");
        let kind = TensorKind::of(function).ok_or_else(|| fail.unsupported(format!("an object of {}", function.path())))?;
        match (kind, args) {
            (TensorKind::Plain, [storage, offset, size, stride, requires_grad, hooks, rest @ ..]) => {
                self.no_hooks(*hooks, fail)?;
                let mut tensor = self.place([*storage, *offset, *size, *stride], None, fail)?;
                tensor.requires_grad = self.flag(*requires_grad, fail)?;
                self.bits(rest, &mut tensor, fail)?;
                Ok(tensor)
            }
            (TensorKind::WithDType, [storage, offset, size, stride, requires_grad, hooks, dtype, rest @ ..]) => {
                self.no_hooks(*hooks, fail)?;
                let dtype = self.dtype(*dtype, fail)?;
                let mut tensor = self.place([*storage, *offset, *size, *stride], Some(dtype), fail)?;
                tensor.requires_grad = self.flag(*requires_grad, fail)?;
                self.bits(rest, &mut tensor, fail)?;
                Ok(tensor)
            }
            (TensorKind::Legacy, [storage, offset, size, stride]) => self.place([*storage, *offset, *size, *stride], None, fail),
            (TensorKind::Parameter, [data, requires_grad, hooks, state @ ..]) if state.len() <= 1 => {
                self.no_hooks(*hooks, fail)?;
                self.plain_state(state, fail)?;
                let mut tensor = self.nested(*data, fail, depth + 1)?;
                tensor.requires_grad = self.flag(*requires_grad, fail)?;
                tensor.parameter = true;
                Ok(tensor)
            }
            (TensorKind::OnDevice, [data, dtype, device, requires_grad]) => {
                self.plain_state(&[*device], fail)?;
                let mut tensor = self.nested(*data, fail, depth + 1)?;
                if tensor.dtype != self.dtype(*dtype, fail)? {
                    return Err(fail.bad("two element types for one tensor"));
                }
                tensor.requires_grad = self.flag(*requires_grad, fail)?;
                Ok(tensor)
            }
            (TensorKind::Subclass, [function, class, args, state]) => {
                let missing = || fail.bad("a tensor subclass without class");
                let class = document.as_global(*class).ok_or_else(missing)?;
                if is_dtensor(&class) {
                    return self.dtensor(*state, fail, depth);
                }
                if is_sharded_tensor(&class) {
                    return self.sharded_tensor(*state, fail, depth);
                }
                let plain = class.is("torch", "Tensor")
                    || class.is("torch.nn.parameter", "Parameter")
                    || class.is("torch.nn.parameter", "Buffer");
                if !plain {
                    return Err(fail.unsupported(format!("a tensor of class {}", class.path())));
                }
                self.plain_state(&[*state], fail)?;
                let function = document.as_global(*function).ok_or_else(missing)?;
                let mut tensor = self.call(&function, *args, fail, depth + 1)?;
                tensor.parameter |= class.name() == "Parameter";
                Ok(tensor)
            }
            (TensorKind::Unsupported(what), _) => Err(fail.unsupported(what)),
            _ => Err(short()),
        }
    }

    /// Torch writes an empty dict for a tensor's hooks; what else were there would be made and dropped.
    fn no_hooks(&self, hooks: Node, fail: &Fail<'_>) -> Result<(), RecordError> {
        let empty = match self.document.view(hooks) {
            View::None | View::Dict([]) => true,
            View::Object(object) => {
                let made_empty = object.args == Node::EMPTY_TUPLE && object.items.is_empty() && object.state.is_none();
                made_empty && object.pairs.is_empty() && self.document.global(object.class).is("collections", "OrderedDict")
            }
            _ => false,
        };
        if empty { Ok(()) } else { Err(fail.bad("hooks, which torch never stores")) }
    }

    /// Attributes of a tensor are dropped; they must be plain, so that nothing else is dropped with them.
    fn plain_state(&self, state: &[Node], fail: &Fail<'_>) -> Result<(), RecordError> {
        match state.iter().try_for_each(|state| self.document.to_value(*state).map(drop)) {
            Ok(()) => Ok(()),
            Err(_) => Err(fail.unsupported("a tensor with attributes")),
        }
    }

    pub(super) fn nested(&mut self, node: Node, fail: &Fail<'_>, depth: usize) -> Result<StoredTensor, RecordError> {
        let document = self.document;
        let object = document.as_object(node).ok_or_else(|| fail.bad("not a tensor"))?;
        let only_called =
            object.made == Made::Call && object.state.is_none() && object.items.is_empty() && object.pairs.is_empty();
        if !only_called {
            return Err(fail.bad("a tensor that is changed after it was made"));
        }
        let function = document.global(object.class);
        self.call(&function, object.args, fail, depth)
    }

    /// Proves that storage, offset, size and strides fit together.
    fn place(
        &mut self,
        [storage, offset, size, stride]: [Node; 4],
        dtype: Option<DType>,
        fail: &Fail<'_>,
    ) -> Result<StoredTensor, RecordError> {
        let storage = self.storage(storage, fail)?;
        // Untyped bytes without a type are bytes, as in torch.
        let dtype = dtype.or(storage.dtype).unwrap_or(DType::UInt8);
        let shape = self.numbers(size, "size", fail)?;
        let strides = self.numbers(stride, "strides", fail)?;
        let offset = self.number(offset, "storage offset", fail)?;
        if shape.len() != strides.len() {
            return Err(fail.bad(format!("size {shape:?}, but strides {strides:?}")));
        }
        let entry = storage.entry;
        let outside = |why: &dyn std::fmt::Display| {
            fail.bad(format!(
                "size {shape:?}, strides {strides:?} and offset {offset} of {dtype} reach outside its \
                 storage of {} bytes ({why})",
                entry.length
            ))
        };
        let empty = shape.contains(&0);
        let layout = if empty {
            // Nothing is read, so offset and strides mean nothing.
            ByteLayout::contiguous(&shape, dtype.size())
        } else {
            ByteLayout::strided(&shape, &strides, dtype.size())
        };
        let layout = layout.map_err(|error| outside(&error))?;
        // Repeated elements (a stride of zero) need no storage, so nothing else bounds them.
        let bytes = shape.iter().try_fold(dtype.size(), |bytes, size| bytes.checked_mul(*size));
        if bytes.is_none_or(|bytes| bytes > i64::MAX as u64) {
            return Err(outside(&"more bytes than 63 bits can count"));
        }
        let start = if empty { Some(0) } else { offset.checked_mul(dtype.size()) };
        let end = start.and_then(|start| start.checked_add(layout.end()));
        if end.is_none_or(|end| end > entry.length) {
            return Err(outside(&"past its end"));
        }
        let layout = layout.try_at(entry.offset.saturating_add(start.unwrap_or(0))).map_err(|error| outside(&error))?;
        Ok(StoredTensor {
            dtype,
            shape,
            layout,
            storage: entry,
            form: ElementForm { big_endian: self.archive.big_endian(), ..ElementForm::default() },
            requires_grad: false,
            parameter: false,
            sharding: None,
        })
    }

    /// The storage of a reference `("storage", class, key, location, length)`.
    fn storage(&mut self, node: Node, fail: &Fail<'_>) -> Result<Storage, RecordError> {
        let document = self.document;
        let View::Persistent(id) = document.view(node) else {
            return Err(fail.bad("a tensor without storage"));
        };
        let Some([kind, class, key, location, length]) = document.as_tuple(id) else {
            return Err(fail.bad("a storage reference of unknown form"));
        };
        let class = document.as_global(*class);
        let (Some("storage"), Some(class), Some(key)) = (document.as_str(*kind), class, document.as_str(*key)) else {
            return Err(fail.bad("a storage reference of unknown form"));
        };
        if document.as_str(*location).is_none() {
            return Err(fail.bad("a storage reference of unknown form"));
        }
        let dtype = match (class.module(), class.name()) {
            ("torch" | "torch.storage", "UntypedStorage") => None,
            ("torch" | "torch.cuda", name) => match DType::from_storage_class(name) {
                Some(dtype) => Some(dtype),
                None if name.starts_with('Q') => {
                    return Err(fail.unsupported("a quantised tensor"));
                }
                None => return Err(fail.bad(format!("unknown storage class torch.{name}"))),
            },
            _ => return Err(fail.bad(format!("unknown storage class {}", class.path()))),
        };
        let length = self
            .number(*length, "storage length", fail)?
            .checked_mul(dtype.map_or(1, DType::size))
            .ok_or_else(|| fail.bad("a storage length that overflows"))?;
        let entry = match self.storages.get(key) {
            // Torch reads a storage once, as what it is when it is first named.
            Some(known) if known.dtype != dtype || known.entry.length != length => {
                return Err(fail.bad(format!("storage {key:?} is named twice, as two different things")));
            }
            Some(known) => return Ok(*known),
            None => self.find(key, length)?,
        };
        if length > entry.length {
            return Err(fail.bad(format!("storage {key:?} should have {length} bytes, but its entry has {}", entry.length)));
        }
        if length < entry.length && entry.crc32.is_some() {
            return Err(fail.bad(format!("storage {key:?} should have {length} bytes, but its entry has {}", entry.length)));
        }
        let storage = Storage { entry: StorageEntry { length, ..entry }, dtype };
        self.storages.insert(key, storage);
        Ok(storage)
    }

    fn find(&self, key: &str, length: u64) -> Result<StorageEntry, RecordError> {
        let name = format!("data/{key}");
        match self.archive.entry(&name) {
            Some(entry) => Ok(StorageEntry { offset: self.archive.data_offset(entry)?, length: entry.size, crc32: entry.crc32 }),
            // Without data there may be no entry.
            None if length == 0 => Ok(StorageEntry { offset: 0, length: 0, crc32: Some(0) }),
            None => Err(RecordError::MissingEntry { entry: name }),
        }
    }

    /// The last argument of a tensor: whether its elements are the conjugate or the negative of what is stored.
    fn bits(&self, rest: &[Node], tensor: &mut StoredTensor, fail: &Fail<'_>) -> Result<(), RecordError> {
        let document = self.document;
        let bits = match rest {
            [] => return Ok(()),
            [bits] => *bits,
            _ => return Err(fail.bad("a tensor with too many arguments")),
        };
        if matches!(document.view(bits), View::None) {
            return Ok(());
        }
        let View::Dict(pairs) = document.view(bits) else {
            return Err(fail.bad("an argument that is not known"));
        };
        for [name, value] in pairs {
            let set = self.flag(*value, fail)?;
            match document.as_str(*name) {
                Some("conj") => tensor.form.conjugate = set,
                Some("neg") => tensor.form.negative = set,
                name => return Err(fail.unsupported(format!("a tensor view with its {} bit set", name.unwrap_or("unknown")))),
            }
        }
        Ok(())
    }

    pub(super) fn dtype(&self, node: Node, fail: &Fail<'_>) -> Result<DType, RecordError> {
        let global = self.document.as_global(node).ok_or_else(|| fail.bad("a tensor without element type"))?;
        if global.module() == "torch"
            && let Some(dtype) = DType::from_name(global.name())
        {
            return Ok(dtype);
        }
        Err(fail.unsupported(format!("a tensor of type {}", global.path())))
    }

    fn flag(&self, node: Node, fail: &Fail<'_>) -> Result<bool, RecordError> {
        match self.document.view(node) {
            View::Bool(flag) => Ok(flag),
            other => Err(fail.bad(format!("requires_grad is {}", other.kind()))),
        }
    }

    fn number(&self, node: Node, what: &str, fail: &Fail<'_>) -> Result<u64, RecordError> {
        let number = self.document.as_i64(node).and_then(|n| u64::try_from(n).ok());
        number.ok_or_else(|| fail.bad(format!("its {what} is not a number from 0 to 2^63")))
    }

    fn numbers(&self, node: Node, what: &str, fail: &Fail<'_>) -> Result<Dims, RecordError> {
        let nodes = self
            .document
            .as_tuple(node)
            .filter(|nodes| nodes.len() <= MAX_DIMS)
            .ok_or_else(|| fail.bad(format!("its {what} is not a tuple of at most {MAX_DIMS}")))?;
        nodes.iter().map(|&node| self.number(node, what, fail)).collect()
    }
}

/// Makes errors that name the tensor; the name is put together only when one is needed.
pub(super) struct Fail<'f> {
    key: &'f dyn Fn() -> String,
}

impl Fail<'_> {
    pub(super) fn bad(&self, reason: impl Into<String>) -> RecordError {
        RecordError::BadTensor { key: (self.key)(), reason: reason.into() }
    }

    pub(super) fn unsupported(&self, what: impl Into<String>) -> RecordError {
        RecordError::Unsupported { key: (self.key)(), what: what.into() }
    }
}
