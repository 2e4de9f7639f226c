//! Any bytes as the note of an edit, bare and under a right checksum; what is accepted must survive being written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use reshard_formats::own::EditNote;
use twox_hash::XxHash3_64;

fn sealed(body: &[u8]) -> Vec<u8> {
    let mut bytes = [b"RSHEDIT1".as_slice(), body].concat();
    bytes.extend(XxHash3_64::oneshot(&bytes).to_le_bytes());
    bytes
}

fuzz_target!(|data: &[u8]| {
    // With a right checksum, or none would be passed.
    for bytes in [data.to_vec(), sealed(data)] {
        if let Ok(note) = EditNote::decode(&bytes) {
            let again = note.encode().and_then(|bytes| EditNote::decode(&bytes));
            assert!(again.is_ok_and(|again| again == note));
        }
    }
});
