//! The trace of a save and a load.

use std::sync::{Arc, Mutex};

use reshard::DType;
use reshard::trace::ChromeTrace;

use crate::layouts::Whole;
use crate::wholes::save_whole;

#[test]
fn a_trace_has_the_rank_as_process_and_every_phase() {
    use tracing_subscriber::layer::SubscriberExt;
    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let sink = Sink::default();
    let layer = ChromeTrace::new(5, Box::new(sink.clone())).unwrap();
    let (before, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // Spans that another test's thread is just meeting for the first time would be taken for unwanted; after one save all
    // of them are known, and are asked for anew.
    save_whole(&[Whole::new("m.a", DType::Float32, &[4], 1)], before.path());
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
        tracing::callsite::rebuild_interest_cache();
        save_whole(&[Whole::new("m.a", DType::Float32, &[4], 1)], folder.path());
    });
    let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
    let events: serde_json::Value = serde_json::from_str(&format!("{}]", text.trim_end().trim_end_matches(','))).unwrap();
    let names: Vec<&str> = events.as_array().unwrap().iter().map(|e| e["name"].as_str().unwrap()).collect();
    for name in ["save", "plan", "write", "sync", "commit"] {
        assert!(names.contains(&name), "{names:?}");
    }
    assert!(events.as_array().unwrap().iter().all(|e| e["pid"] == 5));
}
