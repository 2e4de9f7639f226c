//! Agreeing on a save: two small exchanges, or one when the plan of the last save still fits.

use std::sync::Arc;

use reshard_formats::own::KeyEntry;
use reshard_storage::Store;
use serde::{Deserialize, Serialize};

use super::SaveOptions;
use super::jobs::content_hashes;
use crate::commit::Commit;
use crate::error::{Error, Result};
use crate::group::{Group, asking_root, decode, encode};
use crate::leaf::SaveState;
use crate::plan::cache::CachedPlan;
use crate::plan::global::{Assigned, GlobalPlan, PlanOptions, RankPlan, plan};
use crate::plan::local::{Holdings, LocalPlan, hash, region_of};

/// A save that all ranks agreed on.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) decision: Decision,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// This rank's own table; assignments point into it.
    pub(crate) table: Arc<Vec<KeyEntry>>,
    pub(crate) plan: Arc<CachedPlan>,
    pub(crate) plan_cached: bool,
    /// The claim on the path, on the planning rank.
    pub(crate) commit: Option<Commit>,
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
    path: String,
    hash: u128,
    cached: Option<u128>,
}

#[derive(Serialize, Deserialize)]
struct Part {
    table: Option<Arc<Vec<KeyEntry>>>,
    holdings: Holdings,
    contents: Option<Vec<u64>>,
}

/// What a rank is told to write.
#[derive(Serialize, Deserialize)]
struct Told {
    id: u128,
    list: Vec<WireAssigned>,
}

/// An assignment as it travels: the writer knows its own pieces, so a region is sent only when it is a part of one.
#[derive(Serialize, Deserialize)]
struct WireAssigned {
    local: u32,
    piece: u32,
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
    let cached = cache.and_then(|c| c.get(local_hash, options.split_replicated_above));
    let hello = local.as_ref().map_err(|error| Error::Remote { failures: error.to_failures(group.rank()) }).and_then(|l| {
        options.control.check("planning")?;
        Ok(Hello { path: store.describe(), hash: l.hash, cached: cached.as_ref().map(|c| c.id) })
    });
    let mut hashes = Vec::new();
    let mut commit = None;
    let decision = asking_root(group, hello, |hellos| {
        same_path(&hellos)?;
        hashes = hellos.iter().map(|h| h.hash).collect();
        let use_cached = cached.as_ref().is_some_and(|own| {
            let known = own.global.as_ref().is_some_and(|(known, _)| *known == hashes);
            known && hellos.iter().all(|h| h.cached == Some(own.id))
        });
        let table_hash = local.as_ref().map_or(0, |l| l.table_hash);
        let claimed = commit.insert(Commit::begin(store, options.overwrite)?);
        let decision = Decision { save_id: claimed.save_id.clone(), named: claimed.named, use_cached, table_hash };
        Ok(vec![decision; group.size()])
    })?;
    let local = local?;
    let (rank, ranks) = (group.rank(), group.size());
    if let (true, Some(plan)) = (decision.use_cached, cached) {
        return Ok(Prepared { decision, rank, ranks, table: local.table, plan, plan_cached: true, commit });
    }
    let same_table = decision.table_hash == local.table_hash && rank != 0;
    let contents = if options.check_replicas { content_hashes(state).map(Some) } else { Ok(None) };
    let part = contents.map(|contents| {
        let table = (!same_table).then(|| Arc::clone(&local.table));
        Part { table, holdings: local.holdings.clone(), contents }
    });
    let mut global = None;
    let answer = asking_root(group, part, |parts| {
        let plans = rank_plans(parts)?;
        let planned = plan(&plans, PlanOptions { split_above: options.split_replicated_above })?;
        // Every rank learns the plan's id, so that all of them recognise it at the next save.
        let id = hash(&encode(&(&hashes, ranks))?);
        let answers = planned.assigned.iter().enumerate().map(|(r, assigned)| Told::of(id, r, assigned)).collect();
        global = Some(Arc::new(planned));
        Ok(answers)
    })?;
    let global = global.map(|global| (hashes, global));
    let (split_above, id) = (options.split_replicated_above, answer.id);
    let told = answer.assigned(&local)?;
    let plan = Arc::new(CachedPlan { local_hash: local.hash, id, split_above, told, global });
    if let Some(cache) = &options.plan_cache {
        cache.put(Arc::clone(&plan));
    }
    Ok(Prepared { decision, rank, ranks, table: local.table, plan, plan_cached: false, commit })
}

