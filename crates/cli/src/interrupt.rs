//! Ctrl-C while something is being written: it stops at its next step and takes away what it had begun.

use std::sync::{Mutex, Once, PoisonError};

use reshard::Control;

static UNDER_WAY: Mutex<Vec<Control>> = Mutex::new(Vec::new());
static INSTALLED: Once = Once::new();

/// The code of a process that was interrupted and did not wait to tidy up.
const INTERRUPTED: i32 = 130;

/// Lets an interrupt cancel this work; a second one ends the process at once.
pub(crate) fn cancels(control: &Control) {
    UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner).push(control.clone());
    INSTALLED.call_once(|| {
        // Without a handler an interrupt ends the process, as it does for everything that only reads.
        drop(ctrlc::set_handler(|| {
            let work = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
            if work.iter().any(Control::is_cancelled) {
                std::process::exit(INTERRUPTED);
            }
            work.iter().for_each(Control::cancel);
        }));
    });
}
