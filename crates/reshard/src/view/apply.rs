//! From a catalog to a catalog, by rules. Nothing is read: every rule is checked against the metadata alone.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use indexmap::IndexMap;
use serde::Serialize;

use super::family::{Families, Family, FamilyKind};
use super::pattern::Captures;
use super::rules::{Action, Rest, Rule, Rules, SlotRule, Step};
use super::slots::{Kind, Slots};
use super::steps::{Piece, run};
use crate::checkpoint::{Catalog, CatalogEntry, CatalogKind};
use crate::scaled::scales_of;
use crate::select::new_path;

/// What a view made of a checkpoint.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct ViewReport {
    /// What each rule did.
    pub rules: Vec<RuleReport>,
    /// Keys that no rule took and that stay as they are.
    pub kept: u64,
    /// Keys that are left out.
    pub dropped: Vec<String>,
}

/// What one rule did.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct RuleReport {
    /// The rule.
    pub rule: String,
    /// How many keys it took.
    pub taken: u64,
    /// What it made of them: keys, and from which.
    pub made: Vec<Made>,
}

/// A key that a rule made.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Made {
    /// The new key.
    pub key: String,
    /// The shape, of a tensor.
    pub shape: Option<Vec<u64>>,
    /// The element type, of a tensor.
    pub dtype: Option<String>,
    /// The keys that it is made from.
    pub from: Vec<String>,
}

/// A catalog's entries seen through rules.
pub(super) struct Applied {
    pub(super) entries: IndexMap<String, CatalogEntry>,
    pub(super) report: ViewReport,
    /// Keys that became one and so must hold the same.
    pub(super) same: Vec<Vec<String>>,
    /// What parameters' names became, by the optimizers' words before them.
    pub(super) names: BTreeMap<String, BTreeSet<String>>,
    /// Lists of parameter groups, in which names have to be changed.
    pub(super) group_lists: Vec<String>,
}

/// An entry that a rule takes.
struct Taken {
    part: usize,
    captures: Captures,
    position: usize,
    name: String,
}

/// What a rule takes that has the same captures, apart from those that it stacks.
type Group = BTreeMap<Family, Vec<Taken>>;

pub(super) fn applied(catalog: &Catalog, rules: &Rules) -> Result<Applied, String> {
    let families = Families::new(rules);
    let mut groups: Vec<BTreeMap<Captures, Group>> = rules.rules.iter().map(|_| BTreeMap::new()).collect();
    let mut report = ViewReport::default();
    report.rules.extend(rules.rules.iter().map(|rule| RuleReport { rule: rule.name.clone(), ..RuleReport::default() }));
    // New entries by the position of the first one that they are made from, so that their order stays.
    let mut made: Vec<(usize, String, CatalogEntry)> = Vec::new();
    let mut untaken = Vec::new();
    let mut numbered = Vec::new();
    let mut group_lists = Vec::new();
    for (position, (key, entry)) in catalog.entries.iter().enumerate() {
        match taker(rules, &families, key)? {
            Some((rule, family, mut taken)) => {
                report.rules[rule].taken += 1;
                if rules.rules[rule].to.is_empty() {
                    report.dropped.push(key.clone());
                    continue;
                }
                taken.position = position;
                let kept = kept_captures(&rules.rules[rule], &taken.captures);
                groups[rule].entry(kept).or_default().entry(family).or_default().push(taken);
            }
            None => {
                let value = matches!(entry.kind, CatalogKind::Value(_));
                if value && families.is_group_list(key) {
                    group_lists.push(key.clone());
                }
                let slot = if value { None } else { numbered_slot(&families, key) };
                let said = slot.as_ref().and_then(|slot| rules.slots.get(slot));
                match rules.rest {
                    _ if said == Some(&SlotRule::Drop) => report.dropped.push(key.clone()),
                    Rest::Drop if !value => report.dropped.push(key.clone()),
                    Rest::Error if !value => untaken.push(key.clone()),
                    _ => {
                        // One number has no layout.
                        let several = matches!(&entry.kind, CatalogKind::Tensor(tensor) if tensor.elements() > 1);
                        if slot.is_some() && several && said != Some(&SlotRule::Same) {
                            numbered.push(key);
                        }
                        report.kept += 1;
                        made.push((position, key.clone(), entry.copied()));
                    }
                }
            }
        }
    }
    check_matches(rules, &groups, &report)?;
    check_numbered(rules, &report, &numbered)?;
    if !untaken.is_empty() {
        let shown: Vec<String> = untaken.iter().take(5).map(|key| format!("{key:?}")).collect();
        let more = if untaken.len() > 5 { format!(" and {} more", untaken.len() - 5) } else { String::new() };
        return Err(format!("no rule takes {}{more}", shown.join(", ")));
    }
    let slots = Slots::new(catalog, &families, rules);
    let mut same = Vec::new();
    let mut names: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (number, found) in groups.into_iter().enumerate() {
        let rule = &rules.rules[number];
        for group in found.into_values() {
            let report = &mut report.rules[number];
            let mut maker = Maker { catalog, rules, rule, slots: &slots, made: &mut made, report, same: &mut same };
            let renamed = maker.group(&group).map_err(|why| format!("{}: {why}", rule.describe()))?;
            for (old, new) in renamed {
                names.entry(old).or_default().insert(new);
            }
        }
    }
    made.sort_by_key(|(position, ..)| *position);
    let mut entries = IndexMap::with_capacity(made.len());
    for (position, key, entry) in made {
        if let Some(before) = entries.insert(key.clone(), (position, entry)) {
            let old = |position: usize| catalog.entries.get_index(position).map_or("?", |(key, _)| key.as_str());
            return Err(format!("{:?} and {:?} would both become {key:?}", old(before.0), old(position)));
        }
    }
    let entries = entries.into_iter().map(|(key, (_, entry))| (key, entry)).collect();
    Ok(Applied { entries, report, same, names, group_lists })
}

