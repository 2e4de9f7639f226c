//! Offline resharding: the same checkpoint written for another device mesh, so that a later load reads whole files; and a dry
//! run of a load.
//!
//! ```
//! # let path = "../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint";
//! use reshard::mesh::Layout;
//! use reshard::relayout::estimate_load;
//!
//! let layout = Layout::parse("dp=2,tp=2", &["*.weight=R,S(0)"])?;
//! let estimate = estimate_load(&reshard::Checkpoint::open(path)?, &layout, &Default::default())?;
//! println!("rank 0 reads {} bytes", estimate.ranks[0].bytes);
//! # Ok::<(), reshard::Error>(())
//! ```

mod estimate;

use std::sync::Arc;
use std::time::Instant;

pub use estimate::{LoadEstimate, RankEstimate, estimate_load};
use reshard_storage::Store;

use crate::checkpoint::{Checkpoint, Format};
use crate::convert::dcp::write_dcp;
use crate::convert::output::OutputOptions;
use crate::convert::{ConvertOptions, ConvertReport, Destination, Target, plan_of, verify_cut, verify_seen};
use crate::error::Result;
use crate::mesh::Layout;

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
    let pieces = planned.plan.pieces(layout)?;
    verify_seen(&planned.plan, &[source], options)?;
    verify_cut(&planned.plan, &[source], &pieces, options)?;
    let output = OutputOptions::new(options.sync, &options.control, &[source]).compressed(options.compression);
    let ranks = layout.ranks() as usize;
    let written = write_dcp(&planned.plan, &pieces, ranks, options.overwrite, destination, &output)?;
    Ok(planned.report(source, destination.describe(), Format::Dcp, written, start))
}
