//! Claims of saves that someone else plans, from their begin to their publication. Who plans does not say when it gives up: a claim
//! stays until it is abandoned, and gives way to the next save of this process unless its own rank is writing just then. The one
//! before can no longer publish; other ranks of it may still be writing, so that data files of the next one carry its id.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use reshard_storage::{PerProcess, Store};

use super::Commit;
use crate::error::Result;

#[derive(Debug)]
struct Claim {
    commit: Commit,
    /// How many threads of this process write data of it.
    writing: usize,
}

static CLAIMS: PerProcess<Mutex<HashMap<String, Claim>>> = PerProcess::new();

fn claims() -> std::sync::MutexGuard<'static, HashMap<String, Claim>> {
    CLAIMS.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Several ranks may claim a path, each for metadata of its own.
fn name(store: &dyn Store, metadata_name: Option<&str>) -> String {
    format!("{}/{}", store.describe(), metadata_name.unwrap_or_default())
}

/// Claims a path, also from another such save of this process. Gives the id, and whether data files carry it.
pub(crate) fn begin(store: &dyn Store, metadata_name: Option<&str>, overwrite: bool) -> Result<(String, bool)> {
    let name = name(store, metadata_name);
    let before = claims().remove(&name);
    let taken = before.is_some();
    drop(before);
    let mut commit = match metadata_name {
        None => Commit::begin(store, overwrite)?,
        Some(metadata) => Commit::begin_rank(store, overwrite, metadata)?,
    };
    commit.named |= taken;
    let begun = (commit.save_id.clone(), commit.named);
    claims().insert(name, Claim { commit, writing: 0 });
    Ok(begun)
}

/// The commit of a save that is still the one which claims its path.
pub(crate) fn take(store: &dyn Store, metadata_name: Option<&str>, begun: &str) -> Option<Commit> {
    let name = name(store, metadata_name);
    let mut claims = claims();
    claims.get(&name).filter(|claim| claim.commit.save_id == begun)?;
    claims.remove(&name).map(|claim| claim.commit)
}

/// Ends a claim.
pub(crate) fn abandon(begun: &str) {
    let ended: Vec<Claim> = claims().extract_if(|_, claim| claim.commit.save_id == begun).map(|(_, claim)| claim).collect();
    drop(ended);
}

/// Lets another save have a path; says whether there was a claim on it that could give way.
pub(super) fn give_way(store: &dyn Store) -> bool {
    let name = name(store, None);
    let mut claims = claims();
    if claims.get(&name).is_none_or(|claim| claim.writing > 0) {
        return false;
    }
    let claim = claims.remove(&name);
    drop(claims);
    claim.is_some()
}

/// While this is there, data is written for the path by this process.
#[derive(Debug)]
pub(crate) struct Writing {
    name: String,
    begun: Option<String>,
}

impl Writing {
    pub(crate) fn to(store: &dyn Store) -> Writing {
        let name = name(store, None);
        let begun = claims().get_mut(&name).map(|claim| {
            claim.writing += 1;
            claim.commit.save_id.clone()
        });
        Writing { name, begun }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if let Some(claim) = claims().get_mut(&self.name)
            && self.begun.as_ref() == Some(&claim.commit.save_id)
        {
            claim.writing -= 1;
        }
    }
}
