//! A device mesh, the rules by which tensors are sharded over it (`dp=4,tp=2` and `GLOB=S(0),S(1)`), and who then writes what.
//!
//! ```
//! let layout = reshard::mesh::Layout::parse("dp=4,tp=2", &["*.weight=R,S(0)"])?;
//! assert_eq!(layout.ranks(), 8);
//! # Ok::<(), reshard::Error>(())
//! ```

use reshard_formats::DType;
use reshard_layout::{Mesh, Placement, Region, holders};

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Geometry, Result};
use crate::select::{Glob, Selection, Unmatched, unmatched_names};

/// How tensors whose key fits are cut: one placement for each dimension of the mesh.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LayoutRule {
    /// Which keys.
    pub pattern: Glob,
    /// One for each dimension of the mesh.
    pub placements: Vec<Placement>,
}

impl LayoutRule {
    /// Parses `GLOB=S(0),S(1),R`.
    pub fn parse(text: &str) -> Result<LayoutRule> {
        let invalid = |why: String| Error::invalid(format!("invalid rule {text:?}: {why}; a rule is like 'GLOB=S(0),R'"));
        let (pattern, placements) = text.rsplit_once('=').ok_or_else(|| invalid("it has no `=`".into()))?;
        let placements = placements
            .split(',')
            .map(|word| {
                let word = word.trim();
                let number = |name: &str| {
                    let inner = word.strip_prefix(name)?.trim_start().strip_prefix('(')?.strip_suffix(')')?;
                    inner.trim().trim_start_matches("dim=").parse::<usize>().ok()
                };
                match word {
                    "R" | "Replicate" | "Replicate()" => Ok(Placement::Replicate),
                    _ => match number("S").or_else(|| number("Shard")) {
                        Some(dim) => Ok(Placement::Shard(dim)),
                        None => Err(invalid(format!("{word:?} is neither R nor S(dimension)"))),
                    },
                }
            })
            .collect::<Result<_>>()?;
        Ok(LayoutRule { pattern: Glob::new(pattern)?, placements })
    }
}

/// A mesh of ranks and the rules by which tensors are cut for it. The first rule that fits decides; a tensor that none fits
/// is replicated.
#[derive(Debug, Clone)]
pub struct Layout {
    mesh: Mesh,
    rules: Vec<LayoutRule>,
    /// Whether rules may name dimensions that a tensor lacks, which then count as replicated.
    lenient: bool,
}

impl Layout {
    /// A mesh and rules. Every rule needs a placement for every dimension of the mesh.
    pub fn new(mesh: Mesh, rules: Vec<LayoutRule>) -> Result<Layout> {
        for rule in &rules {
            if rule.placements.len() != mesh.ndim() {
                return Err(Error::invalid(format!(
                    "the rule for {:?} has {} placements ({}), the mesh {} dimensions",
                    rule.pattern.text(),
                    rule.placements.len(),
                    placements_text(&rule.placements),
                    mesh.ndim(),
                )));
            }
        }
        Ok(Layout { mesh, rules, lenient: false })
    }

    /// Parses a mesh like `dp=4,tp=2` (or `4,2`) and rules like `GLOB=S(0),R`.
    pub fn parse<S: AsRef<str>>(mesh: &str, rules: &[S]) -> Result<Layout> {
        let invalid = |why: &str| Error::invalid(format!("invalid mesh {mesh:?}: {why}; a mesh is like 'dp=4,tp=2'"));
        let mut sizes = Vec::new();
        let mut names: Vec<String> = Vec::new();
        for (i, word) in mesh.split(',').enumerate() {
            let (name, size) = word
                .trim()
                .split_once('=')
                .map_or_else(|| (format!("dim{i}"), word.trim()), |(n, s)| (n.trim().to_owned(), s.trim()));
            sizes.push(size.parse::<u64>().map_err(|_| invalid(&format!("{size:?} is not a number")))?);
            names.push(name);
        }
        let mesh = Mesh::new(&sizes).and_then(|m| m.named(&names)).map_err(|e| invalid(&e.to_string()))?;
        let rules = rules.iter().map(|rule| LayoutRule::parse(rule.as_ref())).collect::<Result<_>>()?;
        Layout::new(mesh, rules)
    }

    /// Every tensor cut along its first dimension over so many ranks.
    pub fn rows(ranks: u64) -> Result<Layout> {
        let rule = LayoutRule { pattern: Glob::new("*")?, placements: vec![Placement::Shard(0)] };
        Ok(Layout { lenient: true, ..Layout::new(Mesh::new(&[ranks]).given()?, vec![rule])? })
    }

