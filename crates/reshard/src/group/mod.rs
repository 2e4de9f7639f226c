//! Groups of ranks: the few collectives the engine needs, and the rule by which errors travel.
//!
//! The engine exchanges bytes only, and little of them. Every exchange goes through `at_root` or `agree`, which carry
//! a rank's failure in place of its bytes: so an error on any rank becomes the same error on all of them, and nobody
//! waits for a rank that gave up.

mod callback;
#[cfg(feature = "mpi")]
mod mpi;
mod solo;
mod threads;

pub use callback::{Callback, Collectives};
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
pub use solo::Solo;
pub use threads::{Threads, run_threads};

use crate::error::{Error, RankFailure, Result};

/// Ranks acting together. Every rank calls the same methods in the same order.
pub trait Group: Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Every rank gives bytes; every rank gets everyone's, by rank.
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Every rank gives bytes; `root` gets everyone's, by rank, the others nothing.
    fn gather(&self, root: usize, bytes: &[u8]) -> Result<Option<Vec<Vec<u8>>>> {
        let all = self.all_gather(bytes)?;
        Ok((self.rank() == root).then_some(all))
    }

    /// `root` gives bytes, the others `None`; every rank gets the root's.
    fn broadcast(&self, root: usize, bytes: Option<&[u8]>) -> Result<Vec<u8>> {
        let mut all = self.all_gather(bytes.unwrap_or_default())?;
        if root < all.len() {
            Ok(all.swap_remove(root))
        } else {
            Err(Error::internal(format!("root {root} is not a rank of a group of {}", self.size())))
        }
    }

    /// `root` gives bytes for each rank; every rank gets its own.
    fn scatter(&self, root: usize, bytes: Option<Vec<Vec<u8>>>) -> Result<Vec<u8>> {
        let packed = match &bytes {
            Some(parts) => Some(encode(parts)?),
            None => None,
        };
        let packed = self.broadcast(root, packed.as_deref())?;
        let mut parts: Vec<Vec<u8>> = decode(&packed)?;
        if self.rank() < parts.len() {
            Ok(parts.swap_remove(self.rank()))
        } else {
            Err(Error::internal(format!("the root scattered {} parts to {} ranks", parts.len(), self.size())))
        }
    }

    /// Waits for every rank.
    fn barrier(&self) -> Result<()> {
        self.all_gather(&[]).map(drop)
    }
}

impl<G: Group + ?Sized> Group for std::sync::Arc<G> {
    fn rank(&self) -> usize {
        (**self).rank()
    }
    fn size(&self) -> usize {
        (**self).size()
    }
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        (**self).all_gather(bytes)
    }
    fn gather(&self, root: usize, bytes: &[u8]) -> Result<Option<Vec<Vec<u8>>>> {
        (**self).gather(root, bytes)
    }
    fn broadcast(&self, root: usize, bytes: Option<&[u8]>) -> Result<Vec<u8>> {
        (**self).broadcast(root, bytes)
    }
    fn scatter(&self, root: usize, bytes: Option<Vec<Vec<u8>>>) -> Result<Vec<u8>> {
        (**self).scatter(root, bytes)
    }
    fn barrier(&self) -> Result<()> {
        (**self).barrier()
    }
}

/// What a rank puts on the wire: its bytes, or why it has none.
#[derive(Serialize, Deserialize)]
enum Envelope {
    Fine(Vec<u8>),
    Failed(Vec<RankFailure>),
}

