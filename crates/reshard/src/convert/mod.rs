//! From any format to any other: DCP, safetensors, `torch.save`; streaming, in bounded memory, all or nothing.
//!
//! ```
//! # let (path, to) = ("../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint", "memory://doc-convert");
//! use reshard::convert::{ConvertOptions, Destination, Target, convert};
//!
//! let source = reshard::Checkpoint::open(path)?;
//! let target = Target::Safetensors { max_shard_size: None };
//! let to = Destination::parse(to, target, &Default::default())?;
//! let report = convert(&source, &to, target, &ConvertOptions::default())?;
//! println!("{} tensors, {} bytes", report.tensors, report.bytes);
//! # Ok::<(), reshard::Error>(())
//! ```

pub(crate) mod dcp;
mod megatron;
pub(crate) mod output;
mod packed;
mod publish;
mod safetensors;
mod scaled;
mod target;
mod torch;
mod torch_files;
mod training;
mod unfinished;
mod universal;

use std::sync::Arc;
use std::time::Instant;

use indexmap::IndexMap;
use rayon::prelude::*;
use reshard_formats::safetensors::INDEX_FILE;
use reshard_formats::{DType, Value};
use reshard_layout::Region;
use reshard_storage::{Address, Store, StoreOptions};
use serde::Serialize;

use self::megatron::write_megatron;
use self::output::{OutputOptions, Plan, PlanTensor, PlanValue};
use self::safetensors::SafetensorsTarget;
use self::scaled::{Role, roles};
use self::target::HUB_SHARD_SIZE;
pub use self::target::Target;
use self::training::Training;
use self::universal::write_universal;
use crate::cast::can_cast;
use crate::checkpoint::{CatalogKind, CatalogTensor, Checkpoint, Format, LoadedValue, ValueLocation};
use crate::control::Control;
use crate::error::{Error, Result, StorageContext};
use crate::layout_names::{METADATA_FILE, is_safetensors, is_torch};
use crate::load::Cast;
use crate::mesh::{Layout, RankPiece};
use crate::mismatch::is_narrowing;
use crate::packed::Compression;
use crate::select::{CastRules, Part, Selection};
use crate::stream::{CastStream, TensorStream, check_covered, check_cut_chunks, check_seen_records};
use crate::workers::Workers;

/// Where to write: a folder, or one file of it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Destination {
    /// The folder.
    pub store: Arc<dyn Store>,
    /// The file, where the output is one.
    pub file: Option<String>,
    /// How to open folders below it, where it came from an address.
    address: Option<(Address, StoreOptions)>,
}

impl Destination {
    /// A folder.
    pub fn folder(store: Arc<dyn Store>) -> Destination {
        Destination { store, file: None, address: None }
    }

    /// One file of a folder.
    pub fn file(store: Arc<dyn Store>, name: &str) -> Destination {
        Destination { store, file: Some(name.to_owned()), address: None }
    }

    /// What an address means for a target: `…/x.safetensors` and `…/x.pt` are files, all else folders.
    pub fn parse(path: &str, target: Target, options: &StoreOptions) -> Result<Destination> {
        let address = Address::parse(path).doing(|| format!("opening {path}"))?;
        let name = address.file_name().unwrap_or_default();
        let is_file = match target {
            Target::Dcp { .. } | Target::HuggingFace { .. } | Target::Universal | Target::Megatron { .. } => false,
            Target::Safetensors { .. } => name.ends_with(".safetensors"),
            Target::Torch => [".pt", ".pth", ".bin", ".ckpt"].iter().any(|suffix| name.ends_with(suffix)),
        };
        match address.parent().filter(|_| is_file) {
            Some(parent) => {
                let store = reshard_storage::open(&parent, options).doing(|| format!("opening {path}"))?;
                Ok(Destination::file(store, &name))
            }
            None => {
                let store = reshard_storage::open(&address, options).doing(|| format!("opening {path}"))?;
                Ok(Destination { store, file: None, address: Some((address, options.clone())) })
            }
        }
    }

    /// A folder below this one.
    fn below(&self, name: &str) -> Result<Arc<dyn Store>> {
        let doing = || format!("opening {name} below {}", self.describe());
        let from_address = self.address.as_ref().map(|(address, options)| {
            address.join(name).and_then(|address| reshard_storage::open(&address, options)).doing(doing)
        });
        let from_root = || {
            let root = self.store.local_root()?.join(name);
            let address = Address::parse(root.to_str()?);
            Some(address.and_then(|address| reshard_storage::open(&address, &StoreOptions::default())).doing(doing))
        };
        from_address.or_else(from_root).unwrap_or_else(|| {
            Err(Error::invalid("a folder of Megatron is written to an address: make the destination with Destination::parse"))
        })
    }

