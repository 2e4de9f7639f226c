//! Where a value sits in a nested state dict: the path that a flattened key stands for.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One step into a nested state dict.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PathSegment {
    /// A dict's key.
    Key(String),
    /// A list's index, or a dict's integer key.
    Index(i64),
}

/// The steps from the root of a state dict to one value.
pub type KeyPath = Vec<PathSegment>;

impl fmt::Display for PathSegment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PathSegment::Key(key) => f.write_str(key),
            PathSegment::Index(index) => index.fmt(f),
        }
    }
}

impl From<&str> for PathSegment {
    fn from(key: &str) -> Self {
        PathSegment::Key(key.to_owned())
    }
}

impl From<i64> for PathSegment {
    fn from(index: i64) -> Self {
        PathSegment::Index(index)
    }
}
