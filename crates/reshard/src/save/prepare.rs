//! Agreeing on a save: two small exchanges, or one when the plan of the last save still fits.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use reshard_layout::Region;
use reshard_storage::Store;
use serde::{Deserialize, Serialize};

use super::SaveOptions;
use super::write::content_hashes;
use crate::error::{Error, Result, StorageContext};
use crate::group::{Group, at_root, decode, encode};
use crate::layout_names::{DATA_PREFIX, METADATA_FILE};
use crate::leaf::SaveState;
use crate::plan::cache::CachedPlan;
use crate::plan::global::{Assigned, GlobalPlan, PlanOptions, RankPlan, plan};
use crate::plan::local::{Holdings, LocalPlan, TableEntry, hash};

/// A save that all ranks agreed on.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) decision: Decision,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// This rank's own table; assignments point into it.
    pub(crate) table: Vec<TableEntry>,
    pub(crate) plan: Arc<CachedPlan>,
    pub(crate) plan_cached: bool,
}

/// What the planning rank decided before any plan was made.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Decision {
    pub(crate) save_id: String,
    /// Whether data files carry the save id in their names, because others lie there.
    pub(crate) named: bool,
    pub(crate) use_cached: bool,
    /// The hash of the planning rank's table: who has the same need not send it.
    pub(crate) table_hash: u128,
}

#[derive(Serialize, Deserialize)]
struct Hello {
    hash: u128,
    cached: Option<u128>,
}

#[derive(Serialize, Deserialize)]
struct Part {
    table: Option<Vec<TableEntry>>,
    holdings: Holdings,
    contents: Option<Vec<u64>>,
}

/// An assignment as it travels: the writer knows its own pieces, so a region is sent only when it is a part of one.
#[derive(Serialize, Deserialize)]
struct WireAssigned {
    local: u32,
    piece: u32,
    /// `None` for a value.
    kind: WireKind,
}

#[derive(Serialize, Deserialize)]
enum WireKind {
    Value,
    WholePiece,
    Part(Vec<u64>),
}

/// Plans the save with all ranks.
pub(crate) fn prepare(group: &dyn Group, state: &SaveState<'_>, store: &dyn Store, options: &SaveOptions) -> Result<Prepared> {
    let result = try_prepare(group, state, store, options);
    if let (Err(_), Some(cache)) = (&result, &options.plan_cache) {
        cache.clear();
    }
    result
}

fn try_prepare(group: &dyn Group, state: &SaveState<'_>, store: &dyn Store, options: &SaveOptions) -> Result<Prepared> {
    let local = LocalPlan::of(state, group.rank());
    let local_hash = local.as_ref().map_or(0, |l| l.hash);
    let cache = options.plan_cache.as_ref().filter(|_| !options.check_replicas);
    let cached = cache.and_then(|c| c.get(local_hash));
    let hello = local.as_ref().map_err(copy_of).and_then(|l| {
        options.control.check("planning")?;
        encode(&Hello { hash: l.hash, cached: cached.as_ref().map(|c| c.id) })
    });
    let mut hashes = Vec::new();
    let decision = at_root(group, hello, |hellos| {
        let hellos: Vec<Hello> = hellos.iter().map(|h| decode(h)).collect::<Result<_>>()?;
        hashes = hellos.iter().map(|h| h.hash).collect();
        let use_cached = cached.as_ref().is_some_and(|own| {
            let known = own.global.as_ref().is_some_and(|(known, _)| *known == hashes);
            known && hellos.iter().all(|h| h.cached == Some(own.id))
        });
        let decision = decide(store, options, use_cached, local.as_ref().map_or(0, |l| l.table_hash))?;
        Ok(vec![encode(&decision)?; group.size()])
    })?;
    let decision: Decision = decode(&decision)?;
    let local = local?;
    let (rank, ranks) = (group.rank(), group.size());
    if let (true, Some(plan)) = (decision.use_cached, cached) {
        return Ok(Prepared { decision, rank, ranks, table: local.table, plan, plan_cached: true });
    }
    let same_table = decision.table_hash == local.table_hash && rank != 0;
    let contents = if options.check_replicas { content_hashes(state).map(Some) } else { Ok(None) };
    let part = contents.and_then(|contents| {
        let table = (!same_table).then(|| local.table.clone());
        encode(&Part { table, holdings: local.holdings.clone(), contents })
    });
    let mut global = None;
    let answer = at_root(group, part, |parts| {
        let plans = rank_plans(&parts)?;
        let planned = plan(&plans, PlanOptions { split_above: options.split_replicated_above })?;
        // Every rank learns the plan's id, so that all of them recognise it at the next save.
        let id = hash(&encode(&(&hashes, ranks))?);
        let answers = (0..ranks).map(|r| wire(id, &planned.assigned[r], &plans[r])).collect::<Result<Vec<_>>>()?;
        global = Some(Arc::new(planned));
        Ok(answers)
    })?;
    let (id, assigned) = unwire(&answer, &local)?;
    let global = global.map(|global| (hashes, global));
    let plan = Arc::new(CachedPlan { local_hash: local.hash, id, assigned, global });
    if let Some(cache) = &options.plan_cache {
        cache.put(Arc::clone(&plan));
    }
    Ok(Prepared { decision, rank, ranks, table: local.table, plan, plan_cached: false })
}

