//! From an address to the store that holds it; what lies there is for the formats to say.

use std::sync::Arc;

use reshard_storage::{Address, StorageError, Store, StoreOptions};

use super::ParameterMap;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result, StorageContext};
use crate::layout_names::{is_safetensors, is_torch};
use crate::view::View;

/// How to open a checkpoint.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct OpenOptions {
    /// How to reach the store.
    pub store: StoreOptions,
    /// What keys that are read as a whole (digests, conversions, comparisons) may take beyond twice the bytes that are stored of
    /// them: tied and expanded tensors, and records that several keys name. `None` is the environment variable
    /// `RESHARD_EXPANDED_LIMIT`, or 4 GiB.
    pub expanded_limit: Option<u64>,
    /// Which parameters lie in the flat buffers of Megatron's distributed optimizer.
    pub parameter_map: Option<Arc<ParameterMap>>,
    /// Rules through which to see it, one after the other.
    pub views: Vec<View>,
}

impl Checkpoint {
    /// Opens what lies at an address: a DCP folder, a safetensors file or folder, a `torch.save` file.
    pub fn open(path: &str) -> Result<Checkpoint> {
        Checkpoint::open_with(path, &OpenOptions::default())
    }

    /// [`Checkpoint::open`], with options.
    pub fn open_with(path: &str, options: &OpenOptions) -> Result<Checkpoint> {
        Checkpoint::open_to_verify(path, options)?.readable()
    }

    /// [`Checkpoint::open_with`], where a file that holds one opaque object is no error: there is something to verify in it.
    pub(crate) fn open_to_verify(path: &str, options: &OpenOptions) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::opened(path, options)?;
        checkpoint.expanded_limit = options.expanded_limit.unwrap_or(checkpoint.expanded_limit);
        if let Some(map) = &options.parameter_map {
            checkpoint = checkpoint.readable()?.with_parameters(map)?;
        }
        options.views.iter().try_fold(checkpoint, |seen, view| seen.readable()?.through(view))
    }

    fn opened(path: &str, options: &OpenOptions) -> Result<Checkpoint> {
        let address = Address::parse(path).doing(|| format!("opening {path}"))?;
        let name = address.file_name().unwrap_or_default().to_owned();
        if is_safetensors(&name) || is_torch(&name) {
            // Named like a file; a folder may be named like one too, so the store is asked.
            if let Some(parent) = address.parent() {
                let store = reshard_storage::open(&parent, &options.store).doing(|| format!("opening {path}"))?;
                match store.size(&name) {
                    Ok(_) => return super::open_file(store, &name),
                    Err(StorageError::NotFound { .. }) => {}
                    Err(_) if store.local_root().is_some_and(|root| root.join(&name).is_dir()) => {}
                    Err(error) => return Err(error).doing(|| format!("opening {path}")),
                }
            }
        }
        let store = reshard_storage::open(&address, &options.store).doing(|| format!("opening {path}"))?;
        Checkpoint::open_store_to_verify(store)
    }

    /// Opens the checkpoint that a store's root holds.
    pub fn open_store(store: Arc<dyn Store>) -> Result<Checkpoint> {
        Checkpoint::open_store_to_verify(store)?.readable()
    }

    /// [`Checkpoint::open_store`], where a file that holds one opaque object is no error.
    pub(crate) fn open_store_to_verify(store: Arc<dyn Store>) -> Result<Checkpoint> {
        super::open_folder(store)
    }

    /// Opens the folder of a DeepSpeed tag as one tensor parallel rank of the training knows it: its own parts of parameters
    /// by their local shapes.
    pub fn open_model_rank(store: Arc<dyn Store>, rank: u64) -> Result<Checkpoint> {
        super::open_model_rank(store, rank)?.readable()
    }

    /// Opens one file of a store.
    pub fn open_file(store: Arc<dyn Store>, name: &str) -> Result<Checkpoint> {
        super::open_file(store, name)?.readable()
    }

    /// The checkpoint, unless it is one object that only unpickling could bring back.
    fn readable(self) -> Result<Checkpoint> {
        match self.object {
            Some(class) => Err(Error::Untrusted { key: self.catalog.files.concat(), path: self.path, class }),
            None => Ok(self),
        }
    }
}
