//! Is a checkpoint whole? Structure, sizes, coverage, every checksum; each finding with key, file and offset.
//!
//! Whatever is stored twice is compared: the index at the end of our data files with `.metadata` and with the sidecar, an
//! edit's note with `.metadata`, a safetensors index with the files' headers. Our own data files are checked to the last
//! byte: frames around the data are derived again and compared, data is hashed, and the index at a file's end carries its
//! own hash. What PyTorch wrote is checked by the CRC-32 that its zip records carry, and byte for byte where its records are
//! of the form that is known here.
//!
//! ```
//! # let path = "../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint";
//! use reshard::verify::{VerifyOptions, verify_path};
//!
//! let report = verify_path(path, &Default::default(), &VerifyOptions::default())?;
//! assert!(report.is_sound());
//! # Ok::<(), reshard::Error>(())
//! ```

mod foreign;
mod own;
mod packed;
mod structure;
mod twice;
mod values;
mod zip;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use reshard_storage::{Address, Reader, StorageError, Store};
use serde::Serialize;

pub(crate) use self::twice::check_stored_twice;
use crate::checkpoint::{CatalogEntry, CatalogKind, CatalogTensor, Checkpoint, Format};
use crate::control::Control;
use crate::error::{Error, ErrorKind, Result, StorageContext};
use crate::layout_names::{DATA_SUFFIX, META_FILE};
use crate::source::OpenOptions;
use crate::workers::Workers;

/// How to verify.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct VerifyOptions {
    /// Read all data and compare checksums; without it, structure, coverage, lengths of files and everything that is stored
    /// twice are checked.
    pub data: bool,
    /// To watch and to cancel.
    pub control: Control,
}

impl Default for VerifyOptions {
    fn default() -> VerifyOptions {
        VerifyOptions { data: true, control: Control::new() }
    }
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Something is damaged or missing.
    Error,
    /// Nothing is lost, but someone should look.
    Warning,
}

/// One thing that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// The key concerned, where one is.
    pub key: Option<String>,
    /// The file concerned, where one is.
    pub file: Option<String>,
    /// Where in the file.
    pub offset: Option<u64>,
    /// What is wrong, with expected and actual checksums where there are any.
    pub what: String,
    /// Whether data differs from its checksum, which says nothing against the structure.
    #[serde(skip)]
    pub is_checksum: bool,
}

/// What was checked and what was found.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct VerifyReport {
    /// The address.
    pub path: String,
    /// How the checkpoint is stored; `None` when it could not be opened.
    pub format: Option<Format>,
    /// Who wrote it, as far as can be told.
    pub writer: String,
    /// Keys.
    pub keys: u64,
    /// Stored chunks and values.
    pub records: u64,
    /// Data files.
    pub files: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// Records whose content was compared with a checksum.
    pub checked: u64,
    /// Records that carry no checksum.
    pub unchecked: u64,
    /// Data files whose own index was compared with `.metadata`, record by record.
    pub indexes: u64,
    /// Values that were decoded; what only its own library can read is not.
    pub values: u64,
    /// Values that were not decoded, as only their own libraries can read them: how many of each class.
    pub opaque: BTreeMap<String, u64>,
    /// Whether data was read; else structure, lengths and indexes alone were checked.
    pub data: bool,
    /// How long it took.
    pub seconds: f64,
    /// Everything found; errors first, then by file and offset.
    pub findings: Vec<Finding>,
}

impl VerifyReport {
    /// Whether nothing is damaged or missing. Warnings do not count.
    pub fn is_sound(&self) -> bool {
        self.findings.iter().all(|f| f.severity != Severity::Error)
    }

    /// The number of errors.
    pub fn errors(&self) -> usize {
        self.findings.iter().filter(|f| f.severity == Severity::Error).count()
    }

    /// What was found in a checkpoint beside this one; its files are named with its path.
    fn add(&mut self, other: &Checkpoint, found: VerifyReport) {
        self.records += found.records;
        self.files += found.files;
        self.bytes += found.bytes;
        self.checked += found.checked;
        self.unchecked += found.unchecked;
        self.indexes += found.indexes;
        self.values += found.values;
        self.seconds += found.seconds;
        found.opaque.into_iter().for_each(|(class, count)| *self.opaque.entry(class).or_default() += count);
        let placed = |finding: Finding| Finding {
            file: Some(finding.file.map_or(other.path().to_owned(), |file| format!("{}/{file}", other.path()))),
            ..finding
        };
        self.findings.extend(found.findings.into_iter().map(placed));
    }
}

/// Findings and counts, gathered by many threads.
#[derive(Debug, Default)]
pub(crate) struct Gathered {
    findings: Vec<Finding>,
    bytes: u64,
    checked: u64,
    unchecked: u64,
    indexes: u64,
    values: u64,
    opaque: BTreeMap<String, u64>,
}

