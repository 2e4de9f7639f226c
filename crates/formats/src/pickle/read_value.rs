//! Pickles to plain values: from a graph that may lie to a tree that is bounded.

use std::collections::HashSet;

use super::decode::decode;
use super::document::{Document, Made, Object, View};
use super::error::PickleError;
use super::globals::Policy;
use super::known::named;
use super::limits::{MAX_DEPTH, TREE_BYTES_FLOOR, TREE_BYTES_PER_INPUT_BYTE};
use super::node::Node;
use crate::DType;
use crate::value::{Instance, Int, NumpyScalar, PathClass, PathValue, PlainClass, Value};

type Result<T> = std::result::Result<T, PickleError>;

/// Decodes a pickle of a plain value: numbers, strings, bytes, containers, sizes, dtypes, devices, paths.
///
/// Anything else is an error that names what it is.
pub fn read_value(input: &[u8]) -> Result<Value> {
    let document = decode(input, Policy::values())?;
    document.to_value(document.root())
}

impl Document<'_> {
    /// The tree below a node, if all of it is plain.
    pub fn to_value(&self, node: Node) -> Result<Value> {
        let budget = self.input.len().saturating_mul(TREE_BYTES_PER_INPUT_BYTE);
        let budget = budget.saturating_add(TREE_BYTES_FLOOR);
        Reader { document: self, budget, limit: budget, path: Vec::new() }.value(node)
    }
}

