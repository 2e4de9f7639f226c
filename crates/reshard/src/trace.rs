//! A trace of what happened when, for a browser's trace viewer (`chrome://tracing`, Perfetto).
//!
//! [`ChromeTrace`] is a layer for `tracing`: every span becomes an event of the Chrome trace format, with the rank as its
//! process, so that the traces of all ranks lie under each other when their files are joined.

use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

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
    out: Mutex<Box<dyn Write + Send>>,
}

impl ChromeTrace {
    /// A trace of one rank.
    pub fn new(rank: usize, mut out: Box<dyn Write + Send>) -> std::io::Result<ChromeTrace> {
        writeln!(out, "[")?;
        writeln!(out, r#"{{"name":"process_name","ph":"M","pid":{rank},"args":{{"name":"rank {rank}"}}}},"#)?;
        Ok(ChromeTrace { rank, start: Instant::now(), out: Mutex::new(out) })
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
            "ts": entered.duration_since(self.start).as_secs_f64() * 1e6,
            "dur": entered.elapsed().as_secs_f64() * 1e6,
            "args": open.fields,
        }));
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
