//! Real processes: killed at random moments, and watched for leaks.
//!
//! The test binary runs itself again as the process under test; the `child_*` tests do nothing unless they are it.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use reshard::{AsyncSaver, Checkpoint, DType, Group, SaveOptions, SaveState, Solo, Value, run_threads, save_with};

use crate::layouts::{Cut, Memory, Whole, add_to_save, held, store_at};

const PLACE: &str = "RESHARD_TEST_CHILD_PLACE";

fn again(test: &str, path: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(PLACE, path);
    command
}

fn generation(number: u64) -> Vec<Whole> {
    vec![Whole::new("m.a", DType::Float32, &[60, 100], number), Whole::new("m.b", DType::UInt8, &[300_000], number + 1_000_000)]
}

fn save_generation(number: u64, path: &Path, sync: bool) {
    let cut = Cut { mesh: vec![2], placements: vec![reshard::layout::Placement::Shard(0)] };
    let wholes = generation(number);
    let store = store_at(path);
    let results = run_threads(2, |group| {
        let memories: Vec<Vec<Memory>> = wholes.iter().map(|w| held(w, &cut, group.rank() as u64, false)).collect();
        let mut state = SaveState::new();
        for (whole, memory) in wholes.iter().zip(&memories) {
            add_to_save(&mut state, whole, memory);
        }
        state.insert_value("number", Value::from(number as i64))?;
        let mut options = SaveOptions::default();
        options.overwrite = true;
        options.sync = sync;
        save_with(&group, &state, &store, &options)
    });
    results.into_iter().for_each(|r| drop(r.unwrap()));
}

/// Saves one generation after the other until it is killed.
#[test]
fn child_saves_for_ever() {
    let Some(path) = std::env::var_os(PLACE) else { return };
    // Goes on from what the killed one left.
    let start = match Checkpoint::open_store(store_at(Path::new(&path))).and_then(|c| c.value("number")) {
        Ok(Value::Int(number)) => number.as_i64().unwrap() as u64 + 1,
        _ => 1,
    };
    for number in start..start + 100_000 {
        // A killed process loses no page cache: syncing would only make the test slower.
        save_generation(number, Path::new(&path), false);
    }
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn killed_at_random_moments_a_complete_checkpoint_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ckpt");
    save_generation(1, &path, true);
    let mut last = 1;
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut advanced = 0;
    // Where processes start slowly they are given longer.
    let mut idle = 0;
    for round in 0..200 {
        let child = again("killed::child_saves_for_ever", &path).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        std::thread::sleep(Duration::from_micros((1 + idle / 8) * (8_000 + state % 30_000)));
        kill(child);
        let checkpoint = Checkpoint::open_store(store_at(&path)).unwrap_or_else(|e| panic!("round {round}: {}", e.full_text()));
        let Value::Int(number) = checkpoint.value("number").unwrap() else { panic!("the number is a number") };
        let number = number.as_i64().unwrap() as u64;
        assert!(number >= last, "round {round}: {number} after {last}");
        advanced += usize::from(number > last);
        idle = if number > last { idle / 2 } else { idle + 1 };
        last = number;
        for whole in generation(number) {
            assert_eq!(checkpoint.read_whole(&whole.key).unwrap(), whole.bytes, "round {round}: {}", whole.key);
        }
    }
    assert!(advanced > 20, "the processes did save before they were killed: {advanced}");
    save_generation(last + 1, &path, true);
    assert_eq!(store_at(&path).list("").unwrap().len(), 4, "leftovers are swept");
}

/// Resident memory of this process, in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn child_saves_fifty_times() {
    let Some(path) = std::env::var_os(PLACE) else { return };
    let whole = Whole::new("m.w", DType::UInt8, &[24 << 20], 1);
    let saver = AsyncSaver::new(1 << 30);
    let mut after_two = 0;
    for i in 0..50 {
        let mut state = SaveState::new();
        state.insert_bytes("m.w", whole.dtype, &whole.shape, &whole.bytes).unwrap();
        let mut options = SaveOptions::default();
        options.overwrite = true;
        options.sync = false;
        let handle = saver.save(Arc::new(Solo) as Arc<dyn Group>, &state, store_at(Path::new(&path)), options).unwrap();
        handle.wait().unwrap();
        if i == 1 {
            after_two = resident();
        }
    }
    let after_fifty = resident();
    assert!(after_fifty < after_two + (2 << 20), "{after_two} bytes after 2 saves, {after_fifty} after 50");
    println!("resident: {after_two} after 2, {after_fifty} after 50");
}

#[test]
fn fifty_background_saves_leak_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let output = again("killed::child_saves_fifty_times", folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(String::from_utf8_lossy(&output.stdout).contains("resident:"));
}

#[test]
fn child_loads_in_bounded_memory() {
    let Some(path) = std::env::var_os(PLACE) else { return };
    let whole = Whole::new("m.w", DType::Float32, &[4000, 4000], 1);
    let mut state = SaveState::new();
    state.insert_bytes("m.w", whole.dtype, &whole.shape, &whole.bytes).unwrap();
    save_with(&Solo, &state, &store_at(Path::new(&path)), &SaveOptions::default()).unwrap();
    drop(state);
    let region = reshard::layout::Region::new(&[0, 0], &[4000, 2000]).unwrap();
    let mut memory = Memory::new(region, whole.dtype, true);
    let before = resident();
    let checkpoint = Checkpoint::open_store(store_at(Path::new(&path))).unwrap();
    let mut state = reshard::LoadState::new();
    crate::layouts::add_to_load(&mut state, &whole, std::slice::from_mut(&mut memory));
    let start = Instant::now();
    reshard::load_with(&Solo, &checkpoint, &mut state, &reshard::LoadOptions::default()).unwrap();
    let grown = resident().saturating_sub(before);
    println!("grown by {grown} bytes in {:?}", start.elapsed());
    assert!(grown < 24 << 20, "a load of 32 MB into memory that was there grew the process by {grown} bytes");
}

#[test]
fn a_load_needs_no_more_memory_than_its_buffers() {
    let folder = tempfile::tempdir().unwrap();
    let output = again("killed::child_loads_in_bounded_memory", folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
