//! `reshard man [FOLDER]`: the manual, for whoever packages the command.

use std::io::Write;

use crate::args::{self, ManArgs};
use crate::failure::{Failure, Result};
use crate::verbs::{Context, Outcome};

pub(crate) fn run(context: &mut Context, args: &ManArgs) -> Result<Outcome> {
    let command = args::command();
    match &args.folder {
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command).render(&mut page)?;
            context.printer.out().write_all(&page)?;
        }
        Some(folder) => {
            let cannot =
                |error: std::io::Error| Failure::because(format!("cannot write manual pages into {}", folder.display()), &error);
            std::fs::create_dir_all(folder).map_err(cannot)?;
            clap_mangen::generate_to(command, folder).map_err(cannot)?;
            context.printer.note(format!("manual pages are in {}", folder.display()));
        }
    }
    Ok(Outcome::Fine)
}
