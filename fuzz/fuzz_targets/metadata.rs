//! Any bytes as a checkpoint's `.metadata`; what is accepted must survive being written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use reshard_formats::Metadata;

fuzz_target!(|data: &[u8]| {
    let Ok(metadata) = Metadata::decode(data) else {
        return;
    };
    for file in &metadata.files {
        assert!(!file.starts_with('/') && file.split('/').all(|part| part != ".."));
    }
    if let Ok(bytes) = metadata.encode() {
        let again = Metadata::decode(&bytes).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(again.entries.len(), metadata.entries.len());
        assert_eq!(again.chunk_count(), metadata.chunk_count());
    }
});
