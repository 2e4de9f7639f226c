//! Several checkpoints that are the parts of one: what accelerate and the Trainer put beside each other (model, optimizer,
//! scheduler, random states), under the names that `get_state_dict` gives them.

use indexmap::IndexMap;
use reshard_formats::own::{Sidecar, SidecarFile};
use reshard_formats::{KeyPath, PathSegment};
use reshard_state::{Dict, Key, Opaque, Tree};

use super::folder::Folder;
use super::tensors::{self, Parts};
use super::{dcp, safetensors};
use crate::checkpoint::{Catalog, CatalogEntry, Checkpoint, Format};
use crate::error::{Error, ErrorKind, Result};
use crate::layout_names::{METADATA_FILE, is_safetensors, is_torch};

/// A part, and what it is called in the whole.
struct Part {
    /// In the folder: a file, or a folder with `/` at its end.
    name: String,
    key: String,
}

/// A folder with a model and an optimizer beside each other, as accelerate and the Trainer write it.
pub(super) fn open_folder(folder: &Folder) -> Result<Option<Checkpoint>> {
    let files = folder.files()?;
    let top: Vec<&str> = folder.top()?.collect();
    let mut parts: Vec<Part> = Vec::new();
    let folders = files.iter().filter_map(|path| path.strip_suffix(METADATA_FILE)).filter(|path| path.matches('/').count() == 1);
    for below in folders {
        let name = below.trim_end_matches('/');
        let key = match (name.strip_prefix("pytorch_model_fsdp_"), name.strip_prefix("optimizer_")) {
            (Some(number), _) => numbered("model", number),
            (_, Some(number)) => numbered("optim", number),
            _ => None,
        };
        parts.extend(key.map(|key| Part { name: below.to_owned(), key }));
    }
    let whole_optimizer = top.iter().find(|name| matches!(**name, "optimizer.bin" | "optimizer.pt"));
    if parts.is_empty() && whole_optimizer.is_none() {
        return Ok(None);
    }
    let is_model = |name: &str| matches!(name, "pytorch_model.bin" | "pytorch_model_fsdp.bin");
    let has_model = parts.iter().any(|part| part.key == "model");
    if !has_model && top.iter().any(|name| is_safetensors(name)) {
        parts.push(Part { name: String::new(), key: "model".into() });
    } else if !has_model && let Some(name) = top.iter().find(|name| is_model(name)) {
        parts.push(Part { name: (*name).to_owned(), key: "model".into() });
    }
    if !parts.iter().any(|part| part.key == "model") {
        return Ok(None);
    }
    parts.extend(whole_optimizer.map(|name| Part { name: (*name).to_owned(), key: "optim".into() }));
    // What else lies there is small: schedulers, samplers, random states, arguments.
    for name in &top {
        let stem = name.rsplit_once('.').map_or(*name, |(stem, _)| stem);
        let pickled = is_torch(name) || name.ends_with(".pkl");
        if pickled && !is_model(name) && !stem.starts_with("optimizer") && !stem.contains("_rank") {
            parts.push(Part { name: (*name).to_owned(), key: stem.to_owned() });
        }
    }
    assemble(folder, parts).map(Some)
}

/// `model` for the first, `model_1` for the second.
fn numbered(part: &str, number: &str) -> Option<String> {
    let number: u32 = number.parse().ok()?;
    Some(if number == 0 { part.to_owned() } else { format!("{part}_{number}") })
}

fn assemble(folder: &Folder, parts: Vec<Part>) -> Result<Checkpoint> {
    let mut whole = Whole::default();
    for part in parts {
        if part.name.is_empty() {
            if let Some(checkpoint) = safetensors::open_folder(folder)? {
                whole.add(checkpoint.catalog, None, &part.key, &[]);
            }
        } else if part.name.ends_with('/') {
            let read = dcp::read(folder.store.as_ref(), &folder.path, &part.name, METADATA_FILE)?;
            // accelerate saves each below a word of its own.
            whole.add(read.catalog, read.side, &part.key, &["model", "optimizer", "optim"]);
        } else {
            let tree = read_or_opaque(folder, &part.name, &part.key, 0)?;
            let entries = tensors::entries(Tree::Dict(tree), &folder.path, &part.name)?;
            let catalog = Catalog::new(Format::Torch, vec![part.name], entries, "torch.save");
            whole.add(catalog, None, &part.key, &[]);
        }
    }
    let catalog = Catalog::new(Format::Accelerate, whole.files, whole.entries, "accelerate");
    let side = (!whole.side.is_empty()).then(|| {
        whole.side.sort_by(|a, b| a.file.cmp(&b.file));
        Sidecar { save_id: String::new(), ranks: whole.ranks, files: whole.side }
    });
    Ok(Checkpoint::new(folder.store.clone(), folder.path.clone(), catalog, side))
}

#[derive(Default)]
struct Whole {
    files: Vec<String>,
    entries: IndexMap<String, CatalogEntry>,
    side: Vec<SidecarFile>,
    ranks: u32,
}

impl Whole {
    /// Adds a part below `key`. A first word of its own that is one of `words` makes room for it.
    fn add(&mut self, catalog: Catalog, side: Option<Sidecar>, key: &str, words: &[&str]) {
        let first = self.files.len() as u32;
        self.files.extend(catalog.files);
        for (name, mut entry) in catalog.entries {
            entry.renumber(first);
            let (word, rest) = name.split_once('.').unwrap_or((name.as_str(), ""));
            let inner = if !rest.is_empty() && words.contains(&word) { rest } else { name.as_str() };
            let path: Option<KeyPath> = entry.path.take().map(|mut path| {
                let replaces = inner.len() < name.len() && matches!(path.first(), Some(PathSegment::Key(first)) if first == word);
                match path.first_mut().filter(|_| replaces) {
                    Some(first) => *first = PathSegment::Key(key.to_owned()),
                    None => path.insert(0, PathSegment::Key(key.to_owned())),
                }
                path
            });
            entry.path = path.or_else(|| Some(vec![PathSegment::Key(key.to_owned()), PathSegment::Key(inner.to_owned())]));
            let name = if inner == tensors::ONLY && words.is_empty() { key.to_owned() } else { format!("{key}.{inner}") };
            self.entries.entry(name).or_insert(entry);
        }
        if let Some(side) = side {
            self.ranks = self.ranks.max(side.ranks);
            self.side.extend(side.files);
        }
    }
}

/// A `torch.save` file of the side: its tree. One that only its own library can read is one opaque value under `key`.
pub(super) fn read_or_opaque(folder: &Folder, name: &str, key: &str, number: u32) -> Result<Dict<Parts>> {
    match tensors::read_file(folder.store.as_ref(), &folder.path, name, number) {
        Ok(Tree::Dict(dict)) => Ok(dict),
        Ok(other) => Ok(Dict::from_iter([(Key::from(tensors::ONLY), other)])),
        Err(Error::Untrusted { class, .. }) => Ok(Dict::from_iter([(Key::from(key), Tree::Opaque(Opaque { class, handle: 0 }))])),
        // A plain pickle, of `pickle.dump`, is no archive.
        Err(error) if name.ends_with(".pkl") && error.kind() == ErrorKind::Corrupt => {
            let class = "a pickle of its own".to_owned();
            Ok(Dict::from_iter([(Key::from(key), Tree::Opaque(Opaque { class, handle: 0 }))]))
        }
        Err(error) => Err(error),
    }
}
