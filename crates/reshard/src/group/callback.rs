//! A group whose collectives belong to the embedding program: the Python package fills it with torch.distributed.

use std::sync::Arc;

use super::Group;
use crate::error::{Error, Result};

/// What the embedding program provides. Errors are its own words; timeouts are its own matter.
pub trait Collectives: Send + Sync {
    /// Every rank gives bytes; every rank gets everyone's, by rank.
    fn all_gather(&self, bytes: &[u8]) -> std::result::Result<Vec<Vec<u8>>, String>;

    /// Every rank gives bytes; `root` gets everyone's.
    fn gather(&self, root: usize, bytes: &[u8]) -> std::result::Result<Option<Vec<Vec<u8>>>, String>;

    /// `root` gives bytes; every rank gets them.
    fn broadcast(&self, root: usize, bytes: Option<&[u8]>) -> std::result::Result<Vec<u8>, String>;

    /// `root` gives bytes for each rank; every rank gets its own.
    fn scatter(&self, root: usize, parts: Option<Vec<Vec<u8>>>) -> std::result::Result<Vec<u8>, String>;
}

/// A group over [`Collectives`].
#[derive(Clone)]
pub struct Callback {
    rank: usize,
    size: usize,
    collectives: Arc<dyn Collectives>,
}

impl Callback {
    /// A group of `size` ranks of which this is `rank`.
    pub fn new(rank: usize, size: usize, collectives: Arc<dyn Collectives>) -> Result<Callback> {
        if rank >= size {
            return Err(Error::invalid(format!("rank {rank} is not a rank of a group of {size}")));
        }
        Ok(Callback { rank, size, collectives })
    }

    fn checked(&self, doing: &str, result: std::result::Result<Vec<Vec<u8>>, String>) -> Result<Vec<Vec<u8>>> {
        let all = result.map_err(|detail| self.failed(doing, detail))?;
        if all.len() == self.size {
            Ok(all)
        } else {
            Err(self.failed(doing, format!("{} answers from {} ranks", all.len(), self.size)))
        }
    }

    fn failed(&self, doing: &str, detail: String) -> Error {
        Error::Group { doing: doing.into(), detail, ranks: Vec::new() }
    }
}

impl Group for Callback {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.checked("gathering on all ranks", self.collectives.all_gather(bytes))
    }

    fn gather(&self, root: usize, bytes: &[u8]) -> Result<Option<Vec<Vec<u8>>>> {
        match self.collectives.gather(root, bytes) {
            Ok(None) => Ok(None),
            Ok(Some(all)) => self.checked("gathering", Ok(all)).map(Some),
            Err(detail) => Err(self.failed("gathering", detail)),
        }
    }

    fn broadcast(&self, root: usize, bytes: Option<&[u8]>) -> Result<Vec<u8>> {
        self.collectives.broadcast(root, bytes).map_err(|detail| self.failed("broadcasting", detail))
    }

    fn scatter(&self, root: usize, bytes: Option<Vec<Vec<u8>>>) -> Result<Vec<u8>> {
        if let Some(parts) = bytes.as_ref().filter(|parts| parts.len() != self.size) {
            return Err(Error::internal(format!("{} parts to scatter to {} ranks", parts.len(), self.size)));
        }
        self.collectives.scatter(root, bytes).map_err(|detail| self.failed("scattering", detail))
    }
}
