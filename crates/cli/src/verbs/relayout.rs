//! `reshard relayout SRC DST --mesh … --rule …`: the same, cut for other ranks.

use reshard::relayout::relayout;
use reshard::storage::Address;

use super::convert::{Converted, print};
use crate::args::RelayoutArgs;
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::meaning;
use crate::progress::Progress;
use crate::verbs::{Context, Outcome};

pub(crate) fn run(context: &mut Context, args: &RelayoutArgs) -> Result<Outcome> {
    let layout = meaning::layout(&mut context.printer, &args.layout)?;
    let options = meaning::convert_options(&args.write.keys, &args.write.cast, &args.write.write)?;
    let source = context.open_seen(&args.source, &args.view)?;
    meaning::all_used(&source, &options.selection)?;
    meaning::used(&source, options.casts.unmatched(&options.selection, &source))?;
    meaning::used(&source, layout.unmatched(&options.selection, &source))?;
    let store = context.store(&args.destination)?;
    let report = {
        interrupt::cancels(&options.control);
        let _bar = Progress::watch(&context.printer, "relayout", &options.control);
        relayout(&source, &store, &layout, &options)?
    };
    if args.output.json {
        context.printer.json(&Converted { schema: 1, report: &report })?;
    } else {
        print(&mut context.printer, &report)?;
    }
    Ok(Outcome::Fine)
}

impl Context {
    /// Opens a path to write a folder into, or to look at without opening a checkpoint.
    pub(crate) fn store(&self, path: &str) -> Result<std::sync::Arc<dyn reshard::storage::Store>> {
        let cannot = |error: reshard::storage::StorageError| Failure::because(format!("cannot open {path}"), &error);
        let address = Address::parse(path).map_err(cannot)?;
        reshard::storage::open(&address, &self.open.store).map_err(cannot)
    }
}
