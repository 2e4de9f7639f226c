//! `storage_data`: which record holds which chunk.
//!
//! A storage info is filed under its key and the chunk's offsets. It also gives the chunk's number as a hint, which
//! is right in practice and makes finding the chunk one comparison; where it is wrong, offsets are looked up.

use std::collections::HashMap;
use std::sync::Arc;

use reshard_layout::{Dims, Region};

use super::decode::{Classes, strings};
use super::entries::{Names, Odd, SIZES, dims_of, read_dims};
use super::error::MetadataError;
use super::fields::{Fields, NodeCache, required, state_of, wrong_type};
use super::proof::path_problem;
use super::types::{Chunk, EntryKind, ExtraFields, FileId, Metadata, StorageInfo, Transforms, Unreferenced};
use crate::pickle::{Document, Node, View};

type Result<T> = std::result::Result<T, MetadataError>;

/// Fills in where every entry of `metadata` is stored; an error if that is not known for one of them.
pub(super) fn read_storage(
    document: &Document<'_>,
    classes: &Classes,
    node: Node,
    names: &Names<'_>,
    odd: &Odd,
    metadata: &mut Metadata,
) -> Result<()> {
    let place = || "`storage_data`".to_owned();
    let pairs = match document.view(node) {
        // A planner's metadata that no storage has filled in: every chunk is then missing.
        View::None => &[],
        View::Dict(pairs) => pairs,
        _ => return Err(wrong_type(document, node, place, "a dict")),
    };
    let mut reader = StorageReader {
        document,
        names,
        names_cache: NodeCache::new(),
        files: Vec::new(),
        file_ids: Names::default(),
        files_cache: NodeCache::new(),
        info_fields: Fields::new(["relative_path", "offset", "length", "transform_descriptors"]),
        last_transforms: None,
    };
    let mut index_fields = Fields::new(["fqn", "index", "offset"]);
    let mut targets: Vec<Target<'_>> = metadata.entries.values_mut().map(|entry| Target::of(&mut entry.kind)).collect();
    let mut finder = ChunkFinder::default();

    for [index, info] in pairs {
        let place = || "key of `storage_data`".to_owned();
        let state = state_of(document, *index, classes.index);
        let state = state.ok_or_else(|| wrong_type(document, *index, place, "an instance of `MetadataIndex`"))?;
        let mut index_extra = ExtraFields::new();
        let [fqn, hint, offset] = index_fields.read(document, state, place, &mut index_extra)?;
        let fqn = required(fqn, place, "fqn")?;
        let number = reader.entry_number(fqn)?;
        let Some(info_state) = state_of(document, *info, classes.storage_info) else {
            let place = || format!("`{}`, storage info", key_text(document, fqn));
            return Err(wrong_type(document, *info, place, "an instance of `_StorageInfo`"));
        };
        let storage = reader.info(fqn, info_state, index_extra)?;
        // Torch leaves the field out for values.
        let offset = Some(offset).filter(|o| *o != Node::ABSENT && !matches!(document.view(*o), View::None));
        let target = number.and_then(|number| Some((number, targets.get_mut(number as usize)?)));
        let slot = match (target, offset) {
            (Some((_, Target::Bytes(slot))), None) => Some(&mut **slot),
            (Some((number, Target::Bytes(slot))), Some(_)) if odd.contains(&number) => Some(&mut **slot),
            (Some((number, Target::Tensor { chunks, filled })), Some(offset)) => {
                let hint = document.as_i64(hint).and_then(|hint| usize::try_from(hint).ok());
                finder.find(document, number, chunks, hint, offset).map(|chunk| {
                    *filled += usize::from(chunks[chunk].storage.file == FileId::UNSET);
                    &mut chunks[chunk].storage
                })
            }
            _ => None,
        };
        match slot {
            Some(slot) if slot.file == FileId::UNSET => *slot = storage,
            Some(_) => {
                let what = what_text(document, offset);
                return Err(MetadataError::DuplicateStorage { key: key_text(document, fqn), what });
            }
            None => {
                let key = key_text(document, fqn);
                let mut offsets = offset.map(|_| Dims::new());
                if let (Some(offset), Some(dims)) = (offset, &mut offsets)
                    && !read_dims(document, offset, dims)
                {
                    let place = || format!("`{key}`, offset of a storage info");
                    return Err(wrong_type(document, offset, place, SIZES));
                }
                metadata.unreferenced.push(Unreferenced { key, offsets, storage });
            }
        }
    }
    let incomplete: Vec<usize> = targets.iter().enumerate().filter(|(_, target)| !target.is_complete()).map(|(i, _)| i).collect();
    metadata.files = reader.files;
    incomplete.into_iter().try_for_each(|number| fill_twins(metadata, number))
}

