//! A value as JSON, as Python's `json.dumps` would write it.

use serde_json::{Map, Number, Value as Json};

use super::repr::float_repr;
use super::{Int, Value};

impl Value {
    /// What Python's `json.dumps` gives: tuples and sizes become lists, keys become strings.
    ///
    /// What JSON can't hold (sets, bytes, infinities, integers past 64 bits, dtypes …) becomes its `repr` as a string.
    pub fn to_json(&self) -> Json {
        match self {
            Value::None => Json::Null,
            Value::Bool(value) => Json::Bool(*value),
            Value::Int(Int::Small(value)) => Json::from(*value),
            Value::Int(big) => match big.as_u64() {
                Some(value) => Json::from(value),
                None => Json::String(big.to_string()),
            },
            Value::Float(value) => match Number::from_f64(*value) {
                Some(number) => Json::Number(number),
                None => Json::String(float_repr(*value)),
            },
            Value::Str(text) => Json::String(text.clone()),
            Value::List(elements) | Value::Tuple(elements) => elements.iter().map(Value::to_json).collect(),
            Value::Size(dims) => dims.iter().map(|d| Json::from(*d)).collect(),
            Value::Dict(pairs) | Value::OrderedDict(pairs) => {
                let pairs = pairs.iter().map(|(k, v)| (json_key(k), v.to_json()));
                Json::Object(pairs.collect::<Map<_, _>>())
            }
            Value::Numpy(scalar) => scalar.to_plain().to_json(),
            // All of it: what is equal as JSON is to be equal.
            Value::Array(array) => {
                let hex: String = array.data.iter().map(|byte| format!("{byte:02x}")).collect();
                serde_json::json!({"dtype": array.type_string(), "shape": array.shape, "data": hex})
            }
            Value::Device(text) => Json::String(text.clone()),
            Value::Path(path) => Json::String(path.text.clone()),
            other => Json::String(other.python_repr()),
        }
    }
}

fn json_key(key: &Value) -> String {
    match key {
        Value::Str(text) => text.clone(),
        Value::None => "null".into(),
        Value::Bool(value) => value.to_string(),
        other => other.python_repr(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_is_what_python_writes() {
        let value = Value::Dict(vec![
            (Value::from("a"), Value::Tuple(vec![Value::from(1), Value::from(0.5), Value::None])),
            (Value::from(3), Value::Size(vec![2, 3])),
            (Value::from(true), Value::from(f64::INFINITY)),
            (Value::None, Value::Int((1u64 << 63).into())),
            (Value::from(0.25), Value::Bytes(b"x\0".to_vec())),
        ]);
        assert_eq!(
            value.to_json(),
            json!({"a": [1, 0.5, null], "3": [2, 3], "true": "inf", "null": 9223372036854775808u64, "0.25": "b'x\\x00'"})
        );
    }
}
