//! Any bytes as the index at the end of a data file, bare and under a right checksum; what is accepted must survive being written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use reshard_formats::own::FileIndex;
use twox_hash::XxHash3_64;

fn sealed(body: &[u8]) -> Vec<u8> {
    let (length, hash) = (body.len() as u64, XxHash3_64::oneshot(body));
    [body, &length.to_le_bytes(), &hash.to_le_bytes(), b"RSHINDX1"].concat()
}

fuzz_target!(|data: &[u8]| {
    // With a right checksum, or none would be passed.
    for bytes in [data.to_vec(), sealed(data)] {
        if let Ok(Some(index)) = FileIndex::read(&bytes) {
            for record in &index.records {
                let entry = &index.table[record.key as usize];
                assert_eq!(entry.tensor.is_some(), record.region.is_some());
            }
            let again = index.encode().and_then(|bytes| FileIndex::read(&bytes));
            assert!(again.is_ok_and(|again| again == Some(index)));
        }
    }
});
