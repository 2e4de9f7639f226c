//! `reshard serve PATH`: the same page, live on loopback.

use std::io::Read;
use std::sync::Arc;

use crate::args::ServeArgs;
use crate::failure::{Failure, Result};
use crate::report::{Check, CheckState, HealthState, ServeOptions, Server};
use crate::report_data::{self, Collected, Live, Wanted};
use crate::verbs::{Context, Outcome, report};

pub(crate) fn run(context: &mut Context, args: &ServeArgs) -> Result<Outcome> {
    let checkpoint = Arc::new(context.open_seen(&args.page.path, &args.page.view)?);
    let limits = args.page.numbers()?;
    let comparison = report::compared(context, &args.page)?;
    let wanted = Wanted { numbers: None, verify: args.page.verify, comparison, compare_later: true };
    let Collected { mut data, places } = report_data::collect(&checkpoint, &context.printer, &wanted)?;
    data.live = true;
    let live = Live::new(Arc::clone(&checkpoint));
    // What is damaged has no numbers to speak of.
    let limits = limits.filter(|_| data.checkpoint.health.state != HealthState::Damaged);
    if limits.is_some() || data.comparing {
        let with_numbers = limits.is_some();
        let other = wanted.comparison.zip(data.other_health.clone());
        live.scan(other, places, limits, data.checkpoint.health.clone());
        let mut healths = [Some(&mut data.checkpoint.health), data.other_health.as_mut()];
        for health in healths.iter_mut().flatten().filter(|health| with_numbers && health.state != HealthState::Damaged) {
            health.checks.numbers = Check::new(CheckState::Running, "being read");
        }
    }
    let options = ServeOptions { port: args.port, ..ServeOptions::default() };
    let server = Server::bind(&data, Arc::new(live), options)
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
