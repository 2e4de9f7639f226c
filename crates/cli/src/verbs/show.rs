//! `reshard show PATH KEY`: one tensor or one value, up close.

use reshard::Checkpoint;
use reshard::checkpoint::{CatalogKind, CatalogTensor, LoadedValue};
use reshard::layout::Region;
use reshard::numbers::{StatsOptions, TensorStats, stats};
use serde::Serialize;
use serde_json::Value as Json;

use crate::args::ShowArgs;
use crate::catalog::location;
use crate::elements::{self, Element};
use crate::failure::{Failure, Result};
use crate::human;
use crate::printer::Paint;
use crate::progress::Progress;
use crate::slice::{Meaning, Slice};
use crate::summary::Cut;
use crate::table::{Side, Table};
use crate::verbs::{Context, Outcome};

/// As many values as a screen holds; of more, a corner is printed.
const ON_A_SCREEN: u64 = 400;
/// As many columns as a screen holds.
const COLUMNS: u64 = 10;
/// Elements along each of the last two dimensions of a corner.
const CORNER: u64 = 8;
/// Chunks that are listed without being asked to.
const CHUNKS: usize = 16;

#[derive(Debug, Serialize)]
struct ShownTensor<'a> {
    kind: &'static str,
    schema: u32,
    path: &'a str,
    key: &'a str,
    dtype: &'static str,
    shape: &'a [u64],
    bytes: u64,
    requires_grad: bool,
    layout: &'static str,
    grid: Option<Vec<u64>>,
    slice: String,
    values: Option<Json>,
    stats: Option<Numbers>,
    chunks: Vec<ChunkRow<'a>>,
}

#[derive(Debug, Serialize)]
struct ShownValue<'a> {
    kind: &'static str,
    schema: u32,
    path: &'a str,
    key: &'a str,
    value: Option<Json>,
    class: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Numbers {
    elements: u64,
    min: Option<f64>,
    max: Option<f64>,
    mean: Option<f64>,
    std: Option<f64>,
    zeros: u64,
    nans: u64,
    infinities: u64,
}

impl From<TensorStats> for Numbers {
    fn from(stats: TensorStats) -> Numbers {
        let TensorStats { elements, min, max, mean, std, zeros, nans, infinities, .. } = stats;
        Numbers { elements, min, max, mean, std, zeros, nans, infinities }
    }
}

#[derive(Debug, Serialize)]
struct ChunkRow<'a> {
    offsets: &'a [u64],
    sizes: &'a [u64],
    file: &'a str,
    offset: u64,
    length: u64,
}

pub(crate) fn run(context: &mut Context, args: &ShowArgs) -> Result<Outcome> {
    let slice = args.slice.as_deref().map(Slice::parse).transpose()?;
    let checkpoint = context.open_seen(&args.path, &args.view)?;
    match &checkpoint.entry(&args.key)?.kind {
        CatalogKind::Tensor(tensor) => {
            let meaning = match &slice {
                Some(slice) => slice.of(&tensor.shape)?,
                None => {
                    Meaning { region: Region::whole(&tensor.shape).map_err(reshard::Error::from)?, shape: tensor.shape.to_vec() }
                }
            };
            show_tensor(context, args, &checkpoint, tensor, &meaning)
        }
        _ if slice.is_some() => Err(Failure::new(format!("{:?} is a plain value, which has no slices", args.key))),
        _ => show_value(context, args, &checkpoint),
    }
}

fn show_value(context: &mut Context, args: &ShowArgs, checkpoint: &Checkpoint) -> Result<Outcome> {
    let value = checkpoint.read_value(&args.key)?;
    if args.output.json {
        let (value, class) = match value {
            LoadedValue::Plain(value) => (Some(value.to_json()), None),
            LoadedValue::Opaque { class, .. } => (None, Some(class)),
            _ => (None, None),
        };
        context.printer.json(&ShownValue { kind: "value", schema: 1, path: checkpoint.path(), key: &args.key, value, class })?;
        return Ok(Outcome::Fine);
    }
    match value {
        LoadedValue::Plain(value) => context.printer.line(human::printable(&value.python_repr()))?,
        LoadedValue::Opaque { class, .. } => {
            context.printer.line(format!("<{}>", human::printable(&class)))?;
            context.printer.note("a pickled object: reshard carries it along but never runs what it would take to load it");
        }
        _ => {}
    }
    Ok(Outcome::Fine)
}

