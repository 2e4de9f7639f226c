//! One tensor at a time, for the page that a server shows.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use reshard::checkpoint::{CatalogKind, LoadedValue};
use reshard::layout::Region;
use reshard::numbers::{StatsOptions, stats};
use reshard::{Checkpoint, Control};

use super::numbers::{BINS, Looked, look, page, unreadable};
use super::{Comparison, whole};
use crate::catalog::location;
use crate::elements::{self, Element};
use crate::human;
use crate::limits::Limits;
use crate::report::{Diff, Health, HealthState, LiveSource, Numbers, Sample, SampleValue, Scan, TensorDetail};

/// Rows and columns of a sample.
const SIDE: u64 = 8;

/// Details that are remembered, each some kilobytes.
const MOST_REMEMBERED: usize = 2000;

/// A checkpoint that answers the page. What was read is remembered here, in the process, and nowhere else.
#[derive(Debug)]
pub(crate) struct Live {
    checkpoint: Arc<Checkpoint>,
    remembered: Mutex<HashMap<String, TensorDetail>>,
    scan: Arc<Background>,
}

/// The scan behind the page.
#[derive(Debug, Default)]
struct Background {
    control: Control,
    started: AtomicBool,
    outcome: OnceLock<Outcome>,
}

/// What came of the scan.
#[derive(Debug)]
struct Outcome {
    numbers: Option<Numbers>,
    health: Health,
    other_health: Option<Health>,
    diff: Option<Result<Diff, String>>,
}

impl Outcome {
    /// Adds what the numbers of one or both look like.
    fn look(mut self, found: reshard::Result<Looked>) -> Outcome {
        let (numbers, judged, of_other) = match found {
            Ok(found) => (found.numbers, found.judged, found.other),
            Err(error) => (Numbers::default(), unreadable(&error), None),
        };
        if let Some(judged) = of_other {
            self.other_health = self.other_health.map(|health| health.with_numbers(judged));
        }
        Outcome { numbers: Some(numbers), health: self.health.with_numbers(judged), ..self }
    }
}

impl Live {
    /// Answers from this checkpoint.
    pub(crate) fn new(checkpoint: Arc<Checkpoint>) -> Live {
        Live { checkpoint, remembered: Mutex::default(), scan: Arc::default() }
    }

    /// Starts to compare and, where there are limits to judge them by, to read all numbers, also those of what it is compared
    /// with; the verdicts are those without them.
    pub(crate) fn scan(
        &self,
        other: Option<(Comparison, Health)>,
        places: HashMap<String, u32>,
        limits: Option<Limits>,
        health: Health,
    ) {
        let (scan, checkpoint) = (Arc::clone(&self.scan), Arc::clone(&self.checkpoint));
        let read = move || {
            let (comparison, other_health) = other.unzip();
            let diff = comparison.as_ref().map(|comparison| {
                let found = comparison.page(&checkpoint, &places, &scan.control);
                found.map_err(|error| human::printable(&error.full_text()))
            });
            let is_whole = other_health.as_ref().is_some_and(|health| health.state != HealthState::Damaged);
            let mut outcome = Outcome { numbers: None, health, other_health, diff };
            if let Some(limits) = limits {
                let other = comparison.as_ref().filter(|_| is_whole).map(|comparison| &*comparison.other);
                outcome = outcome.look(look(&checkpoint, other, &places, &limits, &scan.control));
            }
            drop(scan.outcome.set(outcome));
        };
        let started = std::thread::Builder::new().name("numbers".to_owned()).spawn(read);
        self.scan.started.store(started.is_ok(), Ordering::SeqCst);
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

impl Live {
    fn read(&self, key: &str) -> Result<TensorDetail, String> {
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
            Ok(found) => Some(page(&found, true)),
            Err(reshard::Error::Unsupported { .. }) => None,
            Err(error) => return Err(human::printable(&text(error))),
        };
        let mut chunks: Vec<_> = tensor.chunks.iter().collect();
        chunks.sort_by(|a, b| a.region.offsets().cmp(b.region.offsets()));
        let places = chunks.iter().flat_map(|chunk| <[u64; 2]>::from(location(&chunk.location))).collect();
        Ok(TensorDetail { key: key.to_owned(), stats, sample: self.sample(key, &tensor.shape), places, text: None })
    }
}

impl Drop for Live {
    /// Nobody waits for numbers any more.
    fn drop(&mut self) {
        self.scan.control.cancel();
    }
}

impl LiveSource for Live {
    fn tensor(&self, key: &str) -> Result<TensorDetail, String> {
        let remembered = || self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = remembered().get(key) {
            return Ok(known.clone());
        }
        let read = self.read(key)?;
        let mut remembered = remembered();
        if remembered.len() < MOST_REMEMBERED {
            remembered.insert(key.to_owned(), read.clone());
        }
        Ok(read)
    }

    fn numbers(&self) -> Scan<'_> {
        match self.scan.outcome.get() {
            Some(Outcome { numbers, health, other_health, diff }) => {
                let (diff, not_compared) = match diff {
                    Some(Ok(diff)) => (Some(diff), None),
                    Some(Err(text)) => (None, Some(text.as_str())),
                    None => (None, None),
                };
                Scan::Done { numbers: numbers.as_ref(), health, other_health: other_health.as_ref(), diff, not_compared }
            }
            None if self.scan.started.load(Ordering::SeqCst) => {
                Scan::Running { done: self.scan.control.done(), total: self.scan.control.total() }
            }
            None => Scan::Off,
        }
    }
}
