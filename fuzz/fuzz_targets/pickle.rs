//! Any bytes as a pickle; a plain value that comes out must survive every protocol that is written.
#![no_main]

use libfuzzer_sys::fuzz_target;
use reshard_formats::pickle::{Policy, Unknown, decode, read_value, write_value};

fuzz_target!(|data: &[u8]| {
    let _ = decode(data, Policy::torch().with_unknown(Unknown::Carry));
    if let Ok(value) = read_value(data) {
        let _ = value.to_json();
        let _ = value.python_repr();
        for protocol in 2..=5 {
            // Encoding has limits of its own; what it accepts must come back.
            if let Ok(bytes) = write_value(&value, protocol) {
                match read_value(&bytes) {
                    Ok(again) => assert_eq!(again, value, "protocol {protocol}"),
                    Err(error) => panic!("{value:?} came back as {error} (protocol {protocol})"),
                }
            }
        }
    }
});