/// The rule that takes a key; two are an error.
fn taker(rules: &Rules, families: &Families, key: &str) -> Result<Option<(usize, Family, Taken)>, String> {
    for (family, name) in families.of(key) {
        let mut found: Option<(usize, Taken)> = None;
        for (number, rule) in rules.rules.iter().enumerate() {
            for (part, pattern) in rule.from.iter().enumerate() {
                let Some(captures) = pattern.captures(name) else { continue };
                if let Some((other, _)) = &found {
                    let both = match *other == number {
                        true => format!("two patterns of {}", rule.describe()),
                        false => format!("{} and {}", rules.rules[*other].describe(), rule.describe()),
                    };
                    return Err(format!("{key:?} is taken twice, by {both}"));
                }
                found = Some((number, Taken { part, captures, position: 0, name: name.to_owned() }));
            }
        }
        if let Some((number, taken)) = found {
            return Ok(Some((number, family, taken)));
        }
    }
    Ok(None)
}

/// The captures that tell a rule's groups apart: those that it does not stack.
fn kept_captures(rule: &Rule, captures: &Captures) -> Captures {
    let mut kept = captures.clone();
    for step in &rule.steps {
        if let Action::Stack { capture, .. } = &step.action {
            kept.remove(capture);
        }
    }
    kept
}

/// The slot that a key is, of a parameter that is known by its number alone.
fn numbered_slot(families: &Families, key: &str) -> Option<String> {
    families.of(key).into_iter().find_map(|(family, name)| match family.kind {
        FamilyKind::Slot(slot) if !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit()) => Some(slot),
        _ => None,
    })
}

/// Slots without a parameter's name cannot follow it: where parameters change by more than their names, they would be the slots of
/// tensors that are not there any more.
fn check_numbered(rules: &Rules, report: &ViewReport, numbered: &[&String]) -> Result<(), String> {
    let Some(first) = numbered.first() else { return Ok(()) };
    let changes = |step: &Step| {
        !matches!(step.action, Action::Cast { .. } | Action::Dequantise { .. } | Action::Quantise { .. } | Action::Lora { .. })
    };
    let changing = |(rule, did): &(&Rule, &RuleReport)| did.taken > 0 && rule.steps.iter().any(changes);
    let Some((rule, _)) = rules.rules.iter().zip(&report.rules).find(changing) else { return Ok(()) };
    Err(format!(
        "{} changes the layout of parameters, and {} slots of the optimizer have numbers in place of parameters' names ({first:?} is the \
         first), so that nothing tells whom they have to follow: say what becomes of them, such as [slots] exp_avg = \"drop\" or \"same\"",
        rule.describe(),
        numbered.len()
    ))
}