    /// Refuses a path that holds a checkpoint, of whatever format: two in one folder make it a riddle which one is meant, and
    /// loaders answer it in different ways.
    pub(crate) fn check_free(&self, target: Target) -> Result<()> {
        let taken = match (&self.file, target) {
            (None, _) => Checkpoint::open_store(self.store.clone()).is_ok().then(|| self.describe()),
            // A file beside the index of another model; whether the file itself is there is for its writer to see.
            (Some(_), Target::Safetensors { .. } | Target::HuggingFace { .. }) => {
                let index = self.store.exists(INDEX_FILE).doing(|| format!("looking for {INDEX_FILE}"))?;
                index.then(|| format!("{}/{INDEX_FILE}", self.store.describe()))
            }
            (Some(_), _) => None,
        };
        match taken {
            Some(path) => Err(Error::AlreadyExists { path }),
            None => Ok(()),
        }
    }

    /// Refuses to overwrite a folder in which something would be found in place of what is written: a success after which the old
    /// is still seen would be none.
    fn check_seen(&self, target: Target) -> Result<()> {
        if self.file.is_some() || matches!(target, Target::Dcp { .. }) {
            return Ok(());
        }
        let listed = self.store.list("").doing(|| format!("looking into {}", self.describe()))?;
        let hides = |name: &str| match target {
            _ if name.contains('/') => false,
            _ if name == METADATA_FILE => true,
            Target::Torch => is_safetensors(name) || (is_torch(name) && name != torch::TORCH_FILE),
            _ => false,
        };
        match listed.iter().find(|file| hides(&file.path)) {
            None => Ok(()),
            Some(file) => Err(Error::invalid(format!(
                "{} holds {}, which would be found in place of what is written; choose another path, or remove it first",
                self.describe(),
                file.path
            ))),
        }
    }

    /// The address, for messages.
    pub fn describe(&self) -> String {
        match &self.file {
            Some(file) => format!("{}/{file}", self.store.describe()),
            None => self.store.describe(),
        }
    }
}

/// How to convert.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ConvertOptions {
    /// Which keys, and under which names.
    pub selection: Selection,
    /// Casts, by pattern of the new names.
    pub casts: CastRules,
    /// Replace what is there. The old stays until the new is complete.
    pub overwrite: bool,
    /// Compare the source's checksums on the way.
    pub verify: bool,
    /// Wait until everything is on the disk.
    pub sync: bool,
    /// Compress the records of a DCP folder's tensors.
    pub compression: Option<Compression>,
    /// Leave out objects that only unpickling could bring back, where the target cannot carry them; else they are an error.
    pub skip_opaque: bool,
    /// To watch and to cancel.
    pub control: Control,
}

impl Default for ConvertOptions {
    fn default() -> ConvertOptions {
        ConvertOptions {
            selection: Selection::default(),
            casts: CastRules::default(),
            overwrite: false,
            verify: true,
            sync: true,
            compression: None,
            skip_opaque: false,
            control: Control::new(),
        }
    }
}

/// What a conversion did.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct ConvertReport {
    /// The source.
    pub from: String,
    /// The destination.
    pub to: String,
    /// The destination's format.
    pub format: Format,
    /// Tensors written.
    pub tensors: u64,
    /// Values written.
    pub values: u64,
    /// Bytes of tensor data written.
    pub bytes: u64,
    /// The files, relative to the destination's folder.
    pub files: Vec<String>,
    /// Casts made.
    pub casts: Vec<Cast>,
    /// Keys left out because the target cannot carry them.
    pub skipped: Vec<String>,
    /// Leftovers that could not be removed, and the like.
    pub warnings: Vec<String>,
    /// How long it took.
    pub seconds: f64,
}

/// What was written.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) files: Vec<String>,
    pub(crate) bytes: u64,
    pub(crate) warnings: Vec<String>,
}

/// Converts a checkpoint. When it fails, wherever, the destination is as it was.
pub fn convert(
    source: &Checkpoint,
    destination: &Destination,
    target: Target,
    options: &ConvertOptions,
) -> Result<ConvertReport> {
    let span = tracing::info_span!("convert", from = source.path(), to = destination.describe());
    let _entered = span.enter();
    let start = Instant::now();
    let (target, options) = as_hub(target, options);
    let (target, options) = (target, &options);
    let planned = plan_of(source, options, target.format())?;
    if options.compression.is_some() && !matches!(target, Target::Dcp { .. }) {
        return Err(Error::invalid(format!("records of DCP are compressed, not {}", target.format().name())));
    }
    let output = OutputOptions::new(options.sync, &options.control, &[source]).compressed(options.compression);
    if matches!(target, Target::Universal | Target::Megatron { .. }) {
        return for_trainer(source, destination, target, options, planned, &output, start);
    }
    let written = write_plan(&planned.plan, &[source], destination, target, options, &output)?;
    Ok(planned.report(source, destination.describe(), target.format(), written, start))
}

