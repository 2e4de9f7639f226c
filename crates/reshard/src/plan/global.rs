//! Who writes each distinct region: the least loaded of its holders, ties by rank.

use std::collections::HashMap;
use std::sync::Arc;

use reshard_layout::{Region, coverage};

use super::local::{Holdings, TableEntry, dtype_of, take_region};
use crate::error::{Error, Result};

/// What the planning rank knows of one rank.
#[derive(Debug, Clone)]
pub(crate) struct RankPlan {
    pub(crate) table: Arc<Vec<TableEntry>>,
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
    /// What of the tensor, `None` for a value.
    pub(crate) region: Option<Region>,
}

/// The whole save, as the planning rank sees it.
#[derive(Debug, Clone)]
pub(crate) struct GlobalPlan {
    /// Every key once, in the order of first appearance by rank.
    pub(crate) table: Vec<TableEntry>,
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

#[derive(Debug)]
struct Held {
    region: Region,
    rank: u32,
    local: u32,
    piece: u32,
    content: Option<u64>,
}

/// A distinct region (or a value) and those who hold it.
struct Item {
    key: u32,
    region: Option<Region>,
    bytes: u64,
    /// (rank, position in its table, piece)
    holders: std::ops::Range<usize>,
}

/// Plans a save from what every rank holds.
pub(crate) fn plan(ranks: &[RankPlan], options: PlanOptions) -> Result<GlobalPlan> {
    let (table, mut held, value_holders) = collect(ranks)?;
    let mut holders: Vec<(u32, u32, u32)> = Vec::new();
    let mut items: Vec<Item> = Vec::with_capacity(held.iter().map(Vec::len).sum());
    for (key, entry) in table.iter().enumerate() {
        let key_id = id(key)?;
        match &entry.tensor {
            Some(tensor) => {
                let element = dtype_of(tensor.dtype)?.size();
                let held = &mut held[key];
                held.sort_by(|a, b| a.region.cmp(&b.region).then(a.rank.cmp(&b.rank)));
                let whole_is_empty = tensor.shape.contains(&0);
                let mut distinct = Vec::new();
                let mut start = 0;
                while start < held.len() {
                    let mut end = start + 1;
                    while end < held.len() && held[end].region == held[start].region {
                        end += 1;
                    }
                    let same = &held[start..end];
                    start = end;
                    let region = &same[0].region;
                    // An empty piece of a tensor that has elements says nothing; an empty tensor keeps one record.
                    if region.is_empty() && !(whole_is_empty && distinct.is_empty()) {
                        continue;
                    }
                    check_replicas(&entry.key, same)?;
                    let range = holders.len()..holders.len() + same.len();
                    holders.extend(same.iter().map(|h| (h.rank, h.local, h.piece)));
                    distinct.push(region.clone());
                    for part in split(region, element, same.len(), options.split_above)? {
                        let bytes = part.volume().saturating_mul(element);
                        items.push(Item { key: key_id, region: Some(part), bytes, holders: range.clone() });
                    }
                }
                check_coverage(&entry.key, &tensor.shape, &distinct, held)?;
            }
            None => {
                let same = &value_holders[key];
                if let Some(first) = same.first()
                    && let Some(other) = same.iter().find(|h| h.content != first.content)
                {
                    return Err(differs(&entry.key, first.rank, other.rank, "value"));
                }
                let range = holders.len()..holders.len() + same.len();
                holders.extend(same.iter().map(|h| (h.rank, h.local, 0)));
                items.push(Item { key: key_id, region: None, bytes: VALUE_BYTES, holders: range });
            }
        }
    }
    assign(table, items, &holders, ranks.len())
}

/// The global table, and for each of its keys who holds what.
#[allow(clippy::type_complexity)]
fn collect(ranks: &[RankPlan]) -> Result<(Vec<TableEntry>, Vec<Vec<Held>>, Vec<Vec<Held>>)> {
    let mut table: Vec<TableEntry> = Vec::new();
    let mut by_key: HashMap<String, usize> = HashMap::new();
    let mut held: Vec<Vec<Held>> = Vec::new();
    let mut values: Vec<Vec<Held>> = Vec::new();
    let mut previous: Option<(&Arc<Vec<TableEntry>>, Vec<usize>)> = None;
    for (rank, plan) in ranks.iter().enumerate() {
        let positions = match &previous {
            Some((table, positions)) if Arc::ptr_eq(table, &plan.table) => positions.clone(),
            _ => {
                let mut positions = Vec::with_capacity(plan.table.len());
                for entry in plan.table.iter() {
                    let position = match by_key.get(&entry.key) {
                        Some(&position) => {
                            check_same(&table[position], entry, rank)?;
                            position
                        }
                        None => {
                            by_key.insert(entry.key.clone(), table.len());
                            table.push(entry.clone());
                            held.push(Vec::with_capacity(if entry.tensor.is_some() { ranks.len() } else { 0 }));
                            values.push(Vec::new());
                            table.len() - 1
                        }
                    };
                    positions.push(position);
                }
                positions
            }
        };
        let rank_id = id(rank)?;
        let mut numbers = plan.holdings.numbers.as_slice();
        let mut counts = plan.holdings.counts.iter();
        let mut contents = plan.contents.as_ref().map(|c| c.iter().copied());
        let mut next_content = || contents.as_mut().and_then(Iterator::next);
        for (local, (entry, &position)) in plan.table.iter().zip(&positions).enumerate() {
            let local = id(local)?;
            match &entry.tensor {
                Some(tensor) => {
                    let count = *counts.next().ok_or_else(|| Error::invalid(format!("the plan of rank {rank} ends early")))?;
                    for piece in 0..count {
                        let region = take_region(&mut numbers, tensor.shape.len())?;
                        held[position].push(Held { region, rank: rank_id, local, piece, content: next_content() });
                    }
                }
                None => {
                    let region = Region::whole(&[])?;
                    values[position].push(Held { region, rank: rank_id, local, piece: 0, content: next_content() });
                }
            }
        }
        previous = Some((&plan.table, positions));
    }
    Ok((table, held, values))
}

fn check_same(known: &TableEntry, entry: &TableEntry, rank: usize) -> Result<()> {
    match (&known.tensor, &entry.tensor) {
        (None, None) => Ok(()),
        (Some(a), Some(b)) if a.dtype == b.dtype && a.shape == b.shape => Ok(()),
        (Some(a), Some(b)) => Err(Error::invalid(format!(
            "ranks disagree on {:?}: {} of shape {:?} on an earlier rank, {} of shape {:?} on rank {rank}",
            entry.key,
            dtype_of(a.dtype)?.name(),
            a.shape,
            dtype_of(b.dtype)?.name(),
            b.shape,
        ))),
        _ => Err(Error::invalid(format!("{:?} is a tensor on some ranks and a value on others (rank {rank})", entry.key))),
    }
}

fn check_replicas(key: &str, same: &[Held]) -> Result<()> {
    let Some(first) = same.first() else { return Ok(()) };
    match same.iter().find(|h| h.content != first.content) {
        Some(other) => Err(differs(key, first.rank, other.rank, &format!("region {}", first.region))),
        None => Ok(()),
    }
}

fn differs(key: &str, first: u32, other: u32, what: &str) -> Error {
    Error::invalid(format!(
        "the {what} of {key:?} differs between rank {first} and rank {other}, although it is declared the same on both; \
         save it per rank, or find out why the replicas drifted apart"
    ))
}

fn check_coverage(key: &str, shape: &[u64], distinct: &[Region], held: &[Held]) -> Result<()> {
    if let [only] = distinct
        && only.sizes() == shape
    {
        return Ok(());
    }
    let found = coverage(shape, distinct)?;
    if found.is_exact() {
        return Ok(());
    }
    if let Some(gap) = found.gaps.first() {
        return Err(Error::invalid(format!(
            "no rank holds {gap} of {key:?} (shape {shape:?}); every element must be held by some rank"
        )));
    }
    let holder = |region: &Region| held.iter().find(|h| h.region == *region).map_or(0, |h| h.rank);
    match found.overlaps.first() {
        Some(overlap) => {
            let (a, b) = (&distinct[overlap.first], &distinct[overlap.second]);
            Err(Error::invalid(format!(
                "two pieces of {key:?} overlap: {a} on rank {} and {b} on rank {}; equal regions are replicas, others must be disjoint",
                holder(a),
                holder(b),
            )))
        }
        None => Err(Error::invalid(format!("the pieces of {key:?} do not tile its shape {shape:?}"))),
    }
}

/// Cuts a large replicated region into parts of whole rows, so that several holders share the writing.
fn split(region: &Region, element: u64, holders: usize, above: u64) -> Result<Vec<Region>> {
    let bytes = region.volume().saturating_mul(element);
    if holders < 2 || bytes <= above || above == 0 {
        return Ok(vec![region.clone()]);
    }
    let Some(dim) = region.sizes().iter().position(|&size| size > 1) else {
        return Ok(vec![region.clone()]);
    };
    let rows = region.sizes()[dim];
    let parts = bytes.div_ceil(above).min(holders as u64).min(rows);
    let step = rows.div_ceil(parts);
    let mut cut = Vec::new();
    let mut row = 0;
    while row < rows {
        let count = step.min(rows - row);
        let mut offsets = reshard_layout::Dims::from_slice(region.offsets());
        let mut sizes = reshard_layout::Dims::from_slice(region.sizes());
        offsets[dim] += row;
        sizes[dim] = count;
        cut.push(Region::new(&offsets, &sizes)?);
        row += count;
    }
    Ok(cut)
}

fn assign(table: Vec<TableEntry>, items: Vec<Item>, holders: &[(u32, u32, u32)], ranks: usize) -> Result<GlobalPlan> {
    let mut loads = vec![0u64; ranks];
    // What only one rank holds is not a choice: it is the load on which the rest is balanced, large to small.
    let mut choices: Vec<usize> = Vec::new();
    let mut winner: Vec<usize> = vec![0; items.len()];
    for (i, item) in items.iter().enumerate() {
        match &holders[item.holders.clone()] {
            [] => return Err(Error::invalid("a planned item has no holder")),
            [(rank, ..)] => {
                loads[*rank as usize] += item.bytes;
                winner[i] = item.holders.start;
            }
            _ => choices.push(i),
        }
    }
    choices.sort_by_key(|&i| std::cmp::Reverse(items[i].bytes));
    for i in choices {
        let range = items[i].holders.clone();
        let best = range.min_by_key(|&h| (loads[holders[h].0 as usize], holders[h].0)).unwrap_or(items[i].holders.start);
        loads[holders[best].0 as usize] += items[i].bytes;
        winner[i] = best;
    }
    let mut assigned: Vec<Vec<Assigned>> = vec![Vec::new(); ranks];
    let mut values: Vec<Vec<Assigned>> = vec![Vec::new(); ranks];
    let mut tensor_bytes = vec![0u64; ranks];
    for (item, winner) in items.into_iter().zip(winner) {
        let (rank, local, piece) = holders[winner];
        let list = if item.region.is_some() { &mut assigned } else { &mut values };
        tensor_bytes[rank as usize] += if item.region.is_some() { item.bytes } else { 0 };
        list[rank as usize].push(Assigned { key: item.key, local, piece, region: item.region });
    }
    for (tensors, values) in assigned.iter_mut().zip(values) {
        tensors.extend(values);
    }
    Ok(GlobalPlan { table, assigned, loads: tensor_bytes })
}

fn id(position: usize) -> Result<u32> {
    u32::try_from(position).map_err(|_| Error::invalid("more than 4 billion keys or ranks"))
}
