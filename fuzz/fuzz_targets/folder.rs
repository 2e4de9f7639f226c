//! Any bytes as the folder of a trainer: DeepSpeed, universal, Megatron, one file a rank, accelerate.
#![no_main]

#[path = "../folder.rs"]
mod folder;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    folder::check(&folder::files(data));
});