/// Every rank gives its bytes or its error to rank 0; rank 0 turns them into bytes for each rank, or fails; every rank gets
/// its bytes, or the error of whoever failed.
pub(crate) fn at_root(
    group: &dyn Group,
    local: Result<Vec<u8>>,
    at_root: impl FnOnce(Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>>,
) -> Result<Vec<u8>> {
    const ROOT: usize = 0;
    let (sent, own_error) = seal(group.rank(), local)?;
    let gathered = group.gather(ROOT, &sent)?;
    let answers = match gathered {
        None => None,
        Some(all) => {
            let answer = unseal(all).and_then(at_root);
            let sealed = match answer {
                Ok(parts) => parts.into_iter().map(|part| encode(&Envelope::Fine(part))).collect::<Result<Vec<_>>>()?,
                Err(error) => {
                    let part = encode(&Envelope::Failed(error.to_failures(ROOT)))?;
                    vec![part; group.size()]
                }
            };
            Some(sealed)
        }
    };
    let answer = group.scatter(ROOT, answers)?;
    match decode(&answer)? {
        Envelope::Fine(bytes) => Ok(bytes),
        Envelope::Failed(failures) => Err(own_or_remote(group.rank(), own_error, failures)),
    }
}

/// [`at_root`] with what the bytes stand for. A rank that is alone encodes nothing.
pub(crate) fn asking_root<T, A>(group: &dyn Group, local: Result<T>, answer: impl FnOnce(Vec<T>) -> Result<Vec<A>>) -> Result<A>
where
    T: Serialize + DeserializeOwned,
    A: Serialize + DeserializeOwned,
{
    if group.size() == 1 {
        let mut answers = answer(vec![local?])?;
        return answers.pop().ok_or_else(|| Error::internal("the planning rank has no answer for itself"));
    }
    let bytes = at_root(group, local.and_then(|local| encode(&local)), |all| {
        let all = all.iter().map(|bytes| decode(bytes)).collect::<Result<Vec<T>>>()?;
        answer(all)?.iter().map(encode).collect()
    })?;
    decode(&bytes)
}

/// The same outcome on every rank: fine on all, or everyone's errors.
pub(crate) fn together<T>(group: &dyn Group, result: Result<T>) -> Result<T> {
    if group.size() == 1 {
        return result;
    }
    let (value, local) = match result {
        Ok(value) => (Some(value), Ok(Vec::new())),
        Err(error) => (None, Err(error)),
    };
    agree(group, local)?;
    value.ok_or_else(|| Error::internal("a rank failed without an error"))
}

/// Every rank gives its bytes or its error; every rank gets everyone's bytes, or everyone's errors.
pub(crate) fn agree(group: &dyn Group, local: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
    let (sent, own_error) = seal(group.rank(), local)?;
    match unseal(group.all_gather(&sent)?) {
        Ok(all) => Ok(all),
        Err(Error::Remote { failures }) => Err(own_or_remote(group.rank(), own_error, failures)),
        Err(error) => Err(error),
    }
}

fn seal(rank: usize, local: Result<Vec<u8>>) -> Result<(Vec<u8>, Option<Error>)> {
    Ok(match local {
        Ok(bytes) => (encode(&Envelope::Fine(bytes))?, None),
        Err(error) => (encode(&Envelope::Failed(error.to_failures(rank)))?, Some(error)),
    })
}

fn unseal(all: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
    let mut fine = Vec::with_capacity(all.len());
    let mut failures = Vec::new();
    for bytes in all {
        match decode(&bytes)? {
            Envelope::Fine(bytes) => fine.push(bytes),
            Envelope::Failed(more) => failures.extend(more),
        }
    }
    if failures.is_empty() {
        return Ok(fine);
    }
    failures.sort_by_key(|f| f.rank);
    failures.dedup();
    Err(Error::Remote { failures })
}

/// The rank that failed alone keeps its own error with its sources; everyone else gets the words.
fn own_or_remote(rank: usize, own: Option<Error>, failures: Vec<RankFailure>) -> Error {
    match own {
        Some(error) if failures.iter().all(|f| f.rank == rank) => error,
        _ => Error::Remote { failures },
    }
}

/// The encoding of everything that travels between ranks of one job: all run the same build, so it needs no version.
pub(crate) fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>> {
    postcard::to_stdvec(value).map_err(|error| Error::Group {
        doing: "encoding a message between ranks".into(),
        detail: error.to_string(),
        ranks: Vec::new(),
    })
}

/// The other way.
pub(crate) fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|error| Error::Group {
        doing: "decoding a message between ranks; are all ranks running the same version?".into(),
        detail: error.to_string(),
        ranks: Vec::new(),
    })
}
