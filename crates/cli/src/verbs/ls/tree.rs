//! Keys as a tree of modules, with sums; runs of modules that are alike become one line.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use indexmap::IndexMap;
use reshard::Checkpoint;

use super::Row;
use crate::args::{LsArgs, SortBy};
use crate::failure::Result;
use crate::human;
use crate::printer::Paint;
use crate::table::{Side, Table};
use crate::verbs::Context;

#[derive(Debug, Default)]
struct Node<'a> {
    name: &'a str,
    children: IndexMap<&'a str, Node<'a>>,
    row: Option<&'a Row<'a>>,
    tensors: u64,
    values: u64,
    bytes: u64,
    /// Equal for subtrees that hold the same under other names.
    likeness: u64,
}

/// So many alike in a row are worth folding.
const FOLD: usize = 3;

/// No module is nested deeper. What a key has below is one name, so that no key of a file exhausts the stack.
const DEEPEST: usize = 128;

pub(super) fn print(context: &mut Context, checkpoint: &Checkpoint, rows: &[Row<'_>], args: &LsArgs) -> Result<()> {
    let mut root = Node::default();
    for row in rows {
        root.insert(row.key().splitn(DEEPEST, '.'), row);
    }
    root.finish(args.sort);
    let mut table = Table::new(&[Side::Left, Side::Left, Side::Left, Side::Right, Side::Left]);
    let total = root.bytes;
    let title = context.printer.paint(Paint::Bold, human::printable(checkpoint.path()));
    context.printer.line(format!("{title}  {}, {}", root.holds(), human::bytes(total)))?;
    root.lines("", args.depth.unwrap_or(usize::MAX), total, &mut table);
    super::print_lines(context, table.lines(&context.printer), args)
}

impl<'a> Node<'a> {
    fn insert(&mut self, mut parts: std::str::SplitN<'a, char>, row: &'a Row<'a>) {
        let Some(name) = parts.next() else {
            self.row = Some(row);
            return;
        };
        self.children.entry(name).or_insert_with(|| Node { name, ..Node::default() }).insert(parts, row);
    }

    /// Sums and likenesses, from the leaves up.
    fn finish(&mut self, sort: SortBy) {
        let mut hasher = DefaultHasher::new();
        if let Some(row) = self.row {
            self.bytes = row.bytes();
            match row {
                Row::Tensor { dtype, shape, grid, layout, .. } => {
                    self.tensors = 1;
                    (dtype, shape, grid, layout).hash(&mut hasher);
                }
                Row::Value { .. } => {
                    self.bytes = 0;
                    self.values = 1;
                    "value".hash(&mut hasher);
                }
            }
        }
        for child in self.children.values_mut() {
            child.finish(sort);
            self.tensors += child.tensors;
            self.values += child.values;
            self.bytes = self.bytes.saturating_add(child.bytes);
        }
        match sort {
            SortBy::Size => {
                self.children.sort_by(|_, a, _, b| b.bytes.cmp(&a.bytes).then_with(|| human::natural(a.name, b.name)))
            }
            SortBy::Name => self.children.sort_by(|a, _, b, _| human::natural(a, b)),
            SortBy::None => {}
        }
        for child in self.children.values() {
            (child.name, child.likeness).hash(&mut hasher);
        }
        self.likeness = hasher.finish();
    }

    /// What lies below, in words.
    fn holds(&self) -> String {
        match (self.tensors, self.values) {
            (0, values) => human::count(values, "value"),
            (tensors, _) => human::count(tensors, "tensor"),
        }
    }

    fn lines(&self, indent: &str, depth: usize, total: u64, table: &mut Table) {
        if depth == 0 {
            return;
        }
        let children: Vec<&Node<'_>> = self.children.values().collect();
        let mut at = 0;
        while let Some(&child) = children.get(at) {
            let is_number = |node: &Node<'_>| node.name.bytes().all(|c| c.is_ascii_digit()) && !node.name.is_empty();
            let alike = children[at..]
                .iter()
                .take_while(|other| is_number(other) && other.likeness == child.likeness && !other.children.is_empty())
                .count();
            let run = if alike >= FOLD { alike } else { 1 };
            let last = at + run >= children.len();
            let (branch, below) = if last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            // A module with a single child shares its line.
            let (mut name, mut node) = (child.name.to_owned(), child);
            while let (1, Some((_, only)), None) = (node.children.len(), node.children.first(), node.row) {
                name = format!("{name}.{}", only.name);
                node = only;
            }
            if run > 1 {
                let rest = name.strip_prefix(child.name).unwrap_or("").to_owned();
                name = format!("[{}–{}]{rest}", child.name, children[at + run - 1].name);
            }
            let bytes = children[at..at + run].iter().map(|n| n.bytes).fold(0, u64::saturating_add);
            let (kind, shape) = match node.row {
                Some(Row::Tensor { dtype, shape, .. }) => ((*dtype).to_owned(), human::shape(shape)),
                Some(Row::Value { .. }) => ("value".to_owned(), String::new()),
                None if run > 1 => (format!("{} each", node.holds()), format!("{run} alike")),
                None => (node.holds(), String::new()),
            };
            let size = if node.tensors == 0 { String::new() } else { human::bytes(bytes) };
            let bold = if node.row.is_none() { Some(Paint::Bold) } else { None };
            let cells = [format!("{indent}{branch}{name}"), kind, shape, size, human::bar(bytes, total, 16)];
            table.painted(cells.into_iter().zip([bold, Some(Paint::Dim), None, None, Some(Paint::Accent)]));
            node.lines(&format!("{indent}{below}"), depth - 1, total, table);
            at += run;
        }
    }
}
