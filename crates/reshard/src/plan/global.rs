//! Who writes each distinct region: the least loaded of its holders, ties by rank.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use reshard_formats::own::KeyEntry;
use reshard_layout::{Region, coverage};

use super::local::{Holdings, region_of};
use crate::error::{Error, Geometry, Result};

/// What the planning rank knows of one rank.
#[derive(Debug, Clone)]
pub(crate) struct RankPlan {
    pub(crate) table: Arc<Vec<KeyEntry>>,
    pub(crate) holdings: Holdings,
    /// Hashes of the content of every piece, then of every value, in table order; only in the checking mode.
    pub(crate) contents: Option<Vec<u64>>,
}

/// One record that a rank is to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Assigned {
    /// Position in the global table.
    pub(crate) key: u32,
    /// Position in the writer's own table.
    pub(crate) local: u32,
    /// Which of the writer's pieces; unused for a value.
    pub(crate) piece: u32,
    /// Whether the region is the whole piece.
    pub(crate) whole: bool,
    /// What of the tensor, `None` for a value.
    pub(crate) region: Option<Region>,
}

/// The whole save, as the planning rank sees it.
#[derive(Debug, Clone)]
pub(crate) struct GlobalPlan {
    /// Every key once, in the order of first appearance by rank.
    pub(crate) table: Arc<Vec<KeyEntry>>,
    /// What each rank writes, in table order: tensors first, then values.
    pub(crate) assigned: Vec<Vec<Assigned>>,
    /// Bytes of tensor data that each rank writes.
    pub(crate) loads: Vec<u64>,
}

/// How to plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlanOptions {
    /// Replicated regions of more bytes than this are split between their holders.
    pub(crate) split_above: u64,
}

/// A value's share of the load: a record's fixed cost.
const VALUE_BYTES: u64 = 1024;

/// One rank's piece of a tensor, or its copy of a value.
#[derive(Debug, Clone, Copy)]
struct Held<'p> {
    /// Offsets then sizes, as they came; their order is that of regions. Nothing for a value.
    numbers: &'p [u64],
    rank: u32,
    local: u32,
    piece: u32,
    content: Option<u64>,
}

/// A distinct region (or a value) and those who hold it.
struct Item {
    key: u32,
    region: Option<Region>,
    /// Whether that is all of the holders' pieces.
    whole: bool,
    bytes: u64,
    /// Positions in the list of holders.
    holders: Range<usize>,
}

/// Plans a save from what every rank holds.
pub(crate) fn plan(ranks: &[RankPlan], options: PlanOptions) -> Result<GlobalPlan> {
    let keys = Keys::of(ranks)?;
    let (mut held, starts) = keys.collect(ranks)?;
    let mut items: Vec<Item> = Vec::with_capacity(held.len());
    let mut distinct: Vec<Region> = Vec::new();
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (key, entry) in keys.table.iter().enumerate() {
        let key_id = id(key)?;
        let own = starts[key]..starts[key + 1];
        let Some(tensor) = &entry.tensor else {
            check_values(&entry.key, &held[own.clone()])?;
            items.push(Item { key: key_id, region: None, whole: true, bytes: VALUE_BYTES, holders: own });
            continue;
        };
        let element = tensor.dtype.size();
        held[own.clone()].sort_by(|a, b| a.numbers.cmp(b.numbers).then(a.rank.cmp(&b.rank)));
        distinct.clear();
        ranges.clear();
        let mut start = own.start;
        for same in held[own.clone()].chunk_by(|a, b| a.numbers == b.numbers) {
            let range = start..start + same.len();
            start = range.end;
            let region = region_of(same[0].numbers)?;
            // What is empty has a record as well, as in PyTorch's files: it tells over how many ranks a tensor was cut.
            check_replicas(&entry.key, &region, same)?;
            distinct.push(region);
            ranges.push(range);
        }
        check_coverage(&entry.key, &tensor.shape, &distinct, &held[own])?;
        for (region, holders) in distinct.drain(..).zip(ranges.drain(..)) {
            let bytes = region.volume().saturating_mul(element);
            if holders.len() < 2 || bytes <= options.split_above || options.split_above == 0 {
                items.push(Item { key: key_id, region: Some(region), whole: true, bytes, holders });
                continue;
            }
            // Several holders share the writing of a large one.
            for part in region.cut_rows(bytes.div_ceil(options.split_above).min(holders.len() as u64)) {
                let (whole, bytes) = (part == region, part.volume().saturating_mul(element));
                items.push(Item { key: key_id, region: Some(part), whole, bytes, holders: holders.clone() });
            }
        }
    }
    assign(keys.table, items, &held, ranks.len())
}