impl Gathered {
    fn join(mut self, other: Gathered) -> Gathered {
        self.findings.extend(other.findings);
        self.bytes += other.bytes;
        self.checked += other.checked;
        self.unchecked += other.unchecked;
        self.indexes += other.indexes;
        self.values += other.values;
        other.opaque.into_iter().for_each(|(class, count)| *self.opaque.entry(class).or_default() += count);
        self
    }

    fn error(&mut self, key: Option<&str>, file: &str, offset: Option<u64>, what: impl Into<String>) {
        self.push(Severity::Error, key, Some(file), offset, what);
    }

    fn warning(&mut self, key: Option<&str>, file: &str, offset: Option<u64>, what: impl Into<String>) {
        self.push(Severity::Warning, key, Some(file), offset, what);
    }

    fn push(&mut self, severity: Severity, key: Option<&str>, file: Option<&str>, offset: Option<u64>, what: impl Into<String>) {
        let (key, file) = (key.map(str::to_owned), file.map(str::to_owned));
        self.findings.push(Finding { severity, key, file, offset, what: what.into(), is_checksum: false });
    }

    /// Data that differs from its checksum.
    fn wrong_checksum(&mut self, key: Option<&str>, file: &str, offset: u64, what: String) {
        let (key, file, offset) = (key.map(str::to_owned), Some(file.to_owned()), Some(offset));
        self.findings.push(Finding { severity: Severity::Error, key, file, offset, what, is_checksum: true });
    }
}

/// A record that the catalog names.
#[derive(Debug, Clone)]
pub(crate) struct Named<'c> {
    key: &'c str,
    offset: u64,
    length: u64,
    /// Element type and shape of the stored chunk; `None` for a value.
    tensor: Option<(reshard_formats::DType, bool, &'c [u64])>,
    /// What the catalog says of the key.
    entry: &'c CatalogEntry,
    /// The tensor and which part of it; `None` for a value.
    chunk: Option<(&'c CatalogTensor, &'c reshard_layout::Region)>,
    /// The stream transforms that it went through.
    transform: Option<&'c str>,
}

/// The records that the catalog names, by file.
pub(crate) type NamedByFile<'c> = BTreeMap<u32, Vec<Named<'c>>>;

/// Verifies an opened checkpoint.
pub fn verify(checkpoint: &Checkpoint, options: &VerifyOptions) -> Result<VerifyReport> {
    let span = tracing::info_span!("verify", path = checkpoint.path());
    let _entered = span.enter();
    let start = Instant::now();
    let catalog = checkpoint.catalog();
    let mut gathered = Gathered::default();
    // What a view shows is as sound as what it is made from, all of which is verified.
    if let Some(base) = checkpoint.base() {
        structure::coverage(checkpoint, &mut gathered)?;
        let mut report = verify(base, options)?;
        for other in checkpoint.others() {
            report.add(other, verify(other, options)?);
        }
        report.keys = catalog.entries.len() as u64;
        report.findings.extend(gathered.findings);
        return Ok(report);
    }
    let named = structure::named_records(checkpoint);
    packed::unknown(checkpoint, &mut gathered);
    structure::coverage(checkpoint, &mut gathered)?;
    let sizes = structure::files(checkpoint, &named, &mut gathered)?;
    twice::flaws(checkpoint, &mut gathered);
    let mut indexes = twice::Indexes::new();
    if catalog.format.is_dcp() {
        let is_records = |file: &u32| file_kind(checkpoint, *file) == FileKind::Records;
        let there: Vec<u32> = sizes.keys().copied().filter(is_records).collect();
        indexes = twice::indexes(checkpoint, &there, &mut gathered)?;
        twice::compare(checkpoint, &named, &indexes, &mut gathered)?;
    }
    if options.data {
        options.control.expect(sizes.values().sum());
        let of_kind = |kind| sizes.iter().filter(move |(file, _)| file_kind(checkpoint, **file) == kind).map(|(f, s)| (*f, *s));
        let records: BTreeMap<u32, u64> = of_kind(FileKind::Records).collect();
        let mut found = Gathered::default();
        if !records.is_empty() {
            found = verify_folder(checkpoint, &named, &records, &indexes, options)?;
        }
        for (file, _) in of_kind(FileKind::Torch) {
            found = found.join(foreign::torch_file(checkpoint, file, options)?);
        }
        let files: Vec<u32> = of_kind(FileKind::Safetensors).map(|(file, _)| file).collect();
        if !files.is_empty() {
            found = found.join(structure::safetensors(checkpoint, &files, options)?);
        }
        found = found.join(packed::check(checkpoint, options)?);
        gathered = values::check(checkpoint, options, gathered.join(found))?;
        structure::all_read(checkpoint, &named, &mut gathered);
    }
    let records = catalog.entries.values().map(|entry| match &entry.kind {
        CatalogKind::Tensor(tensor) => tensor.chunks.len() as u64,
        CatalogKind::Value(_) => 1,
    });
    gathered.findings.sort_by(|a, b| (a.severity, &a.file, a.offset, &a.key).cmp(&(b.severity, &b.file, b.offset, &b.key)));
    gathered.findings.dedup();
    Ok(VerifyReport {
        path: checkpoint.path().to_owned(),
        format: Some(catalog.format),
        writer: catalog.writer.clone(),
        keys: catalog.entries.len() as u64,
        records: records.sum(),
        files: catalog.files.len() as u64,
        bytes: gathered.bytes,
        checked: gathered.checked,
        unchecked: gathered.unchecked,
        indexes: gathered.indexes,
        values: gathered.values,
        opaque: gathered.opaque,
        data: options.data,
        seconds: start.elapsed().as_secs_f64(),
        findings: gathered.findings,
    })
}

