//! Any bytes as the sidecar of a save, bare and under a right checksum; what is accepted must survive being written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use reshard_formats::own::Sidecar;
use twox_hash::XxHash3_64;

fn sealed(body: &[u8]) -> Vec<u8> {
    let mut bytes = [b"RSHSUMS1".as_slice(), body].concat();
    bytes.extend(XxHash3_64::oneshot(&bytes).to_le_bytes());
    bytes
}

fuzz_target!(|data: &[u8]| {
    // With a right checksum, or none would be passed.
    for bytes in [data.to_vec(), sealed(data)] {
        if let Ok(side) = Sidecar::decode(&bytes) {
            let again = side.encode().and_then(|bytes| Sidecar::decode(&bytes));
            assert!(again.is_ok_and(|again| again == side));
        }
    }
});