/// The keys of all ranks.
struct Keys {
    /// Every key once.
    table: Arc<Vec<KeyEntry>>,
    /// For each rank where its own keys are in that table; `None` when its table is that table.
    positions: Vec<Option<Arc<Vec<usize>>>>,
}

impl Keys {
    fn of(ranks: &[RankPlan]) -> Result<Keys> {
        let Some(first) = ranks.first().map(|rank| &rank.table) else {
            return Err(Error::internal("there are no ranks to plan for"));
        };
        if ranks.iter().all(|rank| Arc::ptr_eq(&rank.table, first)) {
            return Ok(Keys { table: Arc::clone(first), positions: vec![None; ranks.len()] });
        }
        let mut table: Vec<KeyEntry> = Vec::new();
        let mut by_key: HashMap<&str, usize> = HashMap::new();
        let mut of_first: Option<Arc<Vec<usize>>> = None;
        let mut positions = Vec::with_capacity(ranks.len());
        for (rank, plan) in ranks.iter().enumerate() {
            // Ranks whose table is that of rank 0 come as one; others are rarely alike.
            if let Some(same) = of_first.as_ref().filter(|_| Arc::ptr_eq(first, &plan.table)) {
                positions.push(Some(Arc::clone(same)));
                continue;
            }
            let mut own = Vec::with_capacity(plan.table.len());
            for entry in plan.table.iter() {
                let position = *by_key.entry(&entry.key).or_insert(table.len());
                match table.get(position) {
                    Some(known) => check_same(known, entry, rank)?,
                    None => table.push(entry.clone()),
                }
                own.push(position);
            }
            let own = Arc::new(own);
            of_first.get_or_insert_with(|| Arc::clone(&own));
            positions.push(Some(own));
        }
        Ok(Keys { table: Arc::new(table), positions })
    }

    /// Everything that is held, by key, and where each key's part of it starts.
    fn collect<'p>(&self, ranks: &'p [RankPlan]) -> Result<(Vec<Held<'p>>, Vec<usize>)> {
        let mut starts = vec![0usize; self.table.len() + 1];
        self.each(ranks, |key, _| starts[key + 1] += 1)?;
        for key in 0..self.table.len() {
            starts[key + 1] += starts[key];
        }
        let nothing = Held { numbers: &[], rank: 0, local: 0, piece: 0, content: None };
        let mut held = vec![nothing; starts.last().copied().unwrap_or(0)];
        let mut next = starts.clone();
        self.each(ranks, |key, piece| {
            held[next[key]] = piece;
            next[key] += 1;
        })?;
        Ok((held, starts))
    }

    /// Every piece and value of every rank, with the position of its key.
    fn each<'p>(&self, ranks: &'p [RankPlan], mut each: impl FnMut(usize, Held<'p>)) -> Result<()> {
        for (rank, (plan, positions)) in ranks.iter().zip(&self.positions).enumerate() {
            let early = || Error::internal(format!("the plan of rank {rank} ends early"));
            let rank_id = id(rank)?;
            let mut numbers = plan.holdings.numbers.as_slice();
            let mut counts = plan.holdings.counts.iter();
            let mut contents = plan.contents.as_ref().map(|c| c.iter().copied());
            let mut next_content = || contents.as_mut().and_then(Iterator::next);
            for (local, entry) in plan.table.iter().enumerate() {
                let position = positions.as_ref().map_or(local, |positions| positions[local]);
                let local = id(local)?;
                let Some(tensor) = &entry.tensor else {
                    each(position, Held { numbers: &[], rank: rank_id, local, piece: 0, content: next_content() });
                    continue;
                };
                for piece in 0..*counts.next().ok_or_else(early)? {
                    let (own, rest) = numbers.split_at_checked(2 * tensor.shape.len()).ok_or_else(early)?;
                    numbers = rest;
                    each(position, Held { numbers: own, rank: rank_id, local, piece, content: next_content() });
                }
            }
        }
        Ok(())
    }
}

fn check_same(known: &KeyEntry, entry: &KeyEntry, rank: usize) -> Result<()> {
    match (&known.tensor, &entry.tensor) {
        (None, None) => Ok(()),
        (Some(a), Some(b)) if a.dtype == b.dtype && a.shape == b.shape => Ok(()),
        (Some(a), Some(b)) => Err(Error::invalid(format!(
            "ranks disagree on {:?}: {} of shape {:?} on an earlier rank, {} of shape {:?} on rank {rank}",
            entry.key,
            a.dtype.name(),
            a.shape,
            b.dtype.name(),
            b.shape,
        ))),
        _ => Err(Error::invalid(format!("{:?} is a tensor on some ranks and a value on others (rank {rank})", entry.key))),
    }
}