/// What a hub has is a model alone, in files of a size.
fn as_hub(target: Target, options: &ConvertOptions) -> (Target, ConvertOptions) {
    let mut options = options.clone();
    let Target::HuggingFace { max_shard_size } = target else { return (target, options) };
    options.selection.part = Part::Model;
    (Target::Safetensors { max_shard_size: Some(max_shard_size.unwrap_or(HUB_SHARD_SIZE)) }, options)
}

/// Writes what a trainer resumes from.
fn for_trainer(
    source: &Checkpoint,
    destination: &Destination,
    target: Target,
    options: &ConvertOptions,
    planned: Planned<'_>,
    output: &OutputOptions,
    start: Instant,
) -> Result<ConvertReport> {
    match options.overwrite {
        true => destination.check_seen(target)?,
        false => destination.check_free(target)?,
    }
    verify_seen(&planned.plan, &[source], options)?;
    let training = Training::of(&planned.plan, source, &options.selection)?;
    let (tensors, values) = (planned.plan.tensors.len() as u64, planned.plan.values.len() as u64);
    let Planned { plan, casts, skipped } = planned;
    let written = match target {
        Target::Megatron { ranks } => write_megatron(plan, &training, source, ranks, options.overwrite, destination, output)?,
        _ => write_universal(plan, &training, source, options.overwrite, destination, output)?,
    };
    let (from, to, format) = (source.path().to_owned(), destination.describe(), target.format());
    let Written { files, bytes, warnings } = written;
    let seconds = start.elapsed().as_secs_f64();
    Ok(ConvertReport { from, to, format, tensors, values, bytes, files, casts, skipped, warnings, seconds })
}

/// Writes a plan as the target asks.
pub(crate) fn write_plan(
    plan: &Plan<'_>,
    sources: &[&Checkpoint],
    destination: &Destination,
    target: Target,
    options: &ConvertOptions,
    output: &OutputOptions,
) -> Result<Written> {
    let store = &destination.store;
    let overwrite = options.overwrite;
    match overwrite {
        true => destination.check_seen(target)?,
        false => destination.check_free(target)?,
    }
    verify_seen(plan, sources, options)?;
    match target {
        Target::Dcp { ranks } => {
            if let Some(file) = &destination.file {
                return Err(Error::invalid(format!("a DCP checkpoint is a folder, not the file {file:?}")));
            }
            let pieces = plan.pieces(&Layout::rows(ranks.max(1) as u64)?)?;
            verify_cut(plan, sources, &pieces, options)?;
            dcp::write_dcp(plan, &pieces, ranks.max(1), overwrite, store, output)
        }
        Target::Safetensors { max_shard_size } => {
            let none = IndexMap::new();
            let notes = sources.first().map_or(&none, |source| &source.catalog().notes);
            let target = SafetensorsTarget { file: destination.file.as_deref(), max_shard_size, overwrite, notes };
            safetensors::write_safetensors(plan, &target, store.as_ref(), output)
        }
        Target::Torch => torch::write_torch(plan, destination.file.as_deref(), overwrite, store.as_ref(), output),
        Target::HuggingFace { .. } | Target::Universal | Target::Megatron { .. } => {
            Err(Error::unsupported("several checkpoints are merged to DCP, safetensors or a torch.save file; convert that"))
        }
    }
}

/// Compares the checksums of chunks that are cut by the new layout: no stream sees one of these whole.
pub(crate) fn verify_cut(plan: &Plan<'_>, sources: &[&Checkpoint], pieces: &[RankPiece], options: &ConvertOptions) -> Result<()> {
    if !options.verify {
        return Ok(());
    }
    let mut regions: Vec<Vec<&Region>> = vec![Vec::new(); plan.tensors.len()];
    pieces.iter().for_each(|piece| regions[piece.tensor].push(&piece.region));
    Workers::reading_any(sources.iter().map(|source| source.store.as_ref())).run(|| {
        plan.tensors.par_iter().zip(&regions).with_max_len(16).try_for_each(|(tensor, regions)| {
            sources.iter().try_for_each(|source| check_cut_chunks(source, &tensor.stored, regions, &options.control))
        })
    })?
}

