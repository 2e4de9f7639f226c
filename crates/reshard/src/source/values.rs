//! Looking into plain values: what sources read out of side files and metadata.

use reshard_formats::{Int, Value};
use serde_json::Value as Json;

/// The value of a dict's key.
pub(super) fn field<'v>(value: &'v Value, name: &str) -> Option<&'v Value> {
    let (Value::Dict(pairs) | Value::OrderedDict(pairs)) = value else { return None };
    pairs.iter().find_map(|(key, value)| (text(key) == Some(name)).then_some(value))
}

pub(super) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::Str(text) => Some(text),
        _ => None,
    }
}

/// A number of things: an integer that is not negative.
pub(super) fn integer(value: &Value) -> Option<u64> {
    match value {
        Value::Int(Int::Small(number)) => u64::try_from(*number).ok(),
        _ => None,
    }
}

/// Several of them: a list, a tuple or a `torch.Size`.
pub(super) fn integers(value: &Value) -> Option<Vec<u64>> {
    match value {
        Value::List(items) | Value::Tuple(items) => items.iter().map(integer).collect(),
        Value::Size(items) => items.iter().map(|item| u64::try_from(*item).ok()).collect(),
        _ => None,
    }
}

/// JSON as the values that Python's `json.load` gives.
pub(super) fn from_json(json: Json) -> Value {
    match json {
        Json::Null => Value::None,
        Json::Bool(value) => Value::Bool(value),
        Json::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(number), _) => Value::from(number),
            (None, Some(number)) => Value::Float(number),
            (None, None) => Value::Str(number.to_string()),
        },
        Json::String(text) => Value::Str(text),
        Json::Array(items) => Value::List(items.into_iter().map(from_json).collect()),
        Json::Object(pairs) => Value::Dict(pairs.into_iter().map(|(key, value)| (Value::Str(key), from_json(value))).collect()),
    }
}
