//! `reshard ls PATH [GLOB]`: the keys.

mod tree;

use reshard::checkpoint::{CatalogEntry, CatalogKind, CatalogTensor, ValueLocation};
use reshard::select::Selection;
use serde::Serialize;

use crate::args::{LsArgs, SortBy};
use crate::failure::Result;
use crate::human;
use crate::meaning;
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
    meaning::all_used(&checkpoint, &selection)?;
    let mut rows: Vec<Row<'_>> = checkpoint
        .catalog()
        .entries
        .iter()
        .filter(|(key, _)| selection.wants(key))
        .filter_map(|(key, entry)| row(key, entry))
        .collect();
    match args.sort {
        SortBy::Name => rows.sort_by(|a, b| human::natural(a.key(), b.key())),
        SortBy::Size => rows.sort_by(|a, b| b.bytes().cmp(&a.bytes()).then_with(|| human::natural(a.key(), b.key()))),
        SortBy::None => {}
    }
    if rows.is_empty() {
        context.printer.warn("the checkpoint has no keys");
    }
    if args.output.json {
        context.printer.json(&Listing { schema: 1, path: checkpoint.path(), entries: rows })?;
    } else if args.tree {
        tree::print(context, &checkpoint, &rows, args)?;
    } else {
        print(context, &rows, args)?;
    }
    Ok(Outcome::Fine)
}

/// More lines than this are a screen that nobody reads.
const MOST_LINES: usize = 500;

/// Prints lines: all of them into files and pipes, which are read by programs, and a screenful or so on a terminal.
fn print_lines(context: &mut Context, lines: Vec<String>, args: &LsArgs) -> Result<()> {
    let most = if args.all || !context.printer.read { usize::MAX } else { MOST_LINES };
    let more = lines.len().saturating_sub(most) as u64;
    for line in lines.into_iter().take(most) {
        context.printer.line(line)?;
    }
    if more > 0 {
        let shorter = if args.tree { "--depth LEVELS shortens it" } else { "--tree shows modules, a GLOB chooses" };
        let text = format!("and {}; --all lists them, {shorter}", human::count(more, "more line"));
        context.printer.line(context.printer.paint(Paint::Dim, text))?;
    }
    Ok(())
}

fn row<'a>(key: &'a str, entry: &'a CatalogEntry) -> Option<Row<'a>> {
    match &entry.kind {
        CatalogKind::Tensor(tensor) => Some(tensor_row(key, tensor)),
        CatalogKind::Value(path) => {
            let bytes = match path {
                ValueLocation::Record { length, .. } => Some(*length),
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

fn print(context: &mut Context, rows: &[Row<'_>], args: &LsArgs) -> Result<()> {
    let mut table = Table::new(&[Side::Left, Side::Left, Side::Left, Side::Right, Side::Left, Side::Right])
        .head(&["KEY", "DTYPE", "SHAPE", "CHUNKS", "GRID", "BYTES"])
        .fit(0);
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
    print_lines(context, table.lines(&context.printer), args)?;
    let tensors = rows.iter().filter(|row| matches!(row, Row::Tensor { .. }));
    let bytes = tensors.clone().map(Row::bytes).fold(0, u64::saturating_add);
    let (tensors, keys) = (tensors.count() as u64, rows.len() as u64);
    let values = if keys > tensors { format!(" and {}", human::count(keys - tensors, "value")) } else { String::new() };
    context.printer.note(format!("{}{values}, {}", human::count(tensors, "tensor"), human::bytes(bytes)));
    Ok(())
}