    /// FSDP's: every tensor cut along its first dimension over the ranks of a mesh of one dimension.
    pub fn fully_sharded(mesh: &str) -> Result<Layout> {
        let layout = Layout::parse(mesh, &["*=S(0)"])?;
        Ok(Layout { lenient: true, ..layout })
    }

    /// The rules that no selected key of a checkpoint fits.
    pub fn unmatched(&self, selection: &Selection, checkpoint: &Checkpoint) -> Vec<Unmatched> {
        unmatched_names(self.rules.iter().map(|rule| &rule.pattern), selection, checkpoint)
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The number of ranks.
    pub fn ranks(&self) -> u64 {
        self.mesh.shape().iter().product()
    }

    /// How a tensor of so many dimensions is cut.
    pub fn placements(&self, key: &str, ndim: usize) -> Result<Vec<Placement>> {
        let Some(rule) = self.rules.iter().find(|rule| rule.pattern.matches(key)) else {
            return Ok(vec![Placement::Replicate; self.mesh.ndim()]);
        };
        rule.placements
            .iter()
            .map(|placement| match placement {
                // A scalar has nothing to cut, whatever a rule for `*` says.
                Placement::Shard(dim) if *dim >= ndim && (ndim == 0 || self.lenient) => Ok(Placement::Replicate),
                Placement::Shard(dim) if *dim >= ndim => Err(Error::invalid(format!(
                    "the rule for {:?} cuts dimension {dim}, but {key:?} has only {ndim}",
                    rule.pattern.text()
                ))),
                other => Ok(*other),
            })
            .collect()
    }
}

/// A region of a tensor, and the rank that writes it.
pub(crate) struct RankPiece {
    pub(crate) rank: usize,
    /// Position among the tensors.
    pub(crate) tensor: usize,
    pub(crate) region: Region,
}

impl Layout {
    /// Who writes what: each distinct region once, by the least loaded of those who hold it.
    pub(crate) fn pieces<'t>(&self, tensors: impl Iterator<Item = (&'t str, &'t [u64], DType)>) -> Result<Vec<RankPiece>> {
        let mut loads = vec![0u64; self.ranks() as usize];
        let mut pieces = Vec::new();
        for (tensor, (key, shape, dtype)) in tensors.enumerate() {
            let placements = self.placements(key, shape.len())?;
            let found = holders(self.mesh(), &placements, shape).map_err(|e| Error::invalid(format!("{:?}: {e}", key)))?;
            let empty = shape.contains(&0);
            let mut wrote = false;
            for (region, ranks) in found {
                // An empty piece of a tensor that has elements says nothing; an empty tensor keeps one record.
                if region.is_empty() && (!empty || wrote) {
                    continue;
                }
                let region = if empty { Region::whole(shape).given()? } else { region };
                let least = ranks
                    .iter()
                    .filter_map(|&r| usize::try_from(r).ok())
                    .filter(|&r| r < loads.len())
                    .min_by_key(|&r| (loads[r], r));
                let rank = least.ok_or_else(|| Error::internal(format!("no rank holds {region} of {:?}", key)))?;
                loads[rank] += region.volume().saturating_mul(dtype.size()).max(1);
                pieces.push(RankPiece { rank, tensor, region });
                wrote = true;
            }
        }
        Ok(pieces)
    }
}

/// The text of placements, as rules write them.
fn placements_text(placements: &[Placement]) -> String {
    let one = |placement: &Placement| match placement {
        Placement::Replicate => "R".to_owned(),
        Placement::Shard(dim) => format!("S({dim})"),
        other => format!("{other:?}"),
    };
    placements.iter().map(one).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meshes_and_rules_are_read_as_written() {
        let layout = Layout::parse("dp=4, tp=2", &["*.weight=S(0),Shard(1)", "*=R,R"]).unwrap();
        assert_eq!((layout.ranks(), layout.mesh().names()), (8, ["dp".to_owned(), "tp".to_owned()].as_slice()));
        assert_eq!(layout.placements("a.weight", 2).unwrap(), [Placement::Shard(0), Placement::Shard(1)]);
        assert_eq!(layout.placements("a.bias", 1).unwrap(), [Placement::Replicate, Placement::Replicate]);
        assert_eq!(layout.placements("x.weight", 0).unwrap(), [Placement::Replicate, Placement::Replicate]);
        assert!(layout.placements("x.weight", 1).is_err());
        for bad in ["a=S", "a", "a=S(x)", "a=P"] {
            assert!(LayoutRule::parse(bad).is_err(), "{bad}");
        }
        assert!(Layout::parse("dp=x", &[] as &[&str]).is_err());
        assert!(Layout::parse("dp=2", &["*=R,R"]).is_err());
    }
}
