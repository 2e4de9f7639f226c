//! Numbers and shapes as people read them.

use std::cmp::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use unicode_width::UnicodeWidthChar;

/// `17.9 kB`: three digits and a decimal unit; exact below 1000.
pub(crate) fn bytes(count: u64) -> String {
    scaled(count, &["B", "kB", "MB", "GB", "TB", "PB", "EB"])
}

/// `4.21 M`: like [`bytes`], for things that have no unit.
pub(crate) fn amount(count: u64) -> String {
    scaled(count, &["", "k", "M", "B", "T", "P", "E"]).trim_end().to_owned()
}

fn scaled(count: u64, units: &[&str; 7]) -> String {
    if count < 1000 {
        return format!("{count} {}", units[0]);
    }
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {}", units[unit])
}

/// `12,345`: exact, in groups of three.
pub(crate) fn exact(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 file`, `3 files`.
pub(crate) fn count(count: u64, one: &str) -> String {
    let text = exact(count);
    match (count, one.strip_suffix('y')) {
        (1, _) => format!("{text} {one}"),
        (_, Some(stem)) if !one.ends_with("ay") && !one.ends_with("ey") => format!("{text} {stem}ies"),
        _ => format!("{text} {one}s"),
    }
}

/// `[128, 4096]`, and `scalar` for no dimensions.
pub(crate) fn shape(shape: &[u64]) -> String {
    if shape.is_empty() {
        return "scalar".to_owned();
    }
    format!("[{}]", shape.iter().map(u64::to_string).collect::<Vec<_>>().join(", "))
}

/// `66.7%`.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "0%".to_owned() } else { format!("{:.1}%", part as f64 * 100.0 / whole as f64) }
}

/// A bar of `width` cells, `part` of `whole` filled, to an eighth of a cell.
pub(crate) fn bar(part: u64, whole: u64, width: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    if whole == 0 {
        return String::new();
    }
    let eighths = (part as f64 / whole as f64 * (width * 8) as f64).round() as usize;
    // Something is never shown as nothing.
    let eighths = eighths.min(width * 8).max(usize::from(part > 0));
    format!("{}{}", "█".repeat(eighths / 8), EIGHTHS[eighths % 8])
}

/// A line of bars, one for each number, from the least to the largest; a dot where there is none, a cross where it is not
/// finite.
pub(crate) fn sparkline(values: &[Option<f64>]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let finite = values.iter().flatten().copied().filter(|value| value.is_finite());
    let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
    let bar = |value: f64| {
        let share = if high > low { (value - low) / (high - low) } else { 0.0 };
        BARS[((share * 7.0).round() as usize).min(7)]
    };
    // A long run is shown by its last steps.
    let start = values.len().saturating_sub(60);
    let one = |value: &Option<f64>| match value {
        Some(value) if value.is_finite() => bar(*value),
        Some(_) => '×',
        None => '·',
    };
    values[start..].iter().map(one).collect()
}

/// A number in few digits: `0.01`, `-3`, `1.25e-9`.
pub(crate) fn number(value: f64) -> String {
    let size = value.abs();
    if value.fract() == 0.0 && size < 1e15 {
        return format!("{value:.0}");
    }
    if !value.is_finite() || (1e-4..1e6).contains(&size) {
        // Six significant digits, without the zeros at the end.
        let decimals = (5 - size.log10().floor() as i32).clamp(0, 12) as usize;
        let text = format!("{value:.decimals$}");
        return if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text };
    }
    let text = format!("{value:.5e}");
    match text.split_once('e') {
        Some((mantissa, exponent)) => format!("{}e{exponent}", mantissa.trim_end_matches('0').trim_end_matches('.')),
        None => text,
    }
}

/// `2026-11-14 22:07:31 UTC`.
pub(crate) fn date(time: SystemTime) -> Option<String> {
    let seconds = time.duration_since(UNIX_EPOCH).ok()?.as_secs();
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days to a date, by eras of 400 years that start on the first of March (Howard Hinnant's civil_from_days).
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    Some(format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", rest / 3600, rest / 60 % 60, rest % 60))
}

/// Text cut in its middle to at most `width` cells of a terminal, both ends kept.
pub(crate) fn shortened(text: &str, width: usize) -> String {
    if width < 5 || text.chars().map(cells).sum::<usize>() <= width {
        return text.to_owned();
    }
    let (head, tail) = ((width - 1) / 2, width - 1 - (width - 1) / 2);
    let mut room = head;
    let fits = |room: &mut usize, c: char| room.checked_sub(cells(c)).map(|left| *room = left).is_some();
    let start: String = text.chars().take_while(|c| fits(&mut room, *c)).collect();
    let mut room = tail;
    let end = text.char_indices().rev().take_while(|(_, c)| fits(&mut room, *c)).last().map_or(text.len(), |(at, _)| at);
    // A mark that belongs to a letter which is gone goes with it.
    let end = text[end..].trim_start_matches(|c| cells(c) == 0);
    format!("{start}…{end}")
}

/// Text from a file, safe for a terminal: control characters are escaped.
pub(crate) fn printable(text: &str) -> String {
    let odd =
        |c: char| c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if text.chars().any(odd) {
        text.chars().flat_map(|c| if odd(c) { c.escape_default().collect::<Vec<_>>() } else { vec![c] }).collect()
    } else {
        text.to_owned()
    }
}

/// [`printable`] for text of several lines.
pub(crate) fn printable_lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}

/// A text as one word for a shell.
pub fn shell_word(text: &str) -> String {
    match !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./+=:@%,".contains(c)) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// Names in their order, numbers in them by value: `layers.2` comes before `layers.10`.
pub(crate) fn natural(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a.as_bytes(), b.as_bytes());
    while let (Some(x), Some(y)) = (left.first(), right.first()) {
        if x.is_ascii_digit() && y.is_ascii_digit() {
            let digits = |text: &[u8]| text.iter().take_while(|c| c.is_ascii_digit()).count();
            let (m, n) = (digits(left), digits(right));
            let significant = |text: &[u8]| text.iter().position(|c| *c != b'0').unwrap_or(text.len());
            let (p, q) = (&left[..m], &right[..n]);
            let (p, q) = (&p[significant(p)..], &q[significant(q)..]);
            match p.len().cmp(&q.len()).then_with(|| p.cmp(q)) {
                Ordering::Equal => (left, right) = (&left[m..], &right[n..]),
                other => return other,
            }
        } else {
            match x.cmp(y) {
                Ordering::Equal => (left, right) = (&left[1..], &right[1..]),
                other => return other,
            }
        }
    }
    left.len().cmp(&right.len()).then_with(|| a.cmp(b))
}

/// Cells of a terminal that a character takes: wide East Asian ones and emoji two, marks that are put on the one before none.
pub(crate) fn cells(c: char) -> usize {
    c.width().unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn bytes_keep_three_digits() {
        for (count, text) in
            [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (17_912, "17.9 kB"), (999_600, "1.00 MB"), (u64::MAX, "18.4 EB")]
        {
            assert_eq!(bytes(count), text);
        }
        assert_eq!((amount(12), amount(4_210_000)), ("12".to_owned(), "4.21 M".to_owned()));
    }

    #[test]
    fn counts_have_their_plural() {
        assert_eq!(
            (count(1, "file"), count(0, "file"), count(1234, "key")),
            ("1 file".into(), "0 files".into(), "1,234 keys".into())
        );
        assert_eq!(count(2, "entry"), "2 entries");
        assert_eq!((exact(0), exact(1_000_000)), ("0".into(), "1,000,000".into()));
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.01, "0.01"),
            (-3.0, "-3"),
            (1.25e-9, "1.25e-9"),
            (0.000_999_999, "0.000999999"),
            (123_456.789, "123457"),
            (f64::NAN, "NaN"),
            (1e300, "1e300"),
            (0.1 + 0.2, "0.3"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |seconds| date(UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
        assert_eq!(at(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(at(951_827_696), "2000-02-29 12:34:56 UTC");
        assert_eq!(at(1_794_700_051), "2026-11-14 23:47:31 UTC");
        assert_eq!(at(4_107_542_400), "2100-03-01 00:00:00 UTC");
    }

    #[test]
    fn bars_fill_and_never_vanish() {
        assert_eq!(
            (bar(1, 1, 3), bar(1, 2, 3), bar(1, 1_000_000, 3), bar(0, 5, 3)),
            ("███".into(), "█▌".into(), "▏".into(), String::new())
        );
    }

    #[test]
    fn long_text_loses_its_middle_and_controls_their_power() {
        assert_eq!(shortened("abcdefghij", 7), "abc…hij");
        assert_eq!(shortened("naïve", 5), "naïve");
        for text in ["模型.层.注意力.查询.权重", &"e\u{301}".repeat(30), "ab模型cd模型ef模型"] {
            let cut = shortened(text, 11);
            assert!(cut.chars().map(cells).sum::<usize>() <= 11 && cut.contains('…'), "{cut}");
            assert!(!cut.contains("…\u{301}"), "{cut}");
        }
        assert_eq!(printable("a\u{1b}[31mb\u{202e}"), "a\\u{1b}[31mb\\u{202e}");
    }

    #[test]
    fn numbers_are_compared_by_value() {
        let mut names = ["l.10.b", "l.2.b", "l.2.a", "l", "l.02.a", "m", "l.1000000000000000000000000"];
        names.sort_by(|a, b| natural(a, b));
        assert_eq!(names, ["l", "l.02.a", "l.2.a", "l.2.b", "l.10.b", "l.1000000000000000000000000", "m"]);
    }
}