/// What a rank would send: the size of its hello, its part, and the hash of its table.
pub(crate) fn offline_parts(state: &SaveState<'_>, rank: usize, first_table: Option<u128>) -> Result<(u64, Vec<u8>, u128)> {
    let local = LocalPlan::of(state, rank)?;
    let hello = encode(&Hello { hash: local.hash, cached: Some(local.hash) })?.len() as u64;
    let table_hash = local.table_hash;
    let table = (first_table != Some(table_hash)).then_some(local.table);
    Ok((hello, encode(&Part { table, holdings: local.holdings, contents: None })?, table_hash))
}

/// What the planning rank makes of all parts, answers included.
pub(crate) fn offline_plan(parts: &[Vec<u8>], options: &SaveOptions) -> Result<GlobalPlan> {
    let plans = rank_plans(parts)?;
    let planned = plan(&plans, PlanOptions { split_above: options.split_replicated_above })?;
    for (assigned, rank) in planned.assigned.iter().zip(&plans) {
        wire(0, assigned, rank)?;
    }
    Ok(planned)
}

/// The planning rank's look at the place.
pub(crate) fn decide(store: &dyn Store, options: &SaveOptions, use_cached: bool, table_hash: u128) -> Result<Decision> {
    let place = || format!("preparing {}", store.describe());
    store.prepare().doing(place)?;
    let exists = store.exists(METADATA_FILE).doing(place)?;
    if exists && !options.overwrite {
        return Err(Error::AlreadyExists { place: store.describe() });
    }
    let named = exists || !store.list(DATA_PREFIX).doing(place)?.is_empty();
    Ok(Decision { save_id: new_save_id(), named, use_cached, table_hash })
}

/// Unique among the saves to one place: the time, and a number that differs between processes that start at once.
pub(crate) fn new_save_id() -> String {
    use std::hash::{BuildHasher, Hasher};
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let random = std::collections::hash_map::RandomState::new().build_hasher().finish();
    format!("{nanos:016x}{:08x}", random as u32)
}

fn rank_plans(parts: &[Vec<u8>]) -> Result<Vec<RankPlan>> {
    let mut plans: Vec<RankPlan> = Vec::with_capacity(parts.len());
    let mut first: Option<Arc<Vec<TableEntry>>> = None;
    for (rank, bytes) in parts.iter().enumerate() {
        let part: Part = decode(bytes)?;
        let table = match (part.table, &first) {
            (Some(table), _) => Arc::new(table),
            (None, Some(first)) => Arc::clone(first),
            (None, None) => return Err(Error::invalid(format!("rank {rank} sent no table"))),
        };
        first.get_or_insert_with(|| Arc::clone(&table));
        plans.push(RankPlan { table, holdings: part.holdings, contents: part.contents });
    }
    Ok(plans)
}

fn wire(id: u128, assigned: &[Assigned], rank: &RankPlan) -> Result<Vec<u8>> {
    let pieces = pieces_of(&rank.table, &rank.holdings)?;
    let list: Vec<WireAssigned> = assigned
        .iter()
        .map(|a| {
            let kind = match &a.region {
                None => WireKind::Value,
                Some(region) if pieces.get(a.local, a.piece) == Some(region) => WireKind::WholePiece,
                Some(region) => WireKind::Part(region.offsets().iter().chain(region.sizes()).copied().collect()),
            };
            WireAssigned { local: a.local, piece: a.piece, kind }
        })
        .collect();
    encode(&(id, list))
}

fn unwire(bytes: &[u8], local: &LocalPlan) -> Result<(u128, Vec<Assigned>)> {
    let pieces = pieces_of(&local.table, &local.holdings)?;
    let (id, list): (u128, Vec<WireAssigned>) = decode(bytes)?;
    let assigned = list
        .into_iter()
        .map(|a| {
            let region = match a.kind {
                WireKind::Value => None,
                WireKind::WholePiece => pieces.get(a.local, a.piece).cloned(),
                WireKind::Part(numbers) => {
                    let (offsets, sizes) = numbers.split_at(numbers.len() / 2);
                    Some(Region::new(offsets, sizes)?)
                }
            };
            Ok(Assigned { key: 0, local: a.local, piece: a.piece, region })
        })
        .collect::<Result<_>>()?;
    Ok((id, assigned))
}

/// A rank's pieces by position in its table.
struct Pieces {
    starts: Vec<usize>,
    regions: Vec<Region>,
}

impl Pieces {
    fn get(&self, local: u32, piece: u32) -> Option<&Region> {
        self.regions.get(self.starts.get(local as usize)? + piece as usize)
    }
}

fn pieces_of(table: &[TableEntry], holdings: &Holdings) -> Result<Pieces> {
    let mut pieces = Pieces { starts: Vec::with_capacity(table.len()), regions: Vec::new() };
    let mut numbers = holdings.numbers.as_slice();
    let mut counts = holdings.counts.iter();
    for entry in table {
        pieces.starts.push(pieces.regions.len());
        if let Some(tensor) = &entry.tensor {
            for _ in 0..counts.next().copied().unwrap_or(0) {
                pieces.regions.push(crate::plan::local::take_region(&mut numbers, tensor.shape.len())?);
            }
        }
    }
    Ok(pieces)
}

/// The error for the group, while the rank keeps its own.
fn copy_of(error: &Error) -> Error {
    Error::invalid(error.full_text())
}

impl Prepared {
    /// The whole plan, on the planning rank.
    pub(crate) fn global(&self) -> Option<&GlobalPlan> {
        self.plan.global.as_ref().map(|(_, global)| global.as_ref())
    }
}
