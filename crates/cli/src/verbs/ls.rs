//! `reshard ls PATH [GLOB]`: the keys.

mod tree;

use std::cmp::Ordering;

use reshard::{CatalogEntry, CatalogKind, CatalogTensor, Selection, ValuePlace};
use serde::Serialize;

use crate::args::{LsArgs, SortBy};
use crate::failure::Result;
use crate::human;
use crate::printer::Paint;
use crate::summary::Cut;
use crate::table::{Side, Table};
use crate::verbs::{Context, Outcome};

#[derive(Debug, Serialize)]
struct Listing<'a> {
    schema: u32,
    path: &'a str,
    entries: Vec<Row<'a>>,
}

/// One key.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Row<'a> {
    Tensor {
        key: &'a str,
        dtype: &'static str,
        shape: &'a [u64],
        bytes: u64,
        chunks: usize,
        layout: &'static str,
        grid: Option<Vec<u64>>,
    },
    Value {
        key: &'a str,
        bytes: Option<u64>,
    },
}

impl Row<'_> {
    fn key(&self) -> &str {
        match self {
            Row::Tensor { key, .. } | Row::Value { key, .. } => key,
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Row::Tensor { bytes, .. } => *bytes,
            Row::Value { bytes, .. } => bytes.unwrap_or(0),
        }
    }
}

pub(crate) fn run(context: &mut Context, args: &LsArgs) -> Result<Outcome> {
    let selection = Selection::globs(args.glob.as_slice())?;
    let checkpoint = context.open_seen(&args.path, &args.view)?;
    let mut rows: Vec<Row<'_>> = checkpoint
        .catalog()
        .entries
        .iter()
        .filter(|(key, _)| selection.wants(key))
        .filter_map(|(key, entry)| row(key, entry))
        .collect();
    match args.sort {
        SortBy::Name => rows.sort_by(|a, b| natural(a.key(), b.key())),
        SortBy::Size => rows.sort_by(|a, b| b.bytes().cmp(&a.bytes()).then_with(|| natural(a.key(), b.key()))),
        SortBy::None => {}
    }
    if rows.is_empty() {
        context.printer.warn(match &args.glob {
            Some(glob) => format!("no key fits {glob:?}"),
            None => "the checkpoint has no keys".to_owned(),
        });
    }
    if args.output.json {
        context.printer.json(&Listing { schema: 1, path: checkpoint.path(), entries: rows })?;
    } else if args.tree {
        tree::print(context, &checkpoint, &rows, args)?;
    } else {
        print(context, &rows)?;
    }
    Ok(Outcome::Fine)
}

fn row<'a>(key: &'a str, entry: &'a CatalogEntry) -> Option<Row<'a>> {
    match &entry.kind {
        CatalogKind::Tensor(tensor) => Some(tensor_row(key, tensor)),
        CatalogKind::Value(path) => {
            let bytes = match path {
                ValuePlace::Record { length, .. } => Some(*length),
                _ => None,
            };
            Some(Row::Value { key, bytes })
        }
        _ => None,
    }
}

fn tensor_row<'a>(key: &'a str, tensor: &'a CatalogTensor) -> Row<'a> {
    let cut = Cut::of(tensor);
    Row::Tensor {
        key,
        dtype: tensor.dtype.name(),
        shape: &tensor.shape,
        bytes: tensor.bytes(),
        chunks: tensor.chunks.len(),
        layout: cut.kind(),
        grid: cut.parts().map(<[u64]>::to_vec),
    }
}

fn print(context: &mut Context, rows: &[Row<'_>]) -> Result<()> {
    let mut table = Table::new(&[Side::Left, Side::Left, Side::Left, Side::Right, Side::Left, Side::Right])
        .head(&["KEY", "DTYPE", "SHAPE", "CHUNKS", "GRID", "BYTES"]);
    for row in rows {
        match row {
            Row::Tensor { key, dtype, shape, bytes, chunks, layout, grid } => {
                let grid = match grid {
                    Some(parts) => parts.iter().map(u64::to_string).collect::<Vec<_>>().join("×"),
                    None if *layout == "whole" => String::new(),
                    None => (*layout).to_owned(),
                };
                let cells =
                    [(*key).to_owned(), (*dtype).to_owned(), human::shape(shape), chunks.to_string(), grid, human::bytes(*bytes)];
                let bad = if *layout == "broken" { Some(Paint::Bad) } else { None };
                table.painted(cells.into_iter().zip([None, None, None, None, bad, None]));
            }
            Row::Value { key, bytes } => {
                let bytes = bytes.map(human::bytes).unwrap_or_default();
                let cells = [(*key).to_owned(), "value".to_owned(), String::new(), String::new(), String::new(), bytes];
                table.painted(cells.into_iter().zip([None, Some(Paint::Dim), None, None, None, Some(Paint::Dim)]));
            }
        }
    }
    if table.is_empty() {
        return Ok(());
    }
    for line in table.lines(&context.printer) {
        context.printer.line(line)?;
    }
    let tensors = rows.iter().filter(|row| matches!(row, Row::Tensor { .. }));
    let bytes = tensors.clone().map(Row::bytes).fold(0, u64::saturating_add);
    let (tensors, keys) = (tensors.count() as u64, rows.len() as u64);
    let values = if keys > tensors { format!(" and {}", human::count(keys - tensors, "value")) } else { String::new() };
    context.printer.note(format!("{}{values}, {}", human::count(tensors, "tensor"), human::bytes(bytes)));
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_compared_by_value() {
        let mut names = ["l.10.b", "l.2.b", "l.2.a", "l", "l.02.a", "m", "l.1000000000000000000000000"];
        names.sort_by(|a, b| natural(a, b));
        assert_eq!(names, ["l", "l.02.a", "l.2.a", "l.2.b", "l.10.b", "l.1000000000000000000000000", "m"]);
    }
}
