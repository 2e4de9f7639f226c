//! Any text as rules of a view: what is accepted has a reverse or says why not, and the reverse of that one too.
#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use reshard::view::View;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let Ok(view) = View::parse(text, "rules", &BTreeMap::new()) else {
        return;
    };
    if let Ok(back) = view.reversed() {
        let _ = back.reversed();
    }
});
