//! A bar with throughput and time left, for work that takes longer than a second and is watched by people.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use reshard::Control;
use reshard::control::Phase;

use crate::printer::Printer;

/// Shorter work needs no bar.
const PATIENCE: Duration = Duration::from_secs(1);
const EVERY: Duration = Duration::from_millis(100);

/// Shows a [`Control`]'s progress until dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    stop: Option<Sender<()>>,
    watcher: Option<JoinHandle<()>>,
}

impl Progress {
    /// Watches `control`, if people watch stderr.
    pub(crate) fn watch(printer: &Printer, what: &str, control: &Control) -> Progress {
        if !printer.watched {
            return Progress { stop: None, watcher: None };
        }
        let (stop, stopped) = channel();
        let (control, what) = (control.clone(), what.to_owned());
        let watcher = std::thread::Builder::new().name("progress".to_owned()).spawn(move || show(&control, what, &stopped));
        // Without a thread there is no bar; the work itself does not depend on it.
        Progress { stop: Some(stop), watcher: watcher.ok() }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(watcher) = self.watcher.take() {
            drop(watcher.join());
        }
    }
}

fn show(control: &Control, what: String, stopped: &Receiver<()>) {
    if stopped.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout) {
        return;
    }
    let bar = ProgressBar::with_draw_target(Some(control.total()), ProgressDrawTarget::stderr_with_hz(10));
    let bar = bar.with_elapsed(PATIENCE).with_message(what.clone());
    let mut phase = Phase::Moving;
    bar.set_style(style(phase));
    let start = Instant::now();
    loop {
        let now = control.progress();
        bar.set_length(now.total);
        bar.set_position(now.done);
        if now.phase != phase {
            phase = now.phase;
            bar.set_style(style(phase));
            bar.set_message(match phase {
                Phase::Syncing => format!("{what}: syncing"),
                Phase::Finishing => format!("{what}: finishing"),
                _ => what.clone(),
            });
        }
        if control.total() == 0 && start.elapsed() > PATIENCE {
            bar.tick();
        }
        if stopped.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    bar.finish_and_clear();
}

/// Sizes as everywhere else: in units of 1000.
fn style(phase: Phase) -> ProgressStyle {
    let template = match phase {
        Phase::Finishing => "{msg} {spinner}  {decimal_total_bytes}  {elapsed}",
        _ => {
            "{msg} {wide_bar:.cyan/dim} {percent:>3}%  {decimal_bytes}/{decimal_total_bytes}  {decimal_bytes_per_sec}  {eta} left"
        }
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    style.progress_chars("█▉▊▋▌▍▎▏ ")
}