/// What a data file is made of, and so what can be proven of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    /// Torch records, each named by the metadata.
    Records,
    /// One `torch.save` archive.
    Torch,
    /// Safetensors.
    Safetensors,
}

pub(crate) fn file_kind(checkpoint: &Checkpoint, file: u32) -> FileKind {
    let name = checkpoint.file_name(file);
    match checkpoint.catalog().format {
        Format::Dcp => FileKind::Records,
        Format::Torch => FileKind::Torch,
        Format::Lightning if name != META_FILE => FileKind::Records,
        _ if name.ends_with(".safetensors") => FileKind::Safetensors,
        _ if name.ends_with(DATA_SUFFIX) => FileKind::Records,
        _ => FileKind::Torch,
    }
}

/// Opens what lies in a store and verifies it. What keeps it from being opened (damaged metadata, missing files) is a
/// finding; only a path that holds no checkpoint, or cannot be reached, is an error.
pub fn verify_store(store: Arc<dyn Store>, options: &VerifyOptions) -> Result<VerifyReport> {
    let path = store.describe();
    opened(&path, Checkpoint::open_store_to_verify(store), options)
}

/// [`verify_store`] for an address.
pub fn verify_path(path: &str, open: &OpenOptions, options: &VerifyOptions) -> Result<VerifyReport> {
    // An address that makes no sense is the caller's mistake and no finding.
    Address::parse(path).doing(|| format!("opening {path}"))?;
    opened(path, Checkpoint::open_to_verify(path, open), options)
}

fn opened(path: &str, checkpoint: Result<Checkpoint>, options: &VerifyOptions) -> Result<VerifyReport> {
    let start = Instant::now();
    let error = match checkpoint {
        Ok(checkpoint) => return verify(&checkpoint, options),
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Incomplete) => error,
        Err(error) => return Err(error),
    };
    let finding = Finding {
        severity: Severity::Error,
        key: error.keys().into_iter().next(),
        file: error.files().into_iter().next(),
        offset: match &error {
            Error::Corrupt { offset, .. } => Some(*offset),
            _ => None,
        },
        what: error.full_text(),
        is_checksum: false,
    };
    Ok(VerifyReport {
        path: path.to_owned(),
        format: None,
        writer: String::new(),
        keys: 0,
        records: 0,
        files: 0,
        bytes: 0,
        checked: 0,
        unchecked: 0,
        indexes: 0,
        values: 0,
        opaque: BTreeMap::new(),
        data: false,
        seconds: start.elapsed().as_secs_f64(),
        findings: vec![finding],
    })
}

/// Verifies the data files of a DCP folder.
fn verify_folder(
    checkpoint: &Checkpoint,
    named: &NamedByFile<'_>,
    sizes: &BTreeMap<u32, u64>,
    indexes: &twice::Indexes,
    options: &VerifyOptions,
) -> Result<Gathered> {
    let empty = Vec::new();
    let mut gathered = Gathered::default();
    let mut jobs = Vec::new();
    let mut foreign = Vec::new();
    for (&file, &size) in sizes {
        options.control.check("verifying")?;
        let named = named.get(&file).unwrap_or(&empty);
        match own::plan(checkpoint, file, indexes.get(&file), named, &mut gathered)? {
            Some(batches) => jobs.extend(batches),
            None => {
                foreign::slack(checkpoint.file_name(file), size, named, &mut gathered);
                foreign.extend(foreign::batches(file, named));
            }
        }
    }
    let work = || -> Result<Gathered> {
        use rayon::prelude::*;
        let own = jobs
            .par_iter()
            .with_max_len(1)
            .map(|job| own::check(checkpoint, job, options))
            .try_reduce(Gathered::default, |a, b| Ok(a.join(b)))?;
        let others = foreign::check_all(checkpoint, &foreign, options)?;
        Ok(own.join(others))
    };
    Ok(gathered.join(Workers::reading(checkpoint.store.as_ref()).run(work)??))
}

/// Reads a stretch of a file; a failure is a finding, except that there is nothing to go on with.
fn read(reader: &Arc<dyn Reader>, offset: u64, buf: &mut [u8]) -> std::result::Result<(), String> {
    reader.read_at(offset, buf).map_err(|error: StorageError| {
        let text = Error::Storage { doing: format!("reading {}", reader.path()), source: error };
        text.full_text()
    })
}
