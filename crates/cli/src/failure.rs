//! How a command fails: what went wrong, why, and what to do about it.

use std::error::Error;
use std::fmt;
use std::io;

use reshard::error::Caller;

use crate::human;

/// What every verb returns.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// Something that kept a command from doing its work.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    causes: Vec<String>,
    hint: Option<String>,
    reader_left: bool,
}

impl Failure {
    /// A failure of the command itself.
    pub(crate) fn new(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), causes: Vec::new(), hint: None, reader_left: false }
    }

    /// Adds advice.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }

    /// An error and its causes under a message of our own.
    pub(crate) fn because(message: impl Into<String>, error: &dyn Error) -> Failure {
        let mut failure = Failure::of(error);
        failure.causes.insert(0, std::mem::replace(&mut failure.message, message.into()));
        failure
    }

    fn of(error: &dyn Error) -> Failure {
        let mut failure = Failure::new(error.to_string());
        let mut cause = error.source();
        while let Some(next) = cause {
            failure.causes.push(next.to_string());
            cause = next.source();
        }
        failure
    }

    /// Whether whoever read our output went away: no reason to say anything.
    pub(crate) fn reader_left(&self) -> bool {
        self.reader_left
    }

    /// The message and its causes in one line.
    pub(crate) fn one_line(&self) -> String {
        safe(&std::iter::once(&self.message).chain(&self.causes).cloned().collect::<Vec<_>>().join(": "))
    }

    /// The whole text, labels painted when `color`.
    pub(crate) fn text(&self, color: bool) -> String {
        let label = |name: &str, code: &str| if color { format!("\x1b[1;{code}m{name}:\x1b[0m") } else { format!("{name}:") };
        // What takes several lines stays under its label.
        let below = |text: &str| safe(text).replace('\n', "\n    ");
        let mut text = format!("{} {}\n", label("error", "31"), safe(&self.message));
        for cause in &self.causes {
            text.push_str(&format!("  {} {}\n", label("caused by", "31"), below(cause)));
        }
        if let Some(hint) = &self.hint {
            text.push_str(&format!("  {} {}\n", label("hint", "36"), safe(hint)));
        }
        text
    }
}

/// Text for a terminal: what names of files hold is escaped, and what is secret in an address is hidden.
fn safe(text: &str) -> String {
    human::printable_lines(&reshard::storage::redacted(text))
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.one_line())
    }
}

impl From<reshard::Error> for Failure {
    fn from(error: reshard::Error) -> Failure {
        let hint = error.hint_for(Caller::Command);
        Failure { hint, ..Failure::of(&error) }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        let reader_left = error.kind() == io::ErrorKind::BrokenPipe;
        Failure { reader_left, ..Failure::because("cannot write the output", &error) }
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Failure {
        match error.io_error_kind() {
            Some(kind) => io::Error::from(kind).into(),
            None => Failure::because("cannot print this as JSON", &error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_and_hints_have_their_own_lines() {
        let io = io::Error::other("the disk is on fire");
        let failure = Failure::because("cannot do it", &io).hint("use water");
        assert_eq!(failure.text(false), "error: cannot do it\n  caused by: the disk is on fire\n  hint: use water\n");
        assert_eq!(failure.one_line(), "cannot do it: the disk is on fire");
        assert!(failure.text(true).starts_with("\u{1b}[1;31merror:"));
    }

    #[test]
    fn names_of_files_have_no_power_and_passwords_are_not_told() {
        let failure = Failure::new("\u{1b}]0;title\u{7} in s3://key:hush@bucket/a\nnext").hint("\u{9b}2J");
        let text = failure.text(false);
        assert_eq!(text, "error: \\u{1b}]0;title\\u{7} in s3://***@bucket/a\nnext\n  hint: \\u{9b}2J\n");
        assert!(!failure.one_line().contains("hush"));
    }

    #[test]
    fn a_reader_that_left_is_no_error_to_tell() {
        assert!(Failure::from(io::Error::from(io::ErrorKind::BrokenPipe)).reader_left());
        assert!(!Failure::from(io::Error::from(io::ErrorKind::StorageFull)).reader_left());
    }
}