/// What a rank would send: the size of its hello, its part, and the hash of its table.
pub(crate) fn offline_parts(state: &SaveState<'_>, rank: usize, first_table: Option<u128>) -> Result<(u64, Vec<u8>, u128)> {
    let local = LocalPlan::of(state, rank)?;
    let hello = encode(&Hello { path: String::new(), hash: local.hash, cached: Some(local.hash) })?.len() as u64;
    let table_hash = local.table_hash;
    let table = (first_table != Some(table_hash)).then_some(local.table);
    Ok((hello, encode(&Part { table, holdings: local.holdings, contents: None })?, table_hash))
}

/// What the planning rank makes of all parts, answers included.
pub(crate) fn offline_plan(parts: &[Vec<u8>], options: &SaveOptions) -> Result<GlobalPlan> {
    let plans = rank_plans(parts.iter().map(|part| decode(part)).collect::<Result<_>>()?)?;
    let planned = plan(&plans, PlanOptions { split_above: options.split_replicated_above })?;
    for (rank, assigned) in planned.assigned.iter().enumerate() {
        encode(&Told::of(0, rank, assigned))?;
    }
    Ok(planned)
}

/// Ranks that save to different paths would each leave a part, and none a checkpoint.
fn same_path(hellos: &[Hello]) -> Result<()> {
    let Some(first) = hellos.first() else { return Ok(()) };
    let others: Vec<String> = hellos
        .iter()
        .enumerate()
        .filter(|(_, hello)| hello.path != first.path)
        .map(|(rank, hello)| format!("rank {rank} to {}", hello.path))
        .collect();
    if others.is_empty() {
        return Ok(());
    }
    let more = if others.len() > 3 { format!(" and {} more", others.len() - 3) } else { String::new() };
    let others = others[..others.len().min(3)].join(", ");
    Err(Error::invalid(format!(
        "the ranks save to different paths (rank 0 to {}, {others}{more}): give all of them the same one; nothing was written",
        first.path
    )))
}

fn rank_plans(parts: Vec<Part>) -> Result<Vec<RankPlan>> {
    let mut plans: Vec<RankPlan> = Vec::with_capacity(parts.len());
    let mut first: Option<Arc<Vec<KeyEntry>>> = None;
    for (rank, part) in parts.into_iter().enumerate() {
        let table = match (part.table, &first) {
            (Some(table), _) => table,
            (None, Some(first)) => Arc::clone(first),
            (None, None) => return Err(Error::internal(format!("rank {rank} sent no table"))),
        };
        first.get_or_insert_with(|| Arc::clone(&table));
        plans.push(RankPlan { table, holdings: part.holdings, contents: part.contents });
    }
    Ok(plans)
}

impl Told {
    /// What rank `rank` is told; the planning rank has the whole plan and tells itself nothing.
    fn of(id: u128, rank: usize, assigned: &[Assigned]) -> Told {
        let assigned = if rank == 0 { &[] } else { assigned };
        let kind = |a: &Assigned| match &a.region {
            None => WireKind::Value,
            Some(_) if a.whole => WireKind::WholePiece,
            Some(region) => WireKind::Part(region.offsets().iter().chain(region.sizes()).copied().collect()),
        };
        Told { id, list: assigned.iter().map(|a| WireAssigned { local: a.local, piece: a.piece, kind: kind(a) }).collect() }
    }

    fn assigned(self, local: &LocalPlan) -> Result<Vec<Assigned>> {
        let pieces = local.pieces();
        self.list
            .into_iter()
            .map(|a| {
                let unknown = || Error::internal("the planning rank names a piece that this rank does not hold");
                let (whole, region) = match a.kind {
                    WireKind::Value => (true, None),
                    WireKind::WholePiece => (true, Some(region_of(pieces.get(a.local, a.piece).ok_or_else(unknown)?)?)),
                    WireKind::Part(numbers) => (false, Some(region_of(&numbers)?)),
                };
                Ok(Assigned { key: 0, local: a.local, piece: a.piece, whole, region })
            })
            .collect()
    }
}

impl Prepared {
    /// The whole plan, on the planning rank.
    pub(crate) fn global(&self) -> Option<&GlobalPlan> {
        self.plan.global.as_ref().map(|(_, global)| global.as_ref())
    }
}
