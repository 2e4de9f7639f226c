//! Where output goes: data to stdout, everything else to stderr; colors only for eyes.

use std::borrow::Cow;
use std::io::{self, BufWriter, IsTerminal, Write};

use serde::Serialize;

use crate::failure::{Failure, Result};
use crate::human;

/// When to paint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ColorChoice {
    /// On terminals, unless NO_COLOR is set.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// A way to paint a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Paint {
    /// Names and headings.
    Bold,
    /// What matters less.
    Dim,
    /// Fine.
    Good,
    /// To know.
    Warn,
    /// Wrong.
    Bad,
    /// Numbers of interest, bars.
    Accent,
}

impl Paint {
    fn code(self) -> &'static str {
        match self {
            Paint::Bold => "1",
            Paint::Dim => "2",
            Paint::Good => "32",
            Paint::Warn => "33",
            Paint::Bad => "31",
            Paint::Accent => "36",
        }
    }
}

/// How the user wants to be spoken to, and the two streams.
#[derive(Debug)]
pub(crate) struct Printer {
    out: BufWriter<io::Stdout>,
    /// Whether stdout may be painted.
    pub(crate) color: bool,
    /// Whether stderr may be painted.
    pub(crate) error_color: bool,
    /// Whether people watch stderr, so that bars make sense.
    pub(crate) watched: bool,
    /// Whether people read stdout, who have no use for thousands of lines; programs get them all.
    pub(crate) read: bool,
    /// Only data and errors.
    pub(crate) quiet: bool,
    /// Columns of the terminal; a good width where there is none.
    pub(crate) width: usize,
    /// The columns that lines have to fit into; none for files and pipes, where nothing is cut.
    pub(crate) columns: Option<usize>,
    /// The same of stderr.
    error_columns: Option<usize>,
}

/// The width of text that is not for a terminal.
const PLAIN_WIDTH: usize = 100;

impl Printer {
    /// Looks at the streams and the environment.
    pub(crate) fn new(choice: ColorChoice, quiet: bool) -> Printer {
        let allowed = |terminal: bool| match choice {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            // https://no-color.org: set and not empty, whatever it says.
            ColorChoice::Auto => {
                let refused = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
                let dumb = std::env::var_os("TERM").is_some_and(|v| v == "dumb");
                terminal && !refused && !dumb
            }
        };
        let (out, err) = (io::stdout().is_terminal(), io::stderr().is_terminal());
        let asked: Option<usize> = std::env::var("COLUMNS").ok().and_then(|c| c.parse().ok());
        let fitting = |measured: Option<(terminal_size::Width, terminal_size::Height)>| {
            let measured = measured.map(|(terminal_size::Width(columns), _)| usize::from(columns));
            asked.or(measured).map(|columns| columns.clamp(40, 400))
        };
        let columns = fitting(out.then(terminal_size::terminal_size).flatten());
        let error_columns = fitting(err.then(|| terminal_size::terminal_size_of(io::stderr())).flatten());
        Printer {
            out: BufWriter::with_capacity(64 << 10, io::stdout()),
            color: allowed(out),
            error_color: allowed(err),
            watched: err && !quiet,
            read: out,
            quiet,
            width: columns.unwrap_or(PLAIN_WIDTH),
            columns,
            error_columns,
        }
    }

    /// The stream of data.
    pub(crate) fn out(&mut self) -> &mut impl Write {
        &mut self.out
    }

    /// One line of data. What has power over a terminal is escaped, but for our own paint; what is wider than the terminal
    /// goes on below between words.
    pub(crate) fn line(&mut self, text: impl AsRef<str>) -> Result<()> {
        let text = harmless(text.as_ref(), self.color);
        match self.columns {
            Some(columns) => Ok(writeln!(self.out, "{}", wrapped(&text, columns, true))?),
            None => Ok(writeln!(self.out, "{text}")?),
        }
    }

    /// Data as JSON, indented, followed by a newline.
    pub(crate) fn json(&mut self, value: &impl Serialize) -> Result<()> {
        serde_json::to_writer_pretty(&mut self.out, value)?;
        Ok(writeln!(self.out)?)
    }

    /// A remark that is not data.
    pub(crate) fn note(&mut self, text: impl AsRef<str>) {
        if !self.quiet {
            let text = harmless(text.as_ref(), self.error_color);
            self.tell(&format!("{text}\n"));
        }
    }

    /// A warning.
    pub(crate) fn warn(&mut self, text: impl AsRef<str>) {
        let label = if self.error_color { "\x1b[1;33mwarning:\x1b[0m" } else { "warning:" };
        let text = harmless(text.as_ref(), false);
        self.tell(&format!("{label} {text}\n"));
    }

    /// Tells of a failure.
    pub(crate) fn failure(&mut self, failure: &Failure) {
        let text = failure.text(self.error_color);
        self.tell(&text);
    }

