//! `reshard serve PATH`: the same page, live on loopback.

use std::io::Read;
use std::sync::Arc;

use crate::args::ServeArgs;
use crate::failure::{Failure, Result};
use crate::report::{Check, CheckState, Health, HealthState, ServeOptions, Server};
use crate::report_data::{self, Collected, Live, Wanted};
use crate::verbs::{Context, Outcome, report};

pub(crate) fn run(context: &mut Context, args: &ServeArgs) -> Result<Outcome> {
    let checkpoint = Arc::new(context.open_seen(&args.page.path, &args.page.view)?);
    let limits = args.page.numbers()?;
    let comparison = report::compared(context, &args.page)?;
    let other = comparison.as_ref().map(|comparison| Arc::clone(&comparison.other));
    let wanted = Wanted { numbers: None, verify: args.page.verify, comparison };
    let Collected { mut data, places } = report_data::collect(&checkpoint, &context.printer, &wanted)?;
    data.live = true;
    let live = Live::new(Arc::clone(&checkpoint));
    // What is damaged has no numbers to speak of.
    let is_whole = |health: &Health| health.state != HealthState::Damaged;
    if let Some(limits) = limits.filter(|_| is_whole(&data.checkpoint.health)) {
        let other_health = data.other_health.as_mut().filter(|health| is_whole(health));
        let other = other.zip(other_health.as_deref().cloned());
        live.scan(other, places, limits, data.checkpoint.health.clone());
        for health in [Some(&mut data.checkpoint.health), other_health].into_iter().flatten() {
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
