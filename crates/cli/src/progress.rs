//! A bar with throughput and time left, for work that takes longer than a second and is watched by people.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use reshard::Control;

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
    let bar = bar.with_elapsed(PATIENCE).with_message(what);
    let template = "{msg} {wide_bar:.cyan/dim} {percent:>3}%  {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
    }
    let start = Instant::now();
    loop {
        bar.set_length(control.total().max(control.done()));
        bar.set_position(control.done());
        if control.total() == 0 && start.elapsed() > PATIENCE {
            bar.tick();
        }
        if stopped.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    bar.finish_and_clear();
}
