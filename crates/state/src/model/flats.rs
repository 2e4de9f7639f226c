//! All flat parameters of a model, by the canonical names of their members.

use indexmap::IndexMap;

use super::module::{Identity, ModuleTree};
use super::names::canonical_below;
use crate::tree::join;
use crate::{FlatParameter, StateError};

/// The flat parameters of a model.
#[derive(Clone, Debug, Default)]
pub struct FlatModel {
    flats: Vec<FlatParameter>,
    by_member: IndexMap<String, (usize, usize)>,
    by_identity: IndexMap<Identity, usize>,
    by_raw: IndexMap<String, usize>,
}

impl FlatModel {
    /// Collects the flat parameters of a model.
    pub fn of(model: &ModuleTree) -> Result<FlatModel, StateError> {
        let mut flats = FlatModel::default();
        flats.visit(model, "", "")?;
        Ok(flats)
    }

    fn visit(&mut self, module: &ModuleTree, name: &str, raw: &str) -> Result<(), StateError> {
        if let Some(flat) = &module.manages {
            self.add(module, name, flat)?;
        }
        for (own, parameter) in &module.parameters {
            if let Some(flat) = &parameter.flat {
                let index = self.add(module, name, flat)?;
                self.by_identity.insert(parameter.identity, index);
                self.by_raw.insert(join(raw, own), index);
                self.by_raw.insert(join(name, own), index);
            }
        }
        for (child_name, child) in &module.children {
            let below = if module.wrapper.hides(child_name) { name.to_owned() } else { join(name, child_name) };
            self.visit(child, &below, &join(raw, child_name))?;
        }
        Ok(())
    }

    fn add(&mut self, module: &ModuleTree, name: &str, flat: &FlatParameter) -> Result<usize, StateError> {
        let index = self.flats.len();
        let flat = flat.clone().renamed(|member| join(name, &canonical_below(module, member)));
        for (member, info) in flat.members().iter().enumerate() {
            for name in std::iter::once(&info.name).chain(&info.aliases) {
                if self.by_member.insert(name.clone(), (index, member)).is_some() {
                    let reason = format!("'{name}' is a member of two flat parameters");
                    return Err(StateError::InvalidFlatParameter { name: flat.name().to_owned(), reason });
                }
            }
        }
        self.flats.push(flat);
        Ok(index)
    }

    /// All flat parameters, members by canonical names.
    pub fn flats(&self) -> &[FlatParameter] {
        &self.flats
    }

    /// The flat parameter that a parameter is part of, and its place among the members.
    pub fn of_member(&self, name: &str) -> Option<(&FlatParameter, usize)> {
        let (flat, member) = self.by_member.get(name)?;
        Some((self.flats.get(*flat)?, *member))
    }

    /// The flat parameter that an optimizer trains as one tensor.
    pub fn of_identity(&self, identity: Identity) -> Option<&FlatParameter> {
        self.by_identity.get(&identity).and_then(|index| self.flats.get(*index))
    }

    /// The flat parameter with this name of its own, as a name-keyed optimizer calls it.
    pub fn of_raw(&self, raw: &str) -> Option<&FlatParameter> {
        self.by_raw.get(raw).and_then(|index| self.flats.get(*index))
    }
}
