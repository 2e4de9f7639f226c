//! `reshard serve PATH`: the same page, live on loopback.

use std::io::Read;
use std::sync::Arc;

use crate::args::ServeArgs;
use crate::failure::{Failure, Result};
use crate::report::{ServeOptions, Server};
use crate::report_data::{self, Live, Wanted};
use crate::verbs::{Context, Outcome, report};

pub(crate) fn run(context: &mut Context, args: &ServeArgs) -> Result<Outcome> {
    let checkpoint = context.open_seen(&args.page.path, &args.page.view)?;
    let comparison = report::compared(context, &args.page)?;
    let wanted = Wanted { histograms: false, verify: args.page.verify, comparison };
    let (mut data, _) = report_data::collect(&checkpoint, &context.printer, &wanted)?;
    data.live = true;
    let options = ServeOptions { port: args.port, ..ServeOptions::default() };
    let server = Server::bind(&data, Arc::new(Live::new(checkpoint)), options)
        .map_err(|error| Failure::because("cannot serve", &error).hint("another --port may be free; 0 takes any"))?;
    // Whoever started this reads the address from here.
    context.printer.line(server.url())?;
    context.printer.finish()?;
    context.printer.note("serving until interrupted (Ctrl-C)");
    if args.until_stdin_ends {
        let stop = server.stop_handle();
        std::thread::spawn(move || {
            drop(std::io::stdin().read_to_end(&mut Vec::new()));
            stop.stop();
        });
    }
    server.run();
    Ok(Outcome::Fine)
}
