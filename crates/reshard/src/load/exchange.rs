//! Reading once what several ranks want, and passing it on.
//!
//! Ranks tell each other which regions they want. A region that several want is read by the least loaded of them, and
//! sent to the others in rounds of bounded size. Everything else is read as always. It pays where the network between ranks
//! is faster than the storage.

use std::collections::{BTreeMap, HashSet};

use reshard_layout::Region;
use serde::{Deserialize, Serialize};

use super::boxes;
use super::resolve::Resolved;
use crate::checkpoint::{CatalogKind, ChunkLocation};
use crate::error::{Error, Geometry, Result};
use crate::group::{Group, agree, decode, encode};
use crate::leaf::{LoadLeaf, LoadPiece, LoadState};

/// Bytes that all ranks together send in one round.
const ROUND: u64 = 64 << 20;

#[derive(Serialize, Deserialize)]
struct Wish {
    key: String,
    element: u64,
    offsets: Vec<u64>,
    sizes: Vec<u64>,
}

/// A region that several ranks want.
struct Shared {
    reader: usize,
    region: Region,
    element: u64,
    /// This rank's pieces that want it.
    mine: Vec<(u32, u32)>,
}

/// What this rank leaves to others, and what is passed around afterwards.
pub(super) struct Exchange {
    /// Pieces that this rank does not read.
    pub(super) skipped: HashSet<(u32, u32)>,
    shared: Vec<Shared>,
}

/// Agrees on who reads what.
pub(super) fn agree_on_readers(group: &dyn Group, state: &LoadState<'_>, found: &[Resolved<'_>]) -> Result<Exchange> {
    let mut wishes = Vec::new();
    let mut pieces = Vec::new();
    for resolved in found {
        let (CatalogKind::Tensor(stored), Some((_, entry))) = (&resolved.stored.kind, state.leaves.get_index(resolved.wanted))
        else {
            continue;
        };
        let LoadLeaf::Tensor(wanted) = &entry.leaf else { continue };
        // What has to be cast is read by whoever wants it so; what stays as it is, stays everybody's own.
        if wanted.dtype != stored.dtype || stored.chunks.iter().any(|chunk| matches!(chunk.location, ChunkLocation::Live)) {
            continue;
        }
        for (i, piece) in wanted.pieces.iter().enumerate().filter(|(_, piece)| !piece.region.is_empty()) {
            wishes.push(Wish {
                key: resolved.key.to_owned(),
                element: stored.dtype.size(),
                offsets: piece.region.offsets().to_vec(),
                sizes: piece.region.sizes().to_vec(),
            });
            pieces.push((resolved.wanted as u32, i as u32));
        }
    }
    let all = agree(group, encode(&wishes))?;
    // Every rank sorts the same wishes and so comes to the same answer.
    let mut wanted: BTreeMap<(String, Region), (u64, Vec<usize>)> = BTreeMap::new();
    let mut mine: BTreeMap<(String, Region), Vec<(u32, u32)>> = BTreeMap::new();
    for (rank, bytes) in all.iter().enumerate() {
        let wishes: Vec<Wish> = decode(bytes)?;
        for (i, wish) in wishes.into_iter().enumerate() {
            let key = (wish.key, Region::new(&wish.offsets, &wish.sizes).proven()?);
            if rank == group.rank() {
                mine.entry(key.clone()).or_default().push(pieces[i]);
            }
            let ranks = &mut wanted.entry(key).or_insert((wish.element, Vec::new())).1;
            if ranks.last() != Some(&rank) {
                ranks.push(rank);
            }
        }
    }
    let mut loads = vec![0u64; group.size()];
    for ((_, region), (element, ranks)) in wanted.iter().filter(|(_, (_, ranks))| ranks.len() == 1) {
        loads[ranks[0]] += region.volume() * element;
    }
    let mut exchange = Exchange { skipped: HashSet::new(), shared: Vec::new() };
    for (key, (element, ranks)) in wanted.into_iter().filter(|(_, (_, ranks))| ranks.len() > 1) {
        let reader = ranks.into_iter().min_by_key(|&r| (loads[r], r)).unwrap_or(0);
        loads[reader] += key.1.volume() * element;
        let mine = mine.remove(&key).unwrap_or_default();
        if reader != group.rank() {
            exchange.skipped.extend(mine.iter().copied());
        }
        // Parts that fit into a round.
        for region in key.1.cut_to(ROUND / 2 / element.max(1)) {
            exchange.shared.push(Shared { reader, region, element, mine: mine.clone() });
        }
    }
    Ok(exchange)
}

impl Exchange {
    /// Passes on what was read, in rounds. Returns how many bytes this rank received instead of reading them.
    pub(super) fn pass_on(&self, group: &dyn Group, state: &LoadState<'_>) -> Result<u64> {
        let mut received = 0;
        let mut start = 0;
        while start < self.shared.len() {
            let mut end = start;
            let mut bytes = 0;
            while end < self.shared.len() && (end == start || bytes + self.shared[end].bytes() <= ROUND) {
                bytes += self.shared[end].bytes();
                end += 1;
            }
            let round = &self.shared[start..end];
            start = end;
            let mut message = Vec::new();
            let mut packed = Ok(());
            for shared in round.iter().filter(|s| s.reader == group.rank()) {
                packed = packed.and_then(|()| shared.pack(state, &mut message));
            }
            let all = agree(group, packed.map(|()| message))?;
            let mut cursors = vec![0usize; all.len()];
            for shared in round {
                let at = &mut cursors[shared.reader];
                let bytes = all[shared.reader].get(*at..*at + shared.bytes() as usize);
                *at += shared.bytes() as usize;
                let bytes = bytes.ok_or_else(|| Error::internal(format!("rank {} sent too little", shared.reader)))?;
                if shared.reader != group.rank() {
                    for piece in &shared.mine {
                        shared.unpack(piece_of(state, *piece)?, bytes)?;
                        received += bytes.len() as u64;
                    }
                }
            }
        }
        Ok(received)
    }
}

impl Shared {
    fn bytes(&self) -> u64 {
        self.region.volume() * self.element
    }

    fn pack(&self, state: &LoadState<'_>, out: &mut Vec<u8>) -> Result<()> {
        let Some(&first) = self.mine.first() else {
            return Err(Error::internal("a rank is to pass on what it does not want"));
        };
        let piece = piece_of(state, first)?;
        let start = out.len();
        out.resize(start + self.bytes() as usize, 0);
        boxes::take(piece, &self.region.within(&piece.region).proven()?, &mut out[start..])
    }

    fn unpack(&self, piece: &LoadPiece<'_>, bytes: &[u8]) -> Result<()> {
        boxes::put(piece, &self.region.within(&piece.region).proven()?, bytes)
    }
}

fn piece_of<'s, 'a>(state: &'s LoadState<'a>, (wanted, piece): (u32, u32)) -> Result<&'s LoadPiece<'a>> {
    match state.leaves.get_index(wanted as usize).map(|(_, entry)| &entry.leaf) {
        Some(LoadLeaf::Tensor(tensor)) if (piece as usize) < tensor.pieces.len() => Ok(&tensor.pieces[piece as usize]),
        _ => Err(Error::internal("the exchange names a piece that is not wanted")),
    }
}