fn check_replicas(key: &str, region: &Region, same: &[Held<'_>]) -> Result<()> {
    match drifted(same) {
        Some((first, other)) => Err(differs(key, first, other, &format!("region {region}"))),
        None => Ok(()),
    }
}

fn check_values(key: &str, same: &[Held<'_>]) -> Result<()> {
    match drifted(same) {
        Some((first, other)) => Err(differs(key, first, other, "value")),
        None => Ok(()),
    }
}

/// The first rank, and one whose content is another.
fn drifted(same: &[Held<'_>]) -> Option<(u32, u32)> {
    let first = same.first()?;
    same.iter().find(|held| held.content != first.content).map(|other| (first.rank, other.rank))
}

fn differs(key: &str, first: u32, other: u32, what: &str) -> Error {
    Error::invalid(format!(
        "the {what} of {key:?} differs between rank {first} and rank {other}, although it is declared the same on both; \
         save it per rank, or find out why the replicas drifted apart"
    ))
}

fn check_coverage(key: &str, shape: &[u64], distinct: &[Region], held: &[Held<'_>]) -> Result<()> {
    if let [only] = distinct
        && only.sizes() == shape
    {
        return Ok(());
    }
    let found = coverage(shape, distinct).proven()?;
    if found.is_exact() {
        return Ok(());
    }
    if let Some(gap) = found.gaps.first() {
        return Err(Error::invalid(format!(
            "no rank holds {gap} of {key:?} (shape {shape:?}); every element must be held by some rank"
        )));
    }
    let holder = |region: &Region| held.iter().find(|h| region_of(h.numbers).ok().as_ref() == Some(region)).map_or(0, |h| h.rank);
    match found.overlaps.first() {
        Some(overlap) => {
            let (a, b) = (&distinct[overlap.first], &distinct[overlap.second]);
            Err(Error::invalid(format!(
                "two pieces of {key:?} overlap: {a} on rank {} and {b} on rank {}; equal regions are replicas, others must be disjoint",
                holder(a),
                holder(b),
            )))
        }
        None => Err(Error::internal(format!("the pieces of {key:?} do not tile its shape {shape:?}"))),
    }
}

fn assign(table: Arc<Vec<KeyEntry>>, items: Vec<Item>, holders: &[Held<'_>], ranks: usize) -> Result<GlobalPlan> {
    let mut loads = vec![0u64; ranks];
    // What only one rank holds is not a choice: it is the load on which the rest is balanced, large to small.
    let mut choices: Vec<usize> = Vec::new();
    let mut winner: Vec<usize> = vec![0; items.len()];
    for (i, item) in items.iter().enumerate() {
        match &holders[item.holders.clone()] {
            [] => return Err(Error::internal("a planned item has no holder")),
            [only] => {
                loads[only.rank as usize] += item.bytes;
                winner[i] = item.holders.start;
            }
            _ => choices.push(i),
        }
    }
    choices.sort_by_key(|&i| std::cmp::Reverse(items[i].bytes));
    for i in choices {
        let range = items[i].holders.clone();
        let best = range.min_by_key(|&h| (loads[holders[h].rank as usize], holders[h].rank)).unwrap_or(items[i].holders.start);
        loads[holders[best].rank as usize] += items[i].bytes;
        winner[i] = best;
    }
    let mut assigned: Vec<Vec<Assigned>> = vec![Vec::new(); ranks];
    let mut values: Vec<Vec<Assigned>> = vec![Vec::new(); ranks];
    let mut tensor_bytes = vec![0u64; ranks];
    for (item, winner) in items.into_iter().zip(winner) {
        let Held { rank, local, piece, .. } = holders[winner];
        let list = if item.region.is_some() { &mut assigned } else { &mut values };
        tensor_bytes[rank as usize] += if item.region.is_some() { item.bytes } else { 0 };
        list[rank as usize].push(Assigned { key: item.key, local, piece, whole: item.whole, region: item.region });
    }
    for (tensors, values) in assigned.iter_mut().zip(values) {
        tensors.extend(values);
    }
    Ok(GlobalPlan { table, assigned, loads: tensor_bytes })
}

fn id(position: usize) -> Result<u32> {
    u32::try_from(position).map_err(|_| Error::exhausted("more than 4 billion keys or ranks"))
}