/// Every pattern of every rule that is not optional takes something.
fn check_matches(rules: &Rules, groups: &[BTreeMap<Captures, Group>], report: &ViewReport) -> Result<(), String> {
    for ((rule, groups), report) in rules.rules.iter().zip(groups).zip(&report.rules) {
        if rule.optional || (rule.to.is_empty() && report.taken > 0) {
            continue;
        }
        let parts: BTreeSet<usize> = groups.values().flat_map(|g| g.values()).flatten().map(|taken| taken.part).collect();
        if let Some((_, pattern)) = rule.from.iter().enumerate().find(|(part, _)| !parts.contains(part)) {
            let hint = "mark the rule optional = true if that is fine";
            return Err(format!("{}: no key matches {:?}; {hint}", rule.describe(), pattern.text()));
        }
    }
    Ok(())
}

/// Whether a step makes one tensor of those of several names.
fn joins(step: &Step) -> bool {
    matches!(step.action, Action::Concat { .. } | Action::Dequantise { .. } | Action::Lora { .. })
}

/// Old and new names of parameters.
type Renamed = Vec<(String, String)>;

struct Maker<'m> {
    catalog: &'m Catalog,
    rules: &'m Rules,
    rule: &'m Rule,
    slots: &'m Slots<'m>,
    made: &'m mut Vec<(usize, String, CatalogEntry)>,
    report: &'m mut RuleReport,
    same: &'m mut Vec<Vec<String>>,
}

/// How a family follows a rule.
#[derive(PartialEq)]
enum Follows {
    /// Its tensors go through the steps.
    Steps,
    /// It is the same for all, and only names change.
    Names,
}

