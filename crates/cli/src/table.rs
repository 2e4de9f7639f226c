//! Columns of text: aligned on terminals and in files alike, without frames, so that `awk` can read them too.

use crate::human::printable;
use crate::printer::{Paint, Printer};

/// On which side of its column a text sits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// A table being filled.
#[derive(Debug)]
pub(crate) struct Table {
    sides: Vec<Side>,
    head: Option<Vec<String>>,
    rows: Vec<Vec<(String, Option<Paint>)>>,
    indent: usize,
}

impl Table {
    /// A table of columns on these sides.
    pub(crate) fn new(sides: &[Side]) -> Table {
        Table { sides: sides.to_vec(), head: None, rows: Vec::new(), indent: 0 }
    }

    /// A first row of names.
    pub(crate) fn head(mut self, names: &[&str]) -> Table {
        self.head = Some(names.iter().map(|name| (*name).to_owned()).collect());
        self
    }

    /// Spaces before every row.
    pub(crate) fn indent(mut self, spaces: usize) -> Table {
        self.indent = spaces;
        self
    }

    /// A row of plain cells.
    pub(crate) fn row<S: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(|cell| (printable(cell.as_ref()), None)).collect());
    }

    /// A row of painted cells.
    pub(crate) fn painted<S: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = (S, Option<Paint>)>) {
        self.rows.push(cells.into_iter().map(|(cell, paint)| (printable(cell.as_ref()), paint)).collect());
    }

    /// Whether it has no rows.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The table as lines.
    pub(crate) fn lines(&self, printer: &Printer) -> Vec<String> {
        let head: Option<Vec<(String, Option<Paint>)>> =
            self.head.as_ref().map(|names| names.iter().map(|name| (name.clone(), Some(Paint::Dim))).collect());
        let rows: Vec<&Vec<(String, Option<Paint>)>> = head.iter().chain(&self.rows).collect();
        let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|(cell, _)| cells(cell)).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.sides.len()).map(width).collect();
        let mut lines = Vec::with_capacity(rows.len());
        for row in rows {
            let mut line = " ".repeat(self.indent);
            let mut pending = 0;
            for (column, (cell, paint)) in row.iter().enumerate() {
                let (side, width) =
                    (self.sides.get(column).copied().unwrap_or(Side::Left), widths.get(column).copied().unwrap_or(0));
                let space = width.saturating_sub(cells(cell));
                if column > 0 {
                    pending += 2;
                }
                if side == Side::Right {
                    pending += space;
                }
                if !cell.is_empty() {
                    line.push_str(&" ".repeat(pending));
                    pending = 0;
                    match paint {
                        Some(paint) => line.push_str(&printer.paint(*paint, cell)),
                        None => line.push_str(cell),
                    }
                }
                if side == Side::Left {
                    pending += space;
                }
            }
            lines.push(line.trim_end().to_owned());
        }
        lines
    }
}

/// Cells of a terminal that a text takes; wide East Asian characters take two.
fn cells(text: &str) -> usize {
    let wide = |c: char| matches!(u32::from(c), 0x1100..=0x115f | 0x2e80..=0xa4cf | 0xac00..=0xd7a3 | 0xf900..=0xfaff | 0xfe30..=0xfe6f | 0xff00..=0xff60 | 0xffe0..=0xffe6 | 0x1f300..=0x1f64f | 0x1f900..=0x1f9ff);
    text.chars().map(|c| if wide(c) { 2 } else { 1 }).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::printer::ColorChoice;

    #[test]
    fn columns_are_aligned_and_lines_end_with_text() {
        let mut table = Table::new(&[Side::Left, Side::Right, Side::Left]).head(&["key", "bytes", ""]).indent(2);
        table.row(["a", "1", "x"]);
        table.row(["long\tname", "1000", ""]);
        let printer = Printer::new(ColorChoice::Never, true);
        assert_eq!(table.lines(&printer), ["  key         bytes", "  a               1  x", "  long\\tname   1000"]);
    }
}
