//! Memory that the CPU cannot reach: read in parts, written in boxes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use reshard::layout::{ByteLayout, Dims, Region};
use reshard::leaf::{LoadLeaf, LoadPiece, LoadTensor, SaveLeaf, SavePiece, SaveTensor, Scope};
use reshard::memory::{DeviceMemory, DeviceMemoryMut, Source, StridedBox, Target};
use reshard::{AsyncSaver, Checkpoint, DType, LoadOptions, LoadState, SaveOptions, SaveState, Solo, load_with, save_with};

use crate::layouts::{Whole, store_at};

/// Memory that only tells its bytes when asked, and remembers the largest part that was asked for.
#[derive(Debug)]
struct Device {
    bytes: Vec<u8>,
    largest: AtomicUsize,
    broken: bool,
}

impl DeviceMemory for Device {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), String> {
        if self.broken {
            return Err("the device is gone".into());
        }
        self.largest.fetch_max(into.len(), Ordering::Relaxed);
        into.copy_from_slice(&self.bytes[offset as usize..offset as usize + into.len()]);
        Ok(())
    }
}

#[test]
fn device_memory_is_read_in_parts_as_it_is_written_or_staged() {
    let folder = tempfile::tempdir().unwrap();
    let long = Whole::new("long", DType::Float32, &[3000, 1000], 1);
    let short = Whole::new("short", DType::Int8, &[5], 2);
    // Stored as columns: every element is a run of its own.
    let turned = Whole::new("turned", DType::Float32, &[200, 300], 3);
    let columns: Vec<u8> = (0..300)
        .flat_map(|c| (0..200).flat_map(move |r| (0..4).map(move |b| (r * 300 + c) * 4 + b)))
        .map(|i| turned.bytes[i])
        .collect();
    let device = |bytes: &[u8], broken| Arc::new(Device { bytes: bytes.to_vec(), largest: AtomicUsize::new(0), broken });
    for (name, budget, broken) in
        [("now", None, false), ("staged", Some(1 << 30), false), ("beyond", Some(1000), false), ("broken", None, true)]
    {
        let devices = [device(&long.bytes, broken), device(&short.bytes, broken), device(&columns, broken)];
        let mut state = SaveState::new();
        for (whole, memory) in [&long, &short, &turned].into_iter().zip(&devices) {
            let layout = match whole.key.as_str() {
                "turned" => ByteLayout::strided(&[200, 300], &[1, 200], 4).unwrap(),
                _ => ByteLayout::contiguous(&whole.shape, whole.dtype.size()).unwrap(),
            };
            let source = Source::device(memory.bytes.len(), Arc::clone(memory) as Arc<dyn DeviceMemory>);
            let piece = SavePiece::new(Region::whole(&whole.shape).unwrap(), layout, source).unwrap();
            let shape = Dims::from_slice(&whole.shape);
            let tensor = SaveTensor { dtype: whole.dtype, shape, requires_grad: false, pieces: vec![piece] };
            state.insert(whole.key.clone(), None, Scope::Shared, SaveLeaf::Tensor(tensor)).unwrap();
        }
        let store = store_at(&folder.path().join(name));
        let saved = match budget {
            None => save_with(&Solo, &state, &store, &SaveOptions::default()).map(drop),
            Some(budget) => {
                let saver = AsyncSaver::new(budget);
                saver.save(Arc::new(Solo), &state, Arc::clone(&store), SaveOptions::default()).and_then(|h| h.wait()).map(drop)
            }
        };
        if broken {
            assert!(saved.unwrap_err().full_text().contains("the device is gone"));
            assert!(Checkpoint::open_store(store).is_err());
            continue;
        }
        saved.unwrap();
        let checkpoint = Checkpoint::open_store(store).unwrap();
        for (whole, memory) in [&long, &short, &turned].into_iter().zip(&devices) {
            assert_eq!(checkpoint.read_whole(&whole.key).unwrap(), whole.bytes, "{} {name}", whole.key);
            let largest = memory.largest.load(Ordering::Relaxed);
            assert!(largest > 0 && largest <= 4 << 20, "{largest} bytes of {} at once", whole.key);
        }
    }
}

