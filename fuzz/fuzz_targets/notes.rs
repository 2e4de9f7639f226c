//! Any text as the notes that reshard leaves in safetensors; what is accepted must survive being written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use reshard_formats::safetensors::Notes;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    for name in ["reshard.values", "reshard.paths"] {
        let Ok(notes) = Notes::decode(&[(name.to_owned(), text.to_owned())].into_iter().collect()) else {
            continue;
        };
        // Encoding has limits of its own; what it accepts must come back.
        if let Ok(entries) = notes.encode() {
            let again = Notes::decode(&entries.into_iter().collect()).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(again.paths, notes.paths);
            assert_eq!(again.values.len(), notes.values.len());
        }
    }
});
