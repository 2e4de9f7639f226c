//! One tensor at a time, for the page that a server shows.

use reshard::Checkpoint;
use reshard::checkpoint::{CatalogKind, LoadedValue};
use reshard::layout::Region;
use reshard::numbers::{StatsOptions, stats};

use super::{BINS, stats_page, whole};
use crate::catalog::place;
use crate::elements::{self, Element};
use crate::human;
use crate::report::{LiveSource, Sample, SampleValue, TensorDetail};

/// Rows and columns of a sample.
const SIDE: u64 = 8;

/// A checkpoint that answers the page.
#[derive(Debug)]
pub(crate) struct Live {
    checkpoint: Checkpoint,
}

impl Live {
    /// Answers from this checkpoint.
    pub(crate) fn new(checkpoint: Checkpoint) -> Live {
        Live { checkpoint }
    }

    fn sample(&self, key: &str, shape: &[u64]) -> Option<Sample> {
        let whole = whole(shape)?;
        if whole.is_empty() {
            return None;
        }
        // The last two dimensions; the first index of all others.
        let kept = shape.len().saturating_sub(2);
        let sizes: Vec<u64> = shape.iter().enumerate().map(|(dim, &size)| if dim < kept { 1 } else { size.min(SIDE) }).collect();
        let region = Region::new(whole.offsets(), &sizes).ok()?;
        let values = elements::read(&self.checkpoint, key, &region).ok()?;
        let columns = sizes.last().map_or(1, |n| *n as usize).max(1);
        let words = shape.iter().enumerate().map(|(dim, &size)| match (dim < kept, size <= SIDE) {
            (true, _) => "0".to_owned(),
            (false, true) => ":".to_owned(),
            (false, false) => format!(":{SIDE}"),
        });
        let rows = values.chunks(columns).map(|row| row.iter().map(value).collect()).collect();
        Some(Sample { slice: format!("[{}]", words.collect::<Vec<_>>().join(", ")), rows })
    }
}

fn value(element: &Element) -> SampleValue {
    match element {
        Element::Float(number) if number.is_finite() => SampleValue::Number(*number),
        // The page's numbers are doubles: what they cannot hold exactly stays text.
        Element::Int(number) if number.unsigned_abs() <= 1 << 53 => SampleValue::Number(*number as f64),
        other => SampleValue::Text(other.text()),
    }
}

impl LiveSource for Live {
    fn tensor(&self, key: &str) -> Result<TensorDetail, String> {
        let text = |error: reshard::Error| error.full_text();
        let entry = self.checkpoint.entry(key).map_err(text)?;
        let CatalogKind::Tensor(tensor) = &entry.kind else {
            let value = match self.checkpoint.read_value(key).map_err(text)? {
                LoadedValue::Plain(value) => value.python_repr(),
                LoadedValue::Opaque { class, .. } => format!("<{class}>"),
                _ => String::new(),
            };
            return Ok(TensorDetail { key: key.to_owned(), text: Some(value), ..TensorDetail::default() });
        };
        let mut options = StatsOptions::default();
        options.bins = BINS;
        let stats = match stats(&self.checkpoint, key, &options) {
            Ok(found) => Some(stats_page(&found)),
            Err(reshard::Error::Unsupported { .. }) => None,
            Err(error) => return Err(human::printable(&text(error))),
        };
        let mut chunks: Vec<_> = tensor.chunks.iter().collect();
        chunks.sort_by(|a, b| a.region.offsets().cmp(b.region.offsets()));
        let places = chunks.iter().flat_map(|chunk| <[u64; 2]>::from(place(&chunk.place))).collect();
        Ok(TensorDetail { key: key.to_owned(), stats, sample: self.sample(key, &tensor.shape), places, text: None })
    }
}