fn show_tensor(
    context: &mut Context,
    args: &ShowArgs,
    checkpoint: &Checkpoint,
    tensor: &CatalogTensor,
    meaning: &Meaning,
) -> Result<Outcome> {
    let region = &meaning.region;
    let narrow = args.output.json || meaning.shape.len() < 2 || meaning.shape.last().is_some_and(|columns| *columns <= COLUMNS);
    let everything = args.all || (region.volume() <= ON_A_SCREEN && narrow);
    let mut options = StatsOptions::default();
    options.region = Some(region.clone());
    let numbers = match args.values_only || region.is_empty() {
        true => None,
        false => {
            let _bar = Progress::watch(&context.printer, "statistics", &options.control);
            // A type without numbers has no statistics; that is no reason not to show the rest.
            match stats(checkpoint, &args.key, &options) {
                Ok(found) => Some(found),
                Err(reshard::Error::Unsupported { .. }) => None,
                Err(error) => return Err(error.into()),
            }
        }
    };
    let chunks = chunk_rows(checkpoint, tensor);
    let cut = Cut::of(tensor);
    if args.output.json {
        let values = match everything {
            true => Some(nested(&elements::read(checkpoint, &args.key, region)?, &meaning.shape)),
            false => None,
        };
        context.printer.json(&ShownTensor {
            kind: "tensor",
            schema: 1,
            path: checkpoint.path(),
            key: &args.key,
            dtype: tensor.dtype.name(),
            shape: &tensor.shape,
            bytes: tensor.bytes(),
            requires_grad: tensor.requires_grad,
            layout: cut.kind(),
            grid: cut.parts().map(<[u64]>::to_vec),
            slice: region.to_string(),
            values,
            stats: numbers.map(Numbers::from),
            chunks,
        })?;
        return Ok(Outcome::Fine);
    }
    let printer = &mut context.printer;
    let title = printer.paint(Paint::Bold, human::printable(&args.key));
    printer.line(title)?;
    let layout = match chunks.len() {
        1 => "1 chunk".to_owned(),
        n => format!("{} ({})", human::count(n as u64, "chunk"), cut.label()),
    };
    let grad = if tensor.requires_grad { ", requires grad" } else { "" };
    printer.line(format!(
        "  {} {}, {}, {layout}{grad}",
        tensor.dtype.name(),
        human::shape(&tensor.shape),
        human::bytes(tensor.bytes())
    ))?;
    if let Some(stats) = &numbers {
        printer.line("")?;
        for line in stats_table(stats, tensor.dtype.name().starts_with("complex")).lines(printer) {
            printer.line(line)?;
        }
    }
    printer.line("")?;
    let (shown, note) = if everything { (meaning.clone(), None) } else { corner(meaning) };
    let values = elements::read(checkpoint, &args.key, &shown.region)?;
    for line in matrix(&values, &shown.shape) {
        printer.line(line)?;
    }
    if let Some(note) = note {
        let note = printer.paint(Paint::Dim, format!("  {note}; --all prints every value, --slice another part"));
        printer.line(note)?;
    }
    printer.line("")?;
    let mut table =
        Table::new(&[Side::Left, Side::Left, Side::Right, Side::Right]).head(&["CHUNK", "FILE", "OFFSET", "LENGTH"]).indent(2);
    let most = if args.chunks { usize::MAX } else { CHUNKS };
    for (chunk, row) in tensor.chunks.iter().zip(&chunks).take(most) {
        table.row([chunk.region.to_string(), row.file.to_owned(), row.offset.to_string(), row.length.to_string()]);
    }
    for line in table.lines(printer) {
        printer.line(line)?;
    }
    if chunks.len() > most {
        let more = printer.paint(
            Paint::Dim,
            format!("  and {} more; --chunks lists them all", human::count((chunks.len() - most) as u64, "chunk")),
        );
        printer.line(more)?;
    }
    Ok(Outcome::Fine)
}