/// What still needs a storage info.
enum Target<'e> {
    Tensor { chunks: &'e mut [Chunk], filled: usize },
    Bytes(&'e mut StorageInfo),
}

impl Target<'_> {
    fn of(kind: &mut EntryKind) -> Target<'_> {
        match kind {
            EntryKind::Tensor(tensor) => Target::Tensor { chunks: &mut tensor.chunks, filled: 0 },
            EntryKind::Bytes(storage) => Target::Bytes(storage),
        }
    }

    fn is_complete(&self) -> bool {
        match self {
            Target::Tensor { chunks, filled } => *filled == chunks.len(),
            Target::Bytes(storage) => storage.file != FileId::UNSET,
        }
    }
}

/// Chunks at the same offsets share a storage info, because it is filed under offsets alone: where a dimension
/// is shorter than the number of ranks, several ranks have an empty chunk at its end. Only chunks of the same size do.
fn fill_twins(metadata: &mut Metadata, number: usize) -> Result<()> {
    let Some((key, entry)) = metadata.entries.get_index_mut(number) else {
        return Ok(());
    };
    let EntryKind::Tensor(tensor) = &mut entry.kind else {
        return Err(MetadataError::NoStorage { key: key.clone(), what: "value".into() });
    };
    let mut known: HashMap<Region, StorageInfo> = HashMap::new();
    for chunk in &tensor.chunks {
        if chunk.storage.file != FileId::UNSET {
            known.insert(chunk.region.clone(), chunk.storage.clone());
        }
    }
    for chunk in &mut tensor.chunks {
        if chunk.storage.file == FileId::UNSET {
            let what = || format!("chunk at {:?}", chunk.region.offsets());
            let storage = known.get(&chunk.region);
            let missing = || MetadataError::NoStorage { key: key.clone(), what: what() };
            chunk.storage = storage.cloned().ok_or_else(missing)?;
        }
    }
    Ok(())
}

/// Finds chunks by their offsets where the hint fails.
#[derive(Default)]
struct ChunkFinder {
    by_offsets: HashMap<u32, HashMap<Dims, usize>>,
    dims: Dims,
}

impl ChunkFinder {
    #[inline]
    fn find(
        &mut self,
        document: &Document<'_>,
        number: u32,
        chunks: &[Chunk],
        hint: Option<usize>,
        offset: Node,
    ) -> Option<usize> {
        if let Some(hint) = hint
            && let Some(chunk) = chunks.get(hint)
            && let Some(dims) = dims_of(document, offset)
            && same_dims(document, dims, chunk.region.offsets())
        {
            return Some(hint);
        }
        self.search(document, number, chunks, offset)
    }

    #[cold]
    fn search(&mut self, document: &Document<'_>, number: u32, chunks: &[Chunk], offset: Node) -> Option<usize> {
        if !read_dims(document, offset, &mut self.dims) {
            return None;
        }
        let by_offsets = self.by_offsets.entry(number).or_insert_with(|| {
            let chunks = chunks.iter().enumerate().rev();
            chunks.map(|(i, chunk)| (Dims::from_slice(chunk.region.offsets()), i)).collect()
        });
        by_offsets.get(&self.dims).copied()
    }
}

#[inline]
fn same_dims(document: &Document<'_>, dims: &[Node], offsets: &[u64]) -> bool {
    let same = |node: &Node, offset: &u64| document.as_i64(*node).and_then(|v| u64::try_from(v).ok()) == Some(*offset);
    dims.len() == offsets.len() && dims.iter().zip(offsets).all(|(node, offset)| same(node, offset))
}

struct StorageReader<'d, 'a> {
    document: &'d Document<'a>,
    names: &'d Names<'d>,
    names_cache: NodeCache,
    files: Vec<String>,
    file_ids: Names<'d>,
    files_cache: NodeCache,
    info_fields: Fields<4>,
    /// The last list of transforms that was read: all chunks usually have the same.
    last_transforms: Option<(Node, Arc<Transforms>)>,
}

const NO_ENTRY: u32 = u32::MAX;

impl StorageReader<'_, '_> {
    /// The entry of a key, if there is one.
    #[inline]
    fn entry_number(&mut self, fqn: Node) -> Result<Option<u32>> {
        let number = match self.names_cache.get(fqn) {
            Some(number) => number,
            None => {
                if self.document.as_str(fqn).is_none() {
                    let place = || "key of `storage_data`, `fqn`".to_owned();
                    return Err(wrong_type(self.document, fqn, place, "a str"));
                }
                let number = self.names.get(self.document.raw(fqn)).copied().unwrap_or(NO_ENTRY);
                self.names_cache.put(fqn, number);
                number
            }
        };
        Ok(Some(number).filter(|number| *number != NO_ENTRY))
    }