enum Step<'d> {
    Index(usize),
    Key(&'d str),
    /// Inside a key or a set, where there is no index to name.
    Inside(&'static str),
}

pub(super) struct Reader<'d, 'a> {
    pub(super) document: &'d Document<'a>,
    budget: usize,
    limit: usize,
    path: Vec<(Node, Step<'d>)>,
}

impl<'d> Reader<'d, '_> {
    pub(super) fn value(&mut self, node: Node) -> Result<Value> {
        let view = self.document.view(node);
        self.charge(match view {
            View::Str(text) => text.len(),
            View::Bytes(bytes) | View::ByteArray(bytes) => bytes.len(),
            _ => 0,
        })?;
        Ok(match view {
            View::None => Value::None,
            View::Bool(value) => Value::Bool(value),
            View::Int(value) => Value::Int(Int::Small(value)),
            View::BigInt(value) => Value::Int(Int::from(value.clone())),
            View::Float(value) => Value::Float(value),
            View::Complex(re, im) => Value::Complex(re, im),
            View::Str(text) => Value::Str(text.to_owned()),
            View::Bytes(bytes) => Value::Bytes(bytes.to_vec()),
            View::ByteArray(bytes) => Value::ByteArray(bytes.to_vec()),
            View::Tuple(elements) => Value::Tuple(self.elements(node, elements)?),
            View::List(elements) => Value::List(self.elements(node, elements)?),
            View::Dict(pairs) => Value::Dict(self.pairs(node, pairs)?),
            View::Set(elements) => Value::Set(self.set(node, elements)?),
            View::FrozenSet(elements) => Value::FrozenSet(self.set(node, elements)?),
            View::Size(dims) => {
                let dims = dims.iter().map(|d| self.document.as_i64(*d)).collect::<Option<_>>();
                Value::Size(dims.ok_or_else(|| self.not_plain("a torch.Size that is not of integers"))?)
            }
            View::Global(id) => {
                let global = self.document.global(id);
                let dtype = (global.module() == "torch").then(|| DType::from_name(global.name())).flatten();
                match dtype {
                    Some(dtype) => Value::DType(dtype),
                    None => named(&global).ok_or_else(|| self.not_plain(&format!("`{}`", global.path())))?,
                }
            }
            View::Object(object) => self.object(node, object)?,
            View::Persistent(_) => return Err(self.not_plain(view.kind())),
        })
    }

    /// Takes one value and `bytes` of text from the budget.
    pub(super) fn charge(&mut self, bytes: usize) -> Result<()> {
        let cost = size_of::<Value>() + bytes;
        self.budget = self.budget.checked_sub(cost).ok_or(PickleError::Limit {
            what: "bytes of values once shared parts are written out",
            limit: self.limit as u64,
            at: 0,
        })?;
        Ok(())
    }

    /// A value inside of another one, where there is no index to name.
    pub(super) fn inner(&mut self, node: Node, below: Node) -> Result<Value> {
        self.enter(node, Step::Inside("part"))?;
        let value = self.value(below)?;
        self.path.pop();
        Ok(value)
    }

    fn enter(&mut self, node: Node, step: Step<'d>) -> Result<()> {
        if self.path.len() >= MAX_DEPTH {
            // Telling a cycle from deep nesting matters only for the message, so it is done only here.
            let cycle = self.path.iter().filter(|(n, _)| *n == node).count() > 1;
            return Err(match cycle {
                true => {
                    self.path.truncate(8);
                    PickleError::Cycle { path: self.path_text() }
                }
                false => PickleError::Limit { what: "levels of nesting", limit: MAX_DEPTH as u64, at: 0 },
            });
        }
        self.path.push((node, step));
        Ok(())
    }

    fn elements(&mut self, node: Node, elements: &'d [Node]) -> Result<Vec<Value>> {
        let mut values = Vec::with_capacity(elements.len().min(self.budget / size_of::<Value>()));
        for (i, element) in elements.iter().enumerate() {
            self.enter(node, Step::Index(i))?;
            values.push(self.value(*element)?);
            self.path.pop();
        }
        Ok(values)
    }

    fn set(&mut self, node: Node, elements: &'d [Node]) -> Result<Vec<Value>> {
        let mut values = Vec::with_capacity(elements.len().min(self.budget / size_of::<Value>()));
        let mut seen = HashSet::new();
        for element in elements {
            self.enter(node, Step::Inside("element of a set"))?;
            let value = self.value(*element)?;
            self.check_key(&value, &mut seen)?;
            values.push(value);
            self.path.pop();
        }
        Ok(values)
    }

    pub(super) fn pairs(&mut self, node: Node, pairs: &'d [[Node; 2]]) -> Result<Vec<(Value, Value)>> {
        let mut values = Vec::with_capacity(pairs.len().min(self.budget / size_of::<(Value, Value)>()));
        let mut seen = HashSet::new();
        for [key, value] in pairs {
            self.enter(node, Step::Inside("key of a dict"))?;
            let key_value = self.value(*key)?;
            self.check_key(&key_value, &mut seen)?;
            self.path.pop();
            let step = self.document.as_str(*key).map_or(Step::Inside("value of a dict"), Step::Key);
            self.enter(node, step)?;
            values.push((key_value, self.value(*value)?));
            self.path.pop();
        }
        Ok(values)
    }

    fn check_key(&self, key: &Value, seen: &mut HashSet<Vec<u8>>) -> Result<()> {
        let mut token = Vec::new();
        if !key_token(key, &mut token) {
            return Err(self.not_plain("a key that cannot be one"));
        }
        if !seen.insert(token) {
            let mut repr = key.python_repr();
            if repr.chars().count() > 80 {
                repr = repr.chars().take(79).chain(['…']).collect();
            }
            return Err(PickleError::DuplicateKey { key: repr, path: self.path_text() });
        }
        Ok(())
    }

    fn object(&mut self, node: Node, object: Object<'d>) -> Result<Value> {
        let class = self.document.global(object.class);
        let unknown = || self.not_plain(&format!("an instance of `{}`", class.path()));
        let args = self.document.as_tuple(object.args).unwrap_or_default();
        let only_args = object.made == Made::Call && object.state.is_none() && object.items.is_empty() && object.pairs.is_empty();
        match (class.module(), class.name()) {
            ("collections", "OrderedDict") if object.made == Made::Call && object.items.is_empty() && object.state.is_none() => {
                self.ordered_dict(node, object, args)
            }
            ("torch", "device") if only_args => self.device(args).ok_or_else(unknown),
            ("pathlib", name) if only_args => {
                let parts: Option<Vec<&str>> = args.iter().map(|n| self.document.as_str(*n)).collect();
                let class = PathClass::from_name(name);
                let (Some(class), Some(parts)) = (class, parts) else {
                    return Err(unknown());
                };
                // Names after the first, as a path has them; anything else joins in ways of its own.
                let name = |part: &&str| !part.is_empty() && *part != "." && !part.contains(['/', '\\', ':']);
                if !parts.iter().skip(1).all(name) {
                    return Err(unknown());
                }
                let text = join_path(class, &parts);
                self.charge(text.len())?;
                Ok(Value::Path(PathValue { class, text }))
            }
            ("numpy._core.multiarray", "scalar") if only_args => self.numpy(args).ok_or_else(unknown),
            _ => match self.known(node, &class, object, args, only_args)? {
                Some(value) => Ok(value),
                None => Err(self.not_plain(&format!("an instance of `{}`", class.path()))),
            },
        }
    }

    /// `OrderedDict()` filled afterwards, or, in protocols 0 and 1, `OrderedDict([[k, v], …])`.
    fn ordered_dict(&mut self, node: Node, object: Object<'d>, args: &'d [Node]) -> Result<Value> {
        let listed = match args {
            [] => return Ok(Value::OrderedDict(self.pairs(node, object.pairs)?)),
            [one] if object.pairs.is_empty() => match self.document.view(*one) {
                View::List(listed) => listed,
                _ => return Err(self.not_plain("an OrderedDict made of something else than pairs")),
            },
            _ => return Err(self.not_plain("an OrderedDict made of something else than pairs")),
        };
        let mut values = Vec::with_capacity(listed.len().min(self.budget / size_of::<(Value, Value)>()));
        let mut seen = HashSet::new();
        for pair in listed {
            let [key, value] = (match self.document.view(*pair) {
                View::List(pair) | View::Tuple(pair) => <[Node; 2]>::try_from(pair).ok(),
                _ => None,
            })
            .ok_or_else(|| self.not_plain("an OrderedDict made of something else than pairs"))?;
            self.enter(node, Step::Inside("pair of an OrderedDict"))?;
            let key = self.value(key)?;
            self.check_key(&key, &mut seen)?;
            values.push((key, self.value(value)?));
            self.path.pop();
        }
        Ok(Value::OrderedDict(values))
    }

    fn device(&self, args: &[Node]) -> Option<Value> {
        match args {
            [kind] => Some(Value::Device(self.document.as_str(*kind)?.to_owned())),
            [kind, index] => {
                let (kind, index) = (self.document.as_str(*kind)?, self.document.as_i64(*index)?);
                Some(Value::Device(format!("{kind}:{index}")))
            }
            _ => None,
        }
    }

    fn numpy(&self, args: &[Node]) -> Option<Value> {
        let [dtype, data] = args else { return None };
        let (code, little_endian) = self.numpy_type(*dtype)?;
        let View::Bytes(data) = self.document.view(*data) else {
            return None;
        };
        if NumpyScalar::size_of(&code) != Some(data.len()) {
            return None;
        }
        Some(Value::Numpy(NumpyScalar { code: code.into_owned(), little_endian, data: data.to_vec() }))
    }

    pub(super) fn not_plain(&self, what: &str) -> PickleError {
        PickleError::NotPlain { what: what.to_owned(), path: self.path_text() }
    }

    fn path_text(&self) -> String {
        let mut text = String::new();
        for (_, step) in &self.path {
            match step {
                Step::Index(i) => text.push_str(&format!("[{i}]")),
                Step::Key(key) => text.push_str(&format!("[{}]", Value::from(*key).python_repr())),
                Step::Inside(what) => text.push_str(&format!("({what})")),
            }
        }
        text
    }
}

/// Bytes that are equal when Python would call the keys equal; false for what can't be a key.
pub(crate) fn key_token(key: &Value, token: &mut Vec<u8>) -> bool {
    let mut tagged = |tag: u8, bytes: &[u8]| {
        token.push(tag);
        token.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        token.extend_from_slice(bytes);
        true
    };
    match key {
        Value::None => tagged(b'N', &[]),
        Value::Bool(value) => tagged(b'i', (*value as u8).to_string().as_bytes()),
        Value::Int(value) => match value {
            Int::Small(value) => tagged(b'i', value.to_string().as_bytes()),
            Int::Big(value) => tagged(b'I', &value.to_signed_bytes_le()),
        },
        // A float equals the integer of the same value (past 2^63 only as far as anyone would go).
        Value::Float(value) if value.fract() == 0.0 && value.abs() < 9e18 => tagged(b'i', (*value as i64).to_string().as_bytes()),
        Value::Float(value) => tagged(b'f', &value.to_bits().to_le_bytes()),
        Value::Complex(re, im) if *im == 0.0 => key_token(&Value::Float(*re), token),
        Value::Complex(re, im) => tagged(b'c', &[re.to_le_bytes(), im.to_le_bytes()].concat()),
        Value::Str(text) => tagged(b's', text.as_bytes()),
        Value::Bytes(bytes) => tagged(b'b', bytes),
        Value::DType(dtype) => tagged(b'd', dtype.name().as_bytes()),
        Value::Device(text) => tagged(b'D', text.as_bytes()),
        Value::Path(path) => tagged(b'p', format!("{:?}{}", path.class, path.text).as_bytes()),
        Value::Numpy(scalar) => key_token(&scalar.to_plain(), token),
        // Those that equal nothing but their own kind, however they are written.
        Value::Instance(Instance { class: class @ (PlainClass::Date | PlainClass::TimeDelta | PlainClass::Uuid), args }) => {
            tagged(b'o', format!("{class:?}").as_bytes());
            args.iter().all(|part| key_token(part, token))
        }
        Value::Array(_) | Value::Instance(_) => false,
        // A torch.Size is a tuple, and equal to one.
        Value::Size(dims) => {
            let dims: Vec<Value> = dims.iter().map(|d| Value::from(*d)).collect();
            key_token(&Value::Tuple(dims), token)
        }
        Value::Tuple(elements) => {
            tagged(b't', &(elements.len() as u64).to_le_bytes());
            elements.iter().all(|element| key_token(element, token))
        }
        Value::FrozenSet(elements) => {
            let mut tokens = Vec::with_capacity(elements.len());
            for element in elements {
                let mut one = Vec::new();
                if !key_token(element, &mut one) {
                    return false;
                }
                tokens.push(one);
            }
            tokens.sort_unstable();
            tagged(b'z', &tokens.concat())
        }
        Value::ByteArray(_) | Value::List(_) | Value::Dict(_) | Value::OrderedDict(_) | Value::Set(_) => false,
    }
}

/// `str(Path(*parts))`, for parts as a path pickles itself.
fn join_path(class: PathClass, parts: &[&str]) -> String {
    let separator = match class {
        PathClass::Posix | PathClass::PurePosix => '/',
        PathClass::Windows | PathClass::PureWindows => '\\',
    };
    let mut text = String::new();
    for part in parts {
        if !text.is_empty() && !text.ends_with(separator) {
            text.push(separator);
        }
        text.push_str(part);
    }
    if text.is_empty() { ".".into() } else { text }
}
