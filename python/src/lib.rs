//! The extension module `reshard._reshard`: converts, lets go of the interpreter's lock, calls the engine, and decides
//! nothing. The package `reshard` around it is what people use.
#![deny(unsafe_code)]

mod checkpoint;
mod command;
mod errors;
mod files;
mod geometry;
mod group;
mod layout;
mod leaves;
mod load;
mod options;
mod records;
mod reports;
mod run;
mod save;
mod state;
mod steps;
mod tools;
mod tree;
mod value;
mod view;

use pyo3::prelude::*;

/// The module.
#[pymodule(gil_used = true)]
mod _reshard {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::checkpoint::{
        Checkpoint, Entry, RecordLocation, StoredChunk, StoredValue, ValueRecord, decode_record, dtype_names, dtype_sizes,
        is_complete,
    };
    #[pymodule_export]
    use crate::command::run_command;
    #[pymodule_export]
    use crate::files::{publish_file, rename_file};
    #[pymodule_export]
    use crate::layout::{HeldRegion, Placement, ShardLayout};
    #[pymodule_export]
    use crate::leaves::{Leaf, Piece};
    #[pymodule_export]
    use crate::load::{Loaded, load};
    #[pymodule_export]
    use crate::options::{Control, LoadOptions, PlanCache, Progress, SaveOptions};
    #[pymodule_export]
    use crate::records::{BegunSave, WrittenRecords, abandon_records, begin_records, publish_records, write_records};
    #[pymodule_export]
    use crate::save::{AsyncSaver, SaveHandle, save};
    #[pymodule_export]
    use crate::state::{
        Assigned, BoxCopy, BuiltSlot, FlatPart, FlatPiece, GatherPlan, KeptSlot, ModelEntry, NamedParameter, OptimizerLoad,
        OptimizerPlan, PlannedSlot, SlotPart, SlotPlan, StateModel, TensorDescription, TransferPart, TransferStep, ValueSource,
        broadcast_steps, flat_pieces, gather_plan, optimizer_state, optimizer_to_load, plan_slots, rekey_optimizer,
    };
    #[pymodule_export]
    use crate::steps::{Pruned, Step, StepFolder, is_address};
    #[pymodule_export]
    use crate::tools::looking::{diff, digest, health, prune, recover, scan, stats, trend};
    #[pymodule_export]
    use crate::tools::writing::{convert, edit, merge, relayout};
    #[pymodule_export]
    use crate::tools::{latest, steps, verify};
    #[pymodule_export]
    use crate::tree::{key_types, unflatten};
    #[pymodule_export]
    use crate::value::is_plain;
    #[pymodule_export]
    use crate::view::{View, recipes};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