    #[inline]
    fn info(&mut self, fqn: Node, state: &[[Node; 2]], index_extra: ExtraFields) -> Result<StorageInfo> {
        let document = self.document;
        let place = || format!("`{}`, storage info", key_text(document, fqn));
        let mut extra = ExtraFields::new();
        let [path, offset, length, transforms] = self.info_fields.read(document, state, place, &mut extra)?;
        let number = |node: Node, field: &'static str| {
            let number = document.as_u64(node);
            number.ok_or_else(|| match node == Node::ABSENT {
                true => MetadataError::MissingField { place: place(), field },
                false => {
                    let place = || format!("{}, `{field}`", place());
                    wrong_type(document, node, place, "an integer from 0 to 2^64 - 1")
                }
            })
        };
        let (offset, length) = (number(offset, "offset")?, number(length, "length")?);
        if offset.checked_add(length).is_none() {
            return Err(MetadataError::Range { key: key_text(document, fqn), offset, length });
        }
        let file = match self.files_cache.get(path) {
            Some(id) => FileId(id),
            None => self.file(fqn, path)?,
        };
        let transforms = match transforms == Node::ABSENT && extra.is_empty() && index_extra.is_empty() {
            true => None,
            false => self.transforms(fqn, transforms, extra, index_extra)?,
        };
        Ok(StorageInfo { file, offset, length, transforms })
    }

    fn file(&mut self, fqn: Node, node: Node) -> Result<FileId> {
        let document = self.document;
        // Chunks are many and files are few: most names were proven before.
        if document.is_str(node)
            && let Some(id) = self.file_ids.get(document.raw(node))
        {
            self.files_cache.put(node, *id);
            return Ok(FileId(*id));
        }
        let Some(path) = document.as_str(node) else {
            if node == Node::ABSENT {
                let place = format!("`{}`, storage info", key_text(document, fqn));
                return Err(MetadataError::MissingField { place, field: "relative_path" });
            }
            let place = || format!("`{}`, storage info, `relative_path`", key_text(document, fqn));
            return Err(wrong_type(document, node, place, "a str"));
        };
        if let Some(reason) = path_problem(path) {
            return Err(MetadataError::PathEscapes { key: key_text(document, fqn), path: path.into(), reason });
        }
        let limit = MetadataError::Limit { what: "files", limit: u64::from(u32::MAX) };
        let id = u32::try_from(self.files.len()).ok().filter(|id| *id != FileId::UNSET.0).ok_or(limit)?;
        self.files.push(path.to_owned());
        self.file_ids.insert(document.raw(node), id);
        self.files_cache.put(node, id);
        Ok(FileId(id))
    }

    #[cold]
    fn transforms(
        &mut self,
        fqn: Node,
        node: Node,
        extra: ExtraFields,
        index_extra: ExtraFields,
    ) -> Result<Option<Arc<Transforms>>> {
        let plain = extra.is_empty() && index_extra.is_empty();
        if let Some((known, transforms)) = &self.last_transforms
            && *known == node
            && plain
        {
            return Ok(Some(transforms.clone()));
        }
        let document = self.document;
        let descriptors = match (node == Node::ABSENT, document.view(node)) {
            (true, _) | (_, View::None) => None,
            _ => Some(strings(document, node).ok_or_else(|| {
                let place = || format!("`{}`, storage info, `transform_descriptors`", key_text(document, fqn));
                wrong_type(document, node, place, "a list of str")
            })?),
        };
        if descriptors.is_none() && plain {
            return Ok(None);
        }
        let transforms = Transforms { descriptors, extra, index_extra };
        // Without a repeated node, equal lists are still shared with the one before.
        let shared = match &self.last_transforms {
            Some((_, last)) if **last == transforms => last.clone(),
            _ => Arc::new(transforms),
        };
        if plain {
            self.last_transforms = Some((node, shared.clone()));
        }
        Ok(Some(shared))
    }
}

fn key_text(document: &Document<'_>, fqn: Node) -> String {
    document.as_str(fqn).unwrap_or("?").to_owned()
}

fn what_text(document: &Document<'_>, offset: Option<Node>) -> String {
    let mut dims = Dims::new();
    match offset {
        Some(offset) if read_dims(document, offset, &mut dims) => {
            format!("chunk at {:?}", dims.as_slice())
        }
        Some(_) => "chunk".into(),
        None => "value".into(),
    }
}
