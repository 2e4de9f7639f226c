//! A trace of what happened when, for a browser's trace viewer (`chrome://tracing`, Perfetto).
//!
//! [`ChromeTrace`] is a layer for `tracing`: every span becomes an event of the Chrome trace format, with the rank as its
//! process, so that the traces of all ranks lie under each other when their files are joined. [`TraceFile`] traces single
//! calls into one file, which ranks and calls may share.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// Writes spans as Chrome trace events. The file is a JSON array whose end may be missing, which viewers accept: a run that
/// dies leaves a trace that can be read.
pub struct ChromeTrace {
    rank: usize,
    start: Instant,
    /// What the time was then.
    origin: Duration,
    out: Mutex<Box<dyn Write + Send>>,
}

impl ChromeTrace {
    /// A trace of one rank.
    pub fn new(rank: usize, mut out: Box<dyn Write + Send>) -> std::io::Result<ChromeTrace> {
        writeln!(out, "[")?;
        ChromeTrace::from(rank, Duration::ZERO, out)
    }

    fn from(rank: usize, origin: Duration, mut out: Box<dyn Write + Send>) -> std::io::Result<ChromeTrace> {
        writeln!(out, r#"{{"name":"process_name","ph":"M","pid":{rank},"args":{{"name":"rank {rank}"}}}},"#)?;
        Ok(ChromeTrace { rank, start: Instant::now(), origin, out: Mutex::new(out) })
    }

    fn write(&self, event: &serde_json::Value) {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        // A trace is never a reason to fail what it traces.
        let _ = writeln!(out, "{event},").and_then(|()| out.flush());
    }
}

/// What is kept of a span while it is open.
struct Open {
    fields: serde_json::Map<String, serde_json::Value>,
    entered: Option<Instant>,
}

impl<S: Subscriber + for<'l> LookupSpan<'l>> Layer<S> for ChromeTrace {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields(serde_json::Map::new());
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(Open { fields: fields.0, entered: None });
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(open) = span.extensions_mut().get_mut::<Open>()
        {
            open.entered = Some(Instant::now());
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut extensions = span.extensions_mut();
        let Some(open) = extensions.get_mut::<Open>() else { return };
        let Some(entered) = open.entered.take() else { return };
        // A phase is named by its field, everything else by its span.
        let name = open.fields.get("name").and_then(|n| n.as_str()).unwrap_or(span.name()).to_owned();
        self.write(&serde_json::json!({
            "name": name,
            "cat": "reshard",
            "ph": "X",
            "pid": self.rank,
            "tid": thread_number(),
            "ts": (self.origin + entered.duration_since(self.start)).as_secs_f64() * 1e6,
            "dur": entered.elapsed().as_secs_f64() * 1e6,
            "args": open.fields,
        }));
    }
}

/// Traces calls into a file to which every rank and every call adds: a save in the background until it has ended.
///
/// ```
/// # let folder = tempfile::tempdir().unwrap();
/// # let file = folder.path().join("save.json");
/// let mut state = reshard::SaveState::new();
/// state.value("step", 100)?;
/// # let path = folder.path().join("step-100").to_str().unwrap().to_owned();
/// let trace = reshard::trace::TraceFile::open(0, &file).unwrap();
/// trace.around(|| reshard::save(&reshard::Solo, &path, &state))?;
/// drop(trace);
/// assert!(std::fs::read_to_string(&file).unwrap().contains("commit"));
/// # Ok::<(), reshard::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct TraceFile(tracing::Dispatch);

impl TraceFile {
    /// Opens the file, or makes it. What was traced is added to it when this and all its copies are gone.
    pub fn open(rank: usize, path: &Path) -> std::io::Result<TraceFile> {
        use tracing_subscriber::layer::SubscriberExt;
        let file = File::options().create(true).append(true).open(path)?;
        // All processes count from one moment, so that ranks stand beside each other.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let trace = ChromeTrace::from(rank, now, Box::new(Appended { file, lines: Vec::new() }))?;
        Ok(TraceFile(tracing::Dispatch::new(tracing_subscriber::registry().with(trace))))
    }

    /// Does some work, and traces it.
    pub fn around<T>(&self, work: impl FnOnce() -> T) -> T {
        tracing::dispatcher::with_default(&self.0, || {
            // Spans that were met before anybody listened are asked for anew.
            tracing::callsite::rebuild_interest_cache();
            work()
        })
    }
}

/// Lines that are added to a file at once.
struct Appended {
    file: File,
    lines: Vec<u8>,
}

impl Write for Appended {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.lines.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for Appended {
    fn drop(&mut self) {
        // Other ranks add to the same file. A trace is never a reason to fail what it traces.
        let added = self.file.lock().and_then(|()| {
            if self.file.metadata()?.len() == 0 {
                self.file.write_all(b"[\n")?;
            }
            self.file.write_all(&self.lines)?;
            self.file.unlock()
        });
        if let Err(error) = added {
            tracing::warn!(%error, "a trace could not be written");
        }
    }
}

/// A small number per thread: viewers sort by it.
fn thread_number() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|n| *n)
}

struct Fields(serde_json::Map<String, serde_json::Value>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").into());
    }
}