/// Compares the checksums of records that views show in parts.
pub(crate) fn verify_seen(plan: &Plan<'_>, sources: &[&Checkpoint], options: &ConvertOptions) -> Result<()> {
    if !options.verify {
        return Ok(());
    }
    let keys: Vec<&str> = plan.tensors.iter().map(|tensor| tensor.stored.as_str()).collect();
    sources.iter().try_for_each(|source| check_seen_records(source, &keys, &options.control))
}

/// A plan to write a checkpoint's selected keys.
pub(crate) struct Planned<'p> {
    pub(crate) plan: Plan<'p>,
    casts: Vec<Cast>,
    pub(crate) skipped: Vec<String>,
}

impl Planned<'_> {
    pub(crate) fn report(
        self,
        source: &Checkpoint,
        to: String,
        format: Format,
        written: Written,
        start: Instant,
    ) -> ConvertReport {
        ConvertReport {
            from: source.path().to_owned(),
            to,
            format,
            tensors: self.plan.tensors.len() as u64,
            values: self.plan.values.len() as u64,
            bytes: written.bytes,
            files: written.files,
            casts: self.casts,
            skipped: self.skipped,
            warnings: written.warnings,
            seconds: start.elapsed().as_secs_f64(),
        }
    }
}

/// Plans to write the selected keys of a checkpoint in a format.
pub(crate) fn plan_of<'p>(source: &'p Checkpoint, options: &ConvertOptions, format: Format) -> Result<Planned<'p>> {
    let mut tensors = Vec::new();
    let mut values = Vec::new();
    let mut casts = Vec::new();
    let mut skipped = Vec::new();
    let mut streams: Vec<(&'p str, &'p CatalogTensor, DType)> = Vec::new();
    let mut items = options.selection.to_write(source)?;
    let roles = roles(source, options, &mut items)?;
    for (item, role) in items.into_iter().zip(roles) {
        match &item.entry.kind {
            CatalogKind::Tensor(stored) => {
                let tensor = match role {
                    Role::Gone => continue,
                    Role::Weight(weight) => weight,
                    Role::Plain | Role::Kept => stored,
                };
                check_covered(source, item.stored, tensor)?;
                let to = match role {
                    Role::Kept => tensor.dtype,
                    _ => options.casts.wanted(&item.key, tensor.dtype),
                };
                if stored.dtype != to {
                    let weight = matches!(role, Role::Weight(_));
                    let from = if weight { format!("{}, scaled", stored.dtype.name()) } else { stored.dtype.name().to_owned() };
                    if !can_cast(tensor.dtype, to) {
                        return Err(Error::unsupported(format!("{:?}: no cast from {from} to {}", item.key, to.name())));
                    }
                    let narrowing = !weight && is_narrowing(tensor.dtype, to);
                    casts.push(Cast { key: item.key.clone(), from, to: to.name().to_owned(), narrowing });
                }
                streams.push((item.stored, tensor, to));
                tensors.push(PlanTensor {
                    stored: item.stored.to_owned(),
                    key: item.key,
                    path: item.path,
                    dtype: to,
                    shape: tensor.shape.clone(),
                    requires_grad: tensor.requires_grad,
                });
            }
            CatalogKind::Value(location) => {
                let value = source.read_value(item.stored)?;
                if let LoadedValue::Opaque { class, .. } = &value {
                    let carried = format == Format::Dcp && !matches!(location, ValueLocation::Opaque { .. });
                    if !carried && !options.skip_opaque {
                        return Err(Error::Untrusted {
                            path: source.path().to_owned(),
                            key: item.stored.to_owned(),
                            class: class.clone(),
                        });
                    }
                    if !carried {
                        skipped.push(item.stored.to_owned());
                        continue;
                    }
                }
                values.push(PlanValue { key: item.key, path: item.path, value });
            }
        }
    }
    let verify = options.verify;
    let open: output::OpenStream<'p> = Box::new(move |i, region| {
        let (key, tensor, to) = streams[i];
        let stream = TensorStream::of(source, key, tensor, region.clone(), verify)?;
        Ok(if tensor.dtype == to { Box::new(stream) } else { Box::new(CastStream::new(stream, tensor.dtype, to)?) })
    });
    Ok(Planned { plan: Plan { tensors, values, open }, casts, skipped })
}

/// The plain values of a plan.
fn keep_values(plan: &Plan<'_>) -> Result<IndexMap<String, Value>> {
    plan.values
        .iter()
        .map(|value| match &value.value {
            LoadedValue::Plain(plain) => Ok((value.key.clone(), plain.clone())),
            LoadedValue::Opaque { class, .. } => Err(opaque(&value.key, class)),
        })
        .collect()
}

/// A value that the target cannot carry.
pub(crate) fn opaque(key: &str, class: &str) -> Error {
    Error::Untrusted { path: "the source".to_owned(), key: key.to_owned(), class: class.to_owned() }
}