fn chunk_rows<'a>(checkpoint: &'a Checkpoint, tensor: &'a CatalogTensor) -> Vec<ChunkRow<'a>> {
    let files = &checkpoint.catalog().files;
    let row = |chunk: &'a reshard::checkpoint::StoredChunk| {
        let (offset, length) = location(&chunk.location);
        let file = files.get(chunk.file as usize).map_or("?", String::as_str);
        ChunkRow { offsets: chunk.region.offsets(), sizes: chunk.region.sizes(), file, offset, length }
    };
    tensor.chunks.iter().map(row).collect()
}

fn stats_table(stats: &TensorStats, complex: bool) -> Table {
    let mut table = Table::new(&[Side::Left, Side::Left, Side::Left, Side::Left]).indent(2);
    let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), human::number);
    table.row(["min", &number(stats.min), "mean", &number(stats.mean)]);
    table.row(["max", &number(stats.max), "std", &number(stats.std)]);
    let share = |count: u64| match count {
        0 => "0".to_owned(),
        count => format!("{} ({})", human::exact(count), human::percent(count, stats.elements)),
    };
    let elements = if complex { "parts" } else { "elements" };
    table.row(["zeros", &share(stats.zeros), elements, &human::exact(stats.elements)]);
    table.row(["nan", &share(stats.nans), "inf", &share(stats.infinities)]);
    table
}

/// The first elements along the last two dimensions, at the first index of all others.
fn corner(meaning: &Meaning) -> (Meaning, Option<String>) {
    let mut sizes = meaning.region.sizes().to_vec();
    let mut open = 2;
    for size in sizes.iter_mut().rev() {
        if *size > 1 {
            *size = if open > 0 { (*size).min(CORNER) } else { 1 };
            open -= i32::from(open > 0);
        }
    }
    let Ok(region) = Region::new(meaning.region.offsets(), &sizes) else { return (meaning.clone(), None) };
    let shape = sizes.into_iter().filter(|size| *size > 1).collect();
    let note = format!("these are {region}");
    (Meaning { region, shape }, Some(note))
}

/// Values in nested lists, as Python's `tolist` gives them.
fn nested(values: &[Element], shape: &[u64]) -> Json {
    match shape {
        [] => values.first().map_or(Json::Null, |value| value.json()),
        [_] => values.iter().map(|value| value.json()).collect(),
        [count, rest @ ..] => {
            let step = values.len() / usize::try_from(*count).unwrap_or(usize::MAX).max(1);
            if step == 0 {
                return (0..*count).map(|_| nested(&[], rest)).collect();
            }
            values.chunks(step).map(|part| nested(part, rest)).collect()
        }
    }
}

/// Values in rows, columns aligned, a blank line between matrices.
fn matrix(values: &[Element], shape: &[u64]) -> Vec<String> {
    if values.is_empty() {
        return vec!["  no elements".to_owned()];
    }
    let texts: Vec<String> = values.iter().map(|value| value.text()).collect();
    let columns = shape.last().map_or(1, |n| *n as usize).max(1);
    let rows = if shape.len() > 1 { shape[shape.len() - 2] as usize } else { usize::MAX };
    let width = texts.iter().map(String::len).max().unwrap_or(0);
    // A long vector becomes a block of a good width.
    let columns = if shape.len() == 1 { columns.min((96 / (width + 2)).max(1)) } else { columns };
    let mut lines = Vec::new();
    for (number, row) in texts.chunks(columns).enumerate() {
        if number > 0 && number % rows.max(1) == 0 {
            lines.push(String::new());
        }
        lines.push(format!("  {}", row.iter().map(|text| format!("{text:>width$}")).collect::<Vec<_>>().join("  ")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_values_follow_the_shape() {
        let values: Vec<Element> = (0..6).map(Element::Int).collect();
        assert_eq!(nested(&values, &[2, 3]).to_string(), "[[0,1,2],[3,4,5]]");
        assert_eq!(nested(&values[..1], &[]).to_string(), "0");
        assert_eq!(nested(&[], &[2, 0]).to_string(), "[[],[]]");
        assert_eq!(nested(&[], &[0, 3]).to_string(), "[]");
    }

    #[test]
    fn a_corner_is_small() {
        let meaning = Slice::parse("").unwrap().of(&[3, 100, 1, 100]).unwrap();
        let (corner, _) = corner(&meaning);
        assert_eq!((corner.region.to_string(), corner.shape), ("[0:1, 0:8, 0:1, 0:8]".to_owned(), vec![8, 8]));
    }
}