    fn tell(&mut self, text: &str) {
        // Data first, so that a terminal shows things in their order. A stderr that is gone has no reader to miss it.
        drop(self.out.flush());
        let lines = text.split_inclusive('\n').map(|line| match (self.error_columns, line.strip_suffix('\n')) {
            (Some(columns), Some(line)) => format!("{}\n", wrapped(line, columns, false)),
            _ => line.to_owned(),
        });
        drop(io::stderr().write_all(lines.collect::<String>().as_bytes()));
    }

    /// Text for stdout, painted where that is welcome.
    pub(crate) fn paint(&self, paint: Paint, text: impl AsRef<str>) -> String {
        let text = text.as_ref();
        if self.color { format!("\x1b[{}m{text}\x1b[0m", paint.code()) } else { text.to_owned() }
    }

    /// Everything is written, or the reader left.
    pub(crate) fn finish(&mut self) -> Result<()> {
        Ok(self.out.flush()?)
    }
}

/// The text with every control character escaped except line ends, tabs and, where paint is welcome, paint: names of files
/// and folders reach the terminal through many doors, and this is the last one.
fn harmless(text: &str, paint: bool) -> Cow<'_, str> {
    let plain = |c: char| !c.is_control() || c == '\n' || c == '\t';
    if text.chars().all(plain) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let painted = if paint { paint_length(rest) } else { 0 };
        if painted > 0 {
            shown.push_str(&rest[..painted]);
            rest = &rest[painted..];
            continue;
        }
        match plain(c) {
            true => shown.push(c),
            false => shown.extend(c.escape_default()),
        }
        rest = &rest[c.len_utf8()..];
    }
    Cow::Owned(shown)
}

/// A line as lines of at most so many columns, cut between words; those that follow are indented. A word that no line can
/// hold is cut in its middle, or kept whole: the path in an error is what one needs of it.
fn wrapped(text: &str, columns: usize, cut: bool) -> Cow<'_, str> {
    if visible(text) <= columns {
        return Cow::Borrowed(text);
    }
    let indent = text.len() - text.trim_start_matches(' ').len();
    let below = " ".repeat((indent + 4).min(columns / 2));
    let mut lines = String::with_capacity(text.len() + 32);
    let mut used = 0;
    // A run of spaces belongs to the word after it, and is dropped where a line ends.
    let mut rest = text;
    while !rest.is_empty() {
        let spaces = rest.len() - rest.trim_start_matches(' ').len();
        let end = rest[spaces..].find(' ').map_or(rest.len(), |end| spaces + end);
        let (space, word) = (&rest[..spaces], &rest[spaces..end]);
        rest = &rest[end..];
        let mut width = visible(word);
        let mut word = Cow::Borrowed(word);
        if used > 0 && used + spaces + width > columns {
            lines.push('\n');
            lines.push_str(&below);
            used = below.len();
        } else {
            lines.push_str(space);
            used += spaces;
        }
        if cut && used + width > columns && !word.contains('\x1b') {
            word = Cow::Owned(human::shortened(&word, columns - used));
            width = visible(&word);
        }
        lines.push_str(&word);
        used += width;
    }
    Cow::Owned(lines)
}

/// Columns that a text takes, without its paint.
fn visible(text: &str) -> usize {
    let mut width = 0;
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        match paint_length(rest) {
            0 => {
                width += human::cells(c);
                rest = &rest[c.len_utf8()..];
            }
            painted => rest = &rest[painted..],
        }
    }
    width
}

/// How many bytes of a change of color the text starts with.
fn paint_length(text: &str) -> usize {
    let Some(codes) = text.strip_prefix("\x1b[") else { return 0 };
    match codes.find(|c: char| !c.is_ascii_digit() && c != ';') {
        Some(end) if codes[end..].starts_with('m') => end + 3,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_go_on_between_words() {
        assert_eq!(wrapped("short", 40, true), "short");
        let text = "  error: model.layers.0.weight, __0_0.distcp at byte 17: the checksum is another one";
        let lines = wrapped(text, 40, true);
        assert!(lines.lines().all(|line| visible(line) <= 40), "{lines}");
        assert_eq!(lines.split_whitespace().collect::<Vec<_>>(), text.split_whitespace().collect::<Vec<_>>());
        let long = format!("key {}", "x".repeat(100));
        assert!(wrapped(&long, 40, true).lines().all(|line| visible(line) <= 40) && wrapped(&long, 40, true).contains('…'));
        assert_eq!(visible("\x1b[31mbad\x1b[0m"), 3);
    }

    #[test]
    fn only_paint_passes_and_only_where_it_is_welcome() {
        let text = "\x1b[31mbad\x1b[0m \x1b]0;title\x07 \x1b[2Jä\n";
        assert_eq!(harmless(text, true), "\x1b[31mbad\x1b[0m \\u{1b}]0;title\\u{7} \\u{1b}[2Jä\n");
        assert!(!harmless(text, false).contains('\x1b'));
        assert!(matches!(harmless("plain ✓", false), Cow::Borrowed(_)));
    }
}
