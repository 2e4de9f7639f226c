//! Columns of text: aligned on terminals and in files alike, without frames, so that `awk` can read them too.

use std::borrow::Cow;

use crate::human::{cells, printable, shortened};
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
    rows: Vec<Row>,
    indent: usize,
    /// The column whose texts are cut in their middle where a terminal is too narrow.
    fit: Option<usize>,
}

/// A row: texts, and how they are painted.
type Row = Vec<(String, Option<Paint>)>;

/// A column is cut to no less.
const LEAST: usize = 12;

impl Table {
    /// A table of columns on these sides.
    pub(crate) fn new(sides: &[Side]) -> Table {
        Table { sides: sides.to_vec(), head: None, rows: Vec::new(), indent: 0, fit: None }
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

    /// Cuts the texts of this column where a terminal is too narrow for all.
    pub(crate) fn fit(mut self, column: usize) -> Table {
        self.fit = Some(column);
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
        let head: Option<Row> =
            self.head.as_ref().map(|names| names.iter().map(|name| (name.clone(), Some(Paint::Dim))).collect());
        let rows: Vec<&Row> = head.iter().chain(&self.rows).collect();
        let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|(cell, _)| wide(cell)).max().unwrap_or(0);
        let mut widths: Vec<usize> = (0..self.sides.len()).map(width).collect();
        let all = self.indent + widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1);
        let too_wide = printer.columns.map_or(0, |columns| all.saturating_sub(columns));
        let mut rows: Vec<Cow<'_, Row>> = rows.into_iter().map(Cow::Borrowed).collect();
        if let (Some(column), true) = (self.fit, too_wide > 0)
            && let Some(width) = widths.get_mut(column)
        {
            *width = width.saturating_sub(too_wide).max(LEAST.min(*width));
            for row in &mut rows {
                if row.get(column).is_some_and(|(cell, _)| wide(cell) > *width) {
                    let cell = &mut row.to_mut()[column].0;
                    *cell = shortened(cell, *width);
                }
            }
        }
        let mut lines = Vec::with_capacity(rows.len());
        for row in rows {
            let mut line = " ".repeat(self.indent);
            let mut pending = 0;
            for (column, (cell, paint)) in row.iter().enumerate() {
                let (side, width) =
                    (self.sides.get(column).copied().unwrap_or(Side::Left), widths.get(column).copied().unwrap_or(0));
                let space = width.saturating_sub(wide(cell));
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

/// Cells of a terminal that a text takes.
fn wide(text: &str) -> usize {
    text.chars().map(cells).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::printer::ColorChoice;

    #[test]
    fn a_narrow_terminal_cuts_the_column_that_may_be_cut() {
        let mut table = Table::new(&[Side::Left, Side::Right]).fit(0);
        table.row(["model.layers.0.attention.query.weight.of.a.very.long.name", "12.3 GB"]);
        table.row(["short", "1 B"]);
        let mut printer = Printer::new(ColorChoice::Never, true);
        printer.columns = Some(40);
        let lines = table.lines(&printer);
        assert!(lines.iter().all(|line| line.chars().count() <= 40) && lines[0].contains('…') && lines[0].ends_with("12.3 GB"));
        printer.columns = None;
        assert!(table.lines(&printer)[0].contains("attention.query.weight.of.a.very.long.name"));
    }

    #[test]
    fn columns_are_aligned_and_lines_end_with_text() {
        let mut table = Table::new(&[Side::Left, Side::Right, Side::Left]).head(&["key", "bytes", ""]).indent(2);
        table.row(["a", "1", "x"]);
        table.row(["long\tname", "1000", ""]);
        let printer = Printer::new(ColorChoice::Never, true);
        assert_eq!(table.lines(&printer), ["  key         bytes", "  a               1  x", "  long\\tname   1000"]);
    }
}