/// Memory that is only written box by box, and remembers the largest one.
#[derive(Debug)]
struct WritableDevice {
    bytes: Mutex<Vec<u8>>,
    largest: AtomicUsize,
}

impl DeviceMemory for WritableDevice {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), String> {
        into.copy_from_slice(&self.bytes.lock().unwrap()[offset as usize..offset as usize + into.len()]);
        Ok(())
    }
}

impl DeviceMemoryMut for WritableDevice {
    fn address(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    fn write(&self, to: StridedBox<'_>, bytes: &[u8]) -> Result<(), String> {
        self.largest.fetch_max(bytes.len(), Ordering::Relaxed);
        let mut memory = self.bytes.lock().unwrap();
        let mut index = vec![0; to.sizes.len()];
        for element in bytes.chunks_exact(to.element_size as usize) {
            let at = to.offset + index.iter().zip(to.byte_strides).map(|(i, s)| i * s).sum::<u64>();
            memory[at as usize..at as usize + element.len()].copy_from_slice(element);
            for d in (0..index.len()).rev() {
                index[d] += 1;
                if index[d] < to.sizes[d] {
                    break;
                }
                index[d] = 0;
            }
        }
        Ok(())
    }
}

#[test]
fn device_memory_is_written_in_boxes_and_checked_on_the_way() {
    let folder = tempfile::tempdir().unwrap();
    let store = store_at(folder.path());
    let whole = Whole::new("w", DType::Float32, &[3000, 1000], 1);
    let mut state = SaveState::new();
    state.insert_bytes("w", whole.dtype, &whole.shape, &whole.bytes).unwrap();
    save_with(&Solo, &state, &store, &SaveOptions::default()).unwrap();
    let checkpoint = Checkpoint::open_store(store).unwrap();

    // The whole as it is, the whole turned, some columns, and the same columns a second time.
    let columns = Region::new(&[0, 100], &[3000, 50]).unwrap();
    let all = Region::whole(&whole.shape).unwrap();
    for (regions, turned) in [(vec![all.clone()], false), (vec![all], true), (vec![columns.clone(), columns], false)] {
        let devices: Vec<Arc<WritableDevice>> = regions
            .iter()
            .map(|region| {
                let bytes = Mutex::new(vec![0; region.volume() as usize * 4]);
                Arc::new(WritableDevice { bytes, largest: AtomicUsize::new(0) })
            })
            .collect();
        let pieces = regions.iter().zip(&devices).map(|(region, device)| {
            let layout = match turned {
                true => ByteLayout::strided(region.sizes(), &[1, region.sizes()[0]], 4).unwrap(),
                false => ByteLayout::contiguous(region.sizes(), 4).unwrap(),
            };
            let memory = Target::device(layout.end() as usize, Arc::clone(device) as Arc<dyn DeviceMemoryMut>);
            LoadPiece::new(region.clone(), layout, memory).unwrap()
        });
        let tensor = LoadTensor { dtype: DType::Float32, shape: Dims::from_slice(&whole.shape), pieces: pieces.collect() };
        let mut state = LoadState::new();
        state.insert("w", Scope::Shared, LoadLeaf::Tensor(tensor)).unwrap();
        let report = load_with(&Solo, &checkpoint, &mut state, &LoadOptions::default()).unwrap().report;
        assert_eq!(report.verified, u64::from(regions.len() == 1));
        for (region, device) in regions.iter().zip(&devices) {
            let mut found = device.bytes.lock().unwrap().clone();
            if turned {
                found = (0..3000)
                    .flat_map(|r| (0..1000).flat_map(move |c| (0..4).map(move |b| (c * 3000 + r) * 4 + b)))
                    .map(|i| found[i])
                    .collect();
            }
            assert!(found == whole.slice(region), "{region} {turned}");
            assert!(device.largest.load(Ordering::Relaxed) <= 4 << 20);
        }
    }
}
