//! Offline re-layout: the same checkpoint cut for another mesh of ranks, so that a later load reads whole files; and the
//! same as a dry run.

mod estimate;
mod rules;

use std::sync::Arc;
use std::time::Instant;

pub use estimate::{LoadEstimate, RankEstimate, estimate_load};
use reshard_layout::{Placement, Region, holders};
use reshard_storage::Store;
pub use rules::{Layout, LayoutRule};

use crate::checkpoint::{Checkpoint, Format};
use crate::convert::dcp::{RankPiece, write_dcp};
use crate::convert::output::{OutputOptions, PlanTensor};
use crate::convert::{ConvertOptions, ConvertReport, Destination, Target, plan_of, verify_cut};
use crate::error::{Error, Result};

/// Writes a checkpoint again, as the ranks of a layout would have saved it. When it fails, the destination is as it was.
pub fn relayout(
    source: &Checkpoint,
    destination: &Arc<dyn Store>,
    layout: &Layout,
    options: &ConvertOptions,
) -> Result<ConvertReport> {
    let span = tracing::info_span!("relayout", from = source.path(), to = destination.describe());
    let _entered = span.enter();
    let start = Instant::now();
    if !options.overwrite {
        Destination::folder(destination.clone()).check_free(Target::Dcp { ranks: 1 })?;
    }
    let planned = plan_of(source, options, Format::Dcp)?;
    let pieces = layout.pieces(&planned.plan.tensors)?;
    verify_cut(&planned.plan, &[source], &pieces, options)?;
    let output = OutputOptions::new(options.sync, &options.control, &[source]);
    let ranks = layout.ranks() as usize;
    let written = write_dcp(&planned.plan, &pieces, ranks, options.overwrite, destination, &output)?;
    Ok(planned.report(source, destination.describe(), Format::Dcp, written, start))
}

impl Layout {
    /// Who writes what: each distinct region once, by the least loaded of those who hold it.
    pub(crate) fn pieces(&self, tensors: &[PlanTensor]) -> Result<Vec<RankPiece>> {
        let mut loads = vec![0u64; self.ranks() as usize];
        let mut pieces = Vec::with_capacity(tensors.len());
        for (i, tensor) in tensors.iter().enumerate() {
            let placements = self.placements(&tensor.key, tensor.shape.len())?;
            let found =
                holders(self.mesh(), &placements, &tensor.shape).map_err(|e| Error::invalid(format!("{:?}: {e}", tensor.key)))?;
            let empty = tensor.shape.contains(&0);
            let mut wrote = false;
            for (region, ranks) in found {
                // An empty piece of a tensor that has elements says nothing; an empty tensor keeps one record.
                if region.is_empty() && (!empty || wrote) {
                    continue;
                }
                let region = if empty { Region::whole(&tensor.shape)? } else { region };
                let least = ranks
                    .iter()
                    .filter_map(|&r| usize::try_from(r).ok())
                    .filter(|&r| r < loads.len())
                    .min_by_key(|&r| (loads[r], r));
                let rank = least.ok_or_else(|| Error::internal(format!("no rank holds {region} of {:?}", tensor.key)))?;
                loads[rank] += region.volume().saturating_mul(tensor.dtype.size()).max(1);
                pieces.push(RankPiece { rank, tensor: i, region });
                wrote = true;
            }
        }
        Ok(pieces)
    }
}

/// The text of placements, as rules write them.
pub(crate) fn placements_text(placements: &[Placement]) -> String {
    let one = |placement: &Placement| match placement {
        Placement::Replicate => "R".to_owned(),
        Placement::Shard(dim) => format!("S({dim})"),
        other => format!("{other:?}"),
    };
    placements.iter().map(one).collect::<Vec<_>>().join(",")
}
