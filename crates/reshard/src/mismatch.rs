//! Everything in which a checkpoint differs from what is wanted, found before any byte moves.
//!
//! ```
//! # let path = "../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint";
//! use reshard::{LoadState, Solo, load};
//!
//! let mut wanted = LoadState::new();
//! wanted.value("model.embed.wieght")?;
//! let error = load(&Solo, path, &mut wanted).unwrap_err();
//! assert!(error.to_string().contains("model.embed.wieght"));
//! # Ok::<(), reshard::Error>(())
//! ```

use std::fmt;

use reshard_formats::DType;
use serde::Serialize;

/// One difference.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub enum Difference {
    /// Wanted, but not in the checkpoint.
    Missing {
        /// The wanted key.
        key: String,
        /// Keys of the checkpoint with similar names.
        near: Vec<String>,
    },
    /// In a part of the checkpoint that is being loaded, but not wanted.
    Unexpected {
        /// The checkpoint's key.
        key: String,
    },
    /// Another shape.
    Shape {
        /// The key.
        key: String,
        /// In the checkpoint.
        stored: Vec<u64>,
        /// As wanted.
        wanted: Vec<u64>,
    },
    /// Another element type, and no policy that allows the cast.
    DType {
        /// The key.
        key: String,
        /// In the checkpoint.
        stored: String,
        /// As wanted.
        wanted: String,
        /// Whether values could be lost.
        narrowing: bool,
    },
    /// Codes of a block-scaled weight whose values cannot be had: a cast without the scales would give other numbers.
    Scaled {
        /// The key.
        key: String,
        /// In the checkpoint.
        stored: String,
        /// As wanted.
        wanted: String,
        /// What is known of its scales.
        detail: String,
    },
    /// A tensor here, a value there.
    Kind {
        /// The key.
        key: String,
        /// What the checkpoint has.
        stored: &'static str,
        /// What is wanted.
        wanted: &'static str,
    },
    /// The stored chunks do not cover the wanted region exactly.
    Coverage {
        /// The key.
        key: String,
        /// Which part is missing or stored twice.
        detail: String,
    },
}

impl Difference {
    /// The key concerned.
    pub fn key(&self) -> &str {
        match self {
            Difference::Missing { key, .. }
            | Difference::Unexpected { key }
            | Difference::Shape { key, .. }
            | Difference::DType { key, .. }
            | Difference::Scaled { key, .. }
            | Difference::Kind { key, .. }
            | Difference::Coverage { key, .. } => key,
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Missing { key, near } if near.is_empty() => write!(f, "missing: {key}"),
            Difference::Missing { key, near } => write!(f, "missing: {key} (the checkpoint has {})", near.join(", ")),
            Difference::Unexpected { key } => write!(f, "unexpected: {key}"),
            Difference::Shape { key, stored, wanted } => {
                write!(f, "shape: {key} is {stored:?} in the checkpoint, {wanted:?} wanted")
            }
            Difference::DType { key, stored, wanted, .. } => {
                write!(f, "dtype: {key} is {stored} in the checkpoint, {wanted} wanted")
            }
            Difference::Scaled { key, stored, wanted, detail } => {
                write!(f, "dtype: {key} is {stored} in the checkpoint, {wanted} wanted: {detail}")
            }
            Difference::Kind { key, stored, wanted } => write!(f, "kind: {key} is {stored} in the checkpoint, {wanted} wanted"),
            Difference::Coverage { key, detail } => write!(f, "coverage: {key}: {detail}"),
        }
    }
}

/// All differences between a checkpoint and what is wanted from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Mismatch {
    /// The checkpoint's address.
    pub path: String,
    /// Every difference, in the order of the wanted keys, unexpected ones last.
    pub differences: Vec<Difference>,
}

/// An error text lists at most this many differences; [`Mismatch::differences`] has them all.
const LISTED: usize = 40;

impl Mismatch {
    /// The keys concerned.
    pub fn keys(&self) -> Vec<String> {
        self.differences.iter().map(|d| d.key().to_owned()).collect()
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.differences.len();
        write!(
            f,
            "{} differs from what is wanted in {count} place{}; nothing was loaded",
            self.path,
            if count == 1 { "" } else { "s" }
        )?;
        for difference in self.differences.iter().take(LISTED) {
            write!(f, "\n  {difference}")?;
        }
        if count > LISTED {
            write!(f, "\n  … and {} more", count - LISTED)?;
        }
        Ok(())
    }
}

/// The names most similar to `key`: same last parts, or few edits away.
pub fn near_names<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> Vec<String> {
    let last = key.rsplit('.').next().unwrap_or(key);
    let mut scored: Vec<(usize, &str)> = known
        .filter_map(|candidate| {
            let shared = common_suffix_parts(key, candidate);
            // Comparing letters is dear; names that share no ending and differ much in length are not what was meant.
            if shared == 0 && candidate.len().abs_diff(key.len()) > 3 {
                return None;
            }
            let distance = edit_distance(key, candidate, 16)?;
            let similar = distance <= 3 || (shared > 0 && !last.is_empty() && distance <= 16);
            similar.then_some((distance * 4 / (shared + 1), candidate))
        })
        .collect();
    scored.sort();
    scored.truncate(3);
    scored.into_iter().map(|(_, name)| name.to_owned()).collect()
}

fn common_suffix_parts(a: &str, b: &str) -> usize {
    a.rsplit('.').zip(b.rsplit('.')).take_while(|(a, b)| a == b).count()
}

/// Edits between two names, `None` above `most`.
fn edit_distance(a: &str, b: &str, most: usize) -> Option<usize> {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    if a.len().abs_diff(b.len()) > most {
        return None;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(ca != cb);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(diagonal + 1).min(row[j] + 1);
        }
        if row.iter().min().is_some_and(|&least| least > most) {
            return None;
        }
    }
    row.last().copied().filter(|&d| d <= most)
}

/// Whether a cast from `stored` to `wanted` can lose values.
pub(crate) fn is_narrowing(stored: DType, wanted: DType) -> bool {
    use DType::*;
    let widens: &[DType] = match stored {
        Bool => return wanted == Bool,
        UInt8 => &[UInt8, UInt16, UInt32, UInt64, Int16, Int32, Int64, Float16, BFloat16, Float32, Float64],
        Int8 => &[Int8, Int16, Int32, Int64, Float16, BFloat16, Float32, Float64],
        UInt16 => &[UInt16, UInt32, UInt64, Int32, Int64, Float32, Float64],
        Int16 => &[Int16, Int32, Int64, Float32, Float64],
        UInt32 => &[UInt32, UInt64, Int64, Float64],
        Int32 => &[Int32, Int64, Float64],
        UInt64 => &[UInt64],
        Int64 => &[Int64],
        Float8E4M3Fn | Float8E5M2 | Float8E4M3Fnuz | Float8E5M2Fnuz => &[Float16, BFloat16, Float32, Float64],
        Float8E8M0Fnu => &[BFloat16, Float32, Float64],
        Float16 | BFloat16 => &[Float32, Float64],
        Float32 => &[Float64],
        Complex32 => &[Complex64, Complex128],
        Complex64 => &[Complex128],
        _ => &[],
    };
    stored != wanted && !widens.contains(&wanted)
}
