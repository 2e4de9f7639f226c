//! Canonical names: what parameters, buffers and extra state are called with every wrapper taken away, whatever the
//! wrappers are and in whatever order they are nested.

use indexmap::{IndexMap, IndexSet};

use super::module::{Identity, ModuleTree};
use crate::near::nearest;
use crate::tree::join;
use crate::{StateError, TensorFacts};

/// The name under which PyTorch keeps a module's extra state.
const EXTRA_STATE: &str = "_extra_state";

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeafKind {
    /// A parameter.
    Parameter,
    /// A buffer.
    Buffer,
    /// A module's extra state.
    ExtraState,
}

/// One named thing of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedLeaf {
    /// Canonical name.
    pub name: String,
    /// Name as the live model has it, wrappers included. The members of a flat parameter share their flat parameter's.
    pub raw: String,
    /// What it is.
    pub kind: LeafKind,
    /// Which tensor it is; members of a flat parameter carry the flat parameter's. None for extra state.
    pub identity: Option<Identity>,
    /// Index among the members, if it belongs to a flat parameter.
    pub member: Option<usize>,
    /// Whether it is trained; false for buffers and extra state.
    pub requires_grad: bool,
    /// Whether it is part of the state dict; false for non-persistent buffers only.
    pub persistent: bool,
    /// Dtype and whole shape, where known.
    pub facts: Option<TensorFacts>,
}

/// All names of a model.
#[derive(Clone, Debug, Default)]
pub struct Names {
    leaves: IndexMap<String, NamedLeaf>,
    /// Names by tensor, in order; more than one where a tensor is shared.
    by_identity: IndexMap<(Identity, Option<usize>), Vec<String>>,
    by_raw: IndexMap<String, Vec<String>>,
}

impl Names {
    /// Collects the names of a model, in the order of its state dict.
    pub fn of(model: &ModuleTree) -> Result<Names, StateError> {
        model.check()?;
        let mut names = Names::default();
        names.visit(model, "", "")?;
        Ok(names)
    }

    fn visit(&mut self, module: &ModuleTree, name: &str, raw: &str) -> Result<(), StateError> {
        for (own, parameter) in &module.parameters {
            let leaf = NamedLeaf {
                name: join(name, own),
                raw: join(raw, own),
                kind: LeafKind::Parameter,
                identity: Some(parameter.identity),
                member: None,
                requires_grad: parameter.requires_grad,
                persistent: true,
                facts: parameter.facts.clone(),
            };
            match &parameter.flat {
                None => self.add(leaf)?,
                Some(flat) => {
                    let members = flat.members().iter().enumerate();
                    let own = members.clone().map(|(index, member)| (index, member, &member.name));
                    let others =
                        members.flat_map(|(index, member)| member.aliases.iter().map(move |alias| (index, member, alias)));
                    for (index, member, below) in own.chain(others) {
                        self.add(NamedLeaf {
                            name: join(name, &canonical_below(module, below)),
                            member: Some(index),
                            requires_grad: member.requires_grad,
                            facts: Some(TensorFacts::new(flat.dtype(), member.whole_shape())),
                            ..leaf.clone()
                        })?;
                    }
                }
            }
        }
        for (own, buffer) in &module.buffers {
            self.add(NamedLeaf {
                name: join(name, own),
                raw: join(raw, own),
                kind: LeafKind::Buffer,
                identity: Some(buffer.identity),
                member: None,
                requires_grad: false,
                persistent: buffer.persistent,
                facts: buffer.facts.clone(),
            })?;
        }
        if module.extra_state {
            self.add(NamedLeaf {
                name: join(name, EXTRA_STATE),
                raw: join(raw, EXTRA_STATE),
                kind: LeafKind::ExtraState,
                identity: None,
                member: None,
                requires_grad: false,
                persistent: true,
                facts: None,
            })?;
        }
        for (child_name, child) in &module.children {
            let below = if module.wrapper.hides(child_name) { name.to_owned() } else { join(name, child_name) };
            self.visit(child, &below, &join(raw, child_name))?;
        }
        Ok(())
    }

