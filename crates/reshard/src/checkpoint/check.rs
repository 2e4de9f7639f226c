//! Comparing what is read of a file with its checksum.

use std::hash::Hasher;

use twox_hash::XxHash3_64;

use super::Checkpoint;
use super::locate::Check;
use crate::control::Control;
use crate::error::{Result, StorageContext};

/// Hashes bytes as they pass and compares at the end.
pub(crate) struct Checker {
    pub(crate) check: Check,
    state: CheckState,
}

enum CheckState {
    None,
    Xxh3(Box<XxHash3_64>),
    Crc32(crc32fast::Hasher),
}

impl Checker {
    pub(crate) fn new(check: Check) -> Checker {
        let state = match check {
            Check::None => CheckState::None,
            Check::Xxh3 { .. } => CheckState::Xxh3(Box::default()),
            Check::Crc32 { .. } => CheckState::Crc32(crc32fast::Hasher::new()),
        };
        Checker { check, state }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match &mut self.state {
            CheckState::None => {}
            CheckState::Xxh3(hasher) => hasher.write(bytes),
            CheckState::Crc32(hasher) => hasher.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> std::result::Result<(), String> {
        match (self.check, self.state) {
            (Check::Xxh3 { expected, .. }, CheckState::Xxh3(hasher)) => same(expected, hasher.finish(), 16),
            (Check::Crc32 { expected, .. }, CheckState::Crc32(hasher)) => same(expected.into(), hasher.finalize().into(), 8),
            _ => Ok(()),
        }
    }
}

/// Compares bytes that are all there.
pub(crate) fn check_whole(check: Check, bytes: &[u8]) -> std::result::Result<(), String> {
    match check {
        Check::None => Ok(()),
        Check::Xxh3 { expected, .. } => same(expected, XxHash3_64::oneshot(bytes), 16),
        Check::Crc32 { expected, .. } => same(expected.into(), crc32fast::hash(bytes).into(), 8),
    }
}

fn same(expected: u64, actual: u64, digits: usize) -> std::result::Result<(), String> {
    if expected == actual {
        return Ok(());
    }
    Err(format!("the checksum should be {expected:0digits$x}, its bytes give {actual:0digits$x}"))
}

/// A stretch is read in parts of this size when it is read only to be compared.
const PART: u64 = 1 << 20;

impl Checkpoint {
    /// Reads a stretch of a file only to compare its checksum. Says how many bytes that were.
    pub(crate) fn check_stretch(&self, key: &str, file: u32, check: Check, control: &Control) -> Result<u64> {
        let Some((offset, length)) = check.stretch() else { return Ok(0) };
        let reader = self.reader(file)?;
        let mut checker = Checker::new(check);
        let mut buffer = vec![0; length.min(PART) as usize];
        let mut at = offset;
        while at < offset + length {
            control.check("comparing checksums")?;
            let part = &mut buffer[..(offset + length - at).min(PART) as usize];
            reader.read_at(at, part).doing(|| format!("reading {key:?} from {}", reader.path()))?;
            checker.update(part);
            at += part.len() as u64;
        }
        checker.finish().map_err(|detail| self.corrupt(key, file, offset, detail))?;
        Ok(length)
    }
}