impl Maker<'_> {
    fn entry(&self, position: usize) -> Option<(&str, &CatalogEntry)> {
        self.catalog.entries.get_index(position).map(|(key, entry)| (key.as_str(), entry))
    }

    /// Carries the rule out for all that has the same captures.
    fn group(&mut self, group: &Group) -> Result<Renamed, String> {
        let mut renamed = Renamed::new();
        // From the names of new tensors to those that they are made from, told by the first family whose tensors went through.
        let mut pattern: Option<Vec<(String, Vec<String>)>> = None;
        let mut later = Vec::new();
        for (family, all) in group {
            if self.is_dropped(family) {
                continue;
            }
            self.check_parts(family, all)?;
            match self.follows(family, all)? {
                Follows::Steps => {
                    self.check_casts(all)?;
                    let pieces = self.pieces(family, all, true)?;
                    if pattern.is_none() {
                        pattern = Some(pieces.iter().map(|(name, piece)| (name.clone(), self.names_of(all, piece))).collect());
                    }
                    for (name, piece) in pieces {
                        self.put(family, &name, piece)?;
                    }
                }
                Follows::Names => later.push((family, all)),
            }
        }
        for (family, all) in later {
            let map = match &pattern {
                Some(map) => map.clone(),
                None => {
                    let pieces = self.pieces(family, all, false)?;
                    let map: Vec<_> = pieces.iter().map(|(name, piece)| (name.clone(), self.names_of(all, piece))).collect();
                    pattern = Some(map.clone());
                    map
                }
            };
            let positions: HashMap<&str, usize> = all.iter().map(|taken| (taken.name.as_str(), taken.position)).collect();
            for (name, sources) in map {
                let sources: Vec<usize> = sources.iter().filter_map(|name| positions.get(name.as_str()).copied()).collect();
                self.put_same(family, &name, sources);
            }
        }
        for (new, sources) in pattern.into_iter().flatten() {
            renamed.extend(sources.into_iter().map(|old| (old, new.clone())));
        }
        Ok(renamed)
    }

    /// Codes are not cast without their scales.
    fn check_casts(&self, all: &[Taken]) -> Result<(), String> {
        if !self.rule.steps.iter().any(|step| matches!(step.action, Action::Cast { .. })) {
            return Ok(());
        }
        for (key, entry) in all.iter().filter_map(|taken| self.entry(taken.position)) {
            if let Some(scales) = scales_of(self.catalog, key, entry) {
                let hint = "dequantise them";
                return Err(format!("{key:?} is codes scaled by {scales:?}: a cast of the codes alone gives no weights; {hint}"));
            }
        }
        Ok(())
    }

    fn names_of(&self, all: &[Taken], piece: &Piece) -> Vec<String> {
        let names = all.iter().filter(|taken| piece.sources.contains(&taken.position));
        names.map(|taken| taken.name.clone()).collect()
    }

    /// Whether a family is of slots that the rules leave out.
    fn is_dropped(&self, family: &Family) -> bool {
        matches!(&family.kind, FamilyKind::Slot(slot) if self.rules.slots.get(slot) == Some(&SlotRule::Drop))
    }

    /// Where tensors of several names are joined, each group has all of them.
    fn check_parts(&self, family: &Family, all: &[Taken]) -> Result<(), String> {
        if family.kind == FamilyKind::Setting || !self.rule.steps.iter().any(joins) {
            return Ok(());
        }
        let mut there: BTreeMap<&Captures, BTreeSet<usize>> = BTreeMap::new();
        for taken in all {
            there.entry(&taken.captures).or_default().insert(taken.part);
        }
        for (captures, parts) in there {
            for (part, pattern) in self.rule.from.iter().enumerate() {
                if !parts.contains(&part) {
                    return Err(format!("{:?} does not exist", family.key(&pattern.name(captures)?)));
                }
            }
        }
        Ok(())
    }

    /// How a family follows the rule: a parameter by its steps, a slot by them where it has its parameter's shape.
    fn follows(&self, family: &Family, all: &[Taken]) -> Result<Follows, String> {
        let FamilyKind::Slot(slot) = &family.kind else {
            let steps = family.kind == FamilyKind::Parameter && all.iter().any(|taken| self.tensor_shape(taken).is_some());
            return match (steps, all.iter().find(|taken| self.tensor_shape(taken).is_none())) {
                (true, Some(value)) => Err(format!("{:?} is a plain value, and others of its rule are tensors", value.name)),
                (true, None) => Ok(Follows::Steps),
                (false, Some(value)) if family.kind == FamilyKind::Parameter && !self.rule.steps.is_empty() => {
                    Err(format!("{:?} is a plain value, which no step can change", value.name))
                }
                (false, _) => Ok(Follows::Names),
            };
        };
        match self.rules.slots.get(slot) {
            Some(SlotRule::Steps) => {
                return match all.iter().find(|taken| self.tensor_shape(taken).is_none()) {
                    Some(value) => Err(format!("{:?} is a plain value, which no step can change", family.key(&value.name))),
                    None => Ok(Follows::Steps),
                };
            }
            Some(SlotRule::Drop | SlotRule::Same) => return Ok(Follows::Names),
            // Names change, and nothing else: whatever its shape is, it stays.
            None if self.rule.steps.is_empty() => return Ok(Follows::Steps),
            None => {}
        }
        let mut seen: [Option<&Taken>; 2] = [None, None];
        for taken in all {
            let number = match self.tensor_shape(taken) {
                Some(own) => self.slots.kind(family, slot, &taken.name, own)? == Kind::Number,
                None => true,
            };
            seen[usize::from(number)].get_or_insert(taken);
        }
        match seen {
            [Some(like), Some(number)] => {
                let (like, number) = (family.key(&like.name), family.key(&number.name));
                Err(format!("{like:?} has its parameter's shape, and {number:?} has not"))
            }
            [Some(_), None] => Ok(Follows::Steps),
            [None, _] => Ok(Follows::Names),
        }
    }

    fn tensor_shape(&self, taken: &Taken) -> Option<&[u64]> {
        match &self.entry(taken.position)?.1.kind {
            CatalogKind::Tensor(tensor) => Some(&tensor.shape),
            CatalogKind::Value(_) => None,
        }
    }

    /// What the steps make, by name. Without `tensors` only names are made.
    fn pieces(&self, family: &Family, all: &[Taken], tensors: bool) -> Result<Vec<(String, Piece)>, String> {
        let piece = |taken: &Taken| {
            let tensor = match self.entry(taken.position).map(|(_, entry)| &entry.kind) {
                Some(CatalogKind::Tensor(tensor)) if tensors => Some(tensor.copied()),
                _ => None,
            };
            let key = self.entry(taken.position).map(|(key, _)| key.to_owned());
            Piece { part: taken.part, captures: taken.captures.clone(), tensor, sources: vec![taken.position], key }
        };
        let named = |why: String| match all.first() {
            Some(first) => format!("{:?}: {why}", family.key(&first.name)),
            None => why,
        };
        let pieces = run(self.rule, all.iter().map(piece).collect()).map_err(named)?;
        let mut named = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let Some(pattern) = self.rule.to.get(piece.part) else {
                return Err(format!("tensor {} of what it makes has no name", piece.part));
            };
            named.push((pattern.name(&piece.captures)?, piece));
        }
        Ok(named)
    }

    fn put(&mut self, family: &Family, name: &str, piece: Piece) -> Result<(), String> {
        let first = piece.sources.iter().copied().min().unwrap_or(0);
        let Some((stored, old)) = self.catalog.entries.get_index(first) else { return Err("an entry was lost".to_owned()) };
        let key = family.key(name);
        let path = family.path(stored, old.path.as_ref(), name);
        let entry = match piece.tensor {
            Some(tensor) => CatalogEntry::tensor(path, tensor),
            None => CatalogEntry { path, kind: old.copied().kind },
        };
        self.note(key, first, &piece.sources, entry);
        Ok(())
    }

    /// One entry for several that must hold the same.
    fn put_same(&mut self, family: &Family, name: &str, sources: Vec<usize>) {
        let Some(first) = sources.iter().copied().min() else { return };
        let Some((stored, old)) = self.catalog.entries.get_index(first) else { return };
        let path = family.path(stored, old.path.as_ref(), name);
        let entry = CatalogEntry { path, kind: old.copied().kind };
        if sources.len() > 1 {
            let keys = sources.iter().filter_map(|&position| self.entry(position)).map(|(key, _)| key.to_owned());
            self.same.push(keys.collect());
        }
        self.note(family.key(name), first, &sources, entry);
    }

    fn note(&mut self, key: String, first: usize, sources: &[usize], entry: CatalogEntry) {
        let (shape, dtype) = match &entry.kind {
            CatalogKind::Tensor(tensor) => (Some(tensor.shape.to_vec()), Some(tensor.dtype.name().to_owned())),
            CatalogKind::Value(_) => (None, None),
        };
        let from = sources.iter().filter_map(|&position| self.entry(position)).map(|(key, _)| key.to_owned()).collect();
        self.report.made.push(Made { key: key.clone(), shape, dtype, from });
        self.made.push((first, key, entry));
    }
}

impl Family {
    /// Where a new key sits in the tree, by where the old one does.
    fn path(&self, stored: &str, path: Option<&reshard_formats::KeyPath>, name: &str) -> Option<reshard_formats::KeyPath> {
        let path = path?;
        if self.after.is_empty() {
            return Some(new_path(stored, Some(path), &self.key(name), None));
        }
        // A slot is a container's own entry; what is renamed is the container.
        let (Some((slot, above)), Some(container)) = (path.split_last(), stored.strip_suffix(self.after.as_str())) else {
            return Some(new_path(stored, Some(path), &self.key(name), None));
        };
        let mut new = new_path(container, Some(&above.to_vec()), &format!("{}{name}", self.before), None);
        new.push(slot.clone());
        Some(new)
    }
}
