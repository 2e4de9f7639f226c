//! Any bytes as a safetensors file, and as an index; tensors that come out must tile the data exactly.
#![no_main]

use libfuzzer_sys::fuzz_target;
use reshard_formats::safetensors::sharded_tensors;
use reshard_formats::{SafetensorsFile, SafetensorsHeader, SafetensorsIndex, SafetensorsSpec};

fuzz_target!(|data: &[u8]| {
    if let Ok(index) = SafetensorsIndex::parse(data) {
        assert!(
            index
                .files()
                .iter()
                .all(|file| !file.starts_with('/') && !file.contains("..") || file.split('/').all(|part| part != ".."))
        );
    }
    let Ok(file) = SafetensorsFile::open(&data) else {
        return;
    };
    let mut total = 0;
    for tensor in file.tensors.values() {
        assert!(tensor.data_offset + tensor.data_len <= data.len() as u64);
        assert_eq!(tensor.region.volume() * tensor.dtype.size(), tensor.data_len);
        total += tensor.data_len;
    }
    assert!(total <= data.len() as u64);
    let sharded = sharded_tensors([&file]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(sharded.len(), file.tensors.len());

    let specs: Vec<_> = file
        .tensors
        .iter()
        .map(|(key, tensor)| SafetensorsSpec {
            key,
            dtype: tensor.dtype,
            shape: &tensor.shape,
            saved_offsets: file.is_dcp.then_some(tensor.region.offsets()),
        })
        .collect();
    let header = SafetensorsHeader::new(&specs, &file.metadata).unwrap_or_else(|error| panic!("{error}"));
    let again = SafetensorsFile::parse(&header.head[8..]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(again.tensors.len(), file.tensors.len());
    for (key, tensor) in &file.tensors {
        assert_eq!((&again.tensors[key].region, again.tensors[key].dtype), (&tensor.region, tensor.dtype));
    }
});