    fn add(&mut self, leaf: NamedLeaf) -> Result<(), StateError> {
        if let Some(first) = self.leaves.get(&leaf.name) {
            if first.identity == leaf.identity && first.member == leaf.member && first.kind == leaf.kind {
                // The same thing seen through two wrappers of one module; the first sight counts.
                return Ok(());
            }
            let reason = format!("'{}' and '{}' are both called '{}'", first.raw, leaf.raw, leaf.name);
            return Err(StateError::InvalidModule { reason });
        }
        if let Some(identity) = leaf.identity {
            self.by_identity.entry((identity, leaf.member)).or_default().push(leaf.name.clone());
        }
        self.by_raw.entry(leaf.raw.clone()).or_default().push(leaf.name.clone());
        self.leaves.insert(leaf.name.clone(), leaf);
        Ok(())
    }

    /// Everything with a name, in order.
    pub fn leaves(&self) -> impl Iterator<Item = &NamedLeaf> {
        self.leaves.values()
    }

    /// What has this canonical name.
    pub fn get(&self, name: &str) -> Option<&NamedLeaf> {
        self.leaves.get(name)
    }

    /// The canonical names of what the live model calls `raw`: one, or all members of a flat parameter.
    pub fn canonical(&self, raw: &str) -> &[String] {
        self.by_raw.get(raw).map_or(&[], Vec::as_slice)
    }

    /// All names of the tensor that `name` belongs to, in order, `name` itself included.
    pub fn aliases(&self, name: &str) -> &[String] {
        self.leaves.get(name).and_then(|leaf| self.by_identity.get(&(leaf.identity?, leaf.member))).map_or(&[], Vec::as_slice)
    }

    /// The first name of the same tensor: the one under which it is stored and under which optimizers know it.
    pub fn primary<'a>(&'a self, name: &'a str) -> &'a str {
        self.aliases(name).first().map_or(name, String::as_str)
    }

    /// The names of a parameter by its identity, in the order of its members; of shared ones only the first name.
    pub fn of_identity(&self, identity: Identity) -> Vec<&str> {
        let single = self.by_identity.get(&(identity, None)).and_then(|names| names.first());
        if let Some(name) = single {
            return vec![name];
        }
        (0..).map_while(|member| self.by_identity.get(&(identity, Some(member)))?.first()).map(String::as_str).collect()
    }

    /// The name most like `name`, for hints.
    pub fn nearest(&self, name: &str) -> Option<String> {
        nearest(name, self.leaves.keys().map(String::as_str))
    }

    /// Canonical prefixes of submodules given by canonical or live names.
    pub(crate) fn submodule_prefixes(model: &ModuleTree, names: &[&str]) -> Result<IndexSet<String>, StateError> {
        names
            .iter()
            .map(|name| match model.find(name) {
                Some(_) => Ok(canonical_below(model, name)),
                None => Err(StateError::UnknownName { name: (*name).to_owned(), nearest: None }),
            })
            .collect()
    }
}

/// The canonical form of a name below a module, by walking the module itself. Segments that the description does not know
/// stay as they are, except those that only a wrapper can have brought.
pub fn canonical_below(module: &ModuleTree, name: &str) -> String {
    const WRAPPED: [&str; 3] = ["_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"];
    let mut canonical = String::new();
    let mut here = Some(module);
    for segment in name.split('.') {
        // A name may leave wrappers out: step through them until the segment is known.
        while let Some(current) = here {
            let knows = current.children.contains_key(segment)
                || current.parameters.contains_key(segment)
                || current.buffers.contains_key(segment);
            let hidden = current.children.iter().find(|(child, _)| current.wrapper.hides(child));
            match hidden {
                Some((_, inner)) if !knows => here = Some(inner),
                _ => break,
            }
        }
        let hides = here.is_some_and(|current| current.wrapper.hides(segment));
        let next = here.and_then(|current| current.children.get(segment));
        let only_a_wrapper_has_it = next.is_none() && WRAPPED.contains(&segment);
        if !hides && !only_a_wrapper_has_it {
            canonical = join(&canonical, segment);
        }
        here = next;
    }
    canonical
}
