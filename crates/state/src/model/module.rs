//! A description of a model: its modules with the wrappers around them, and what each of them holds. It is made once from
//! the live model and answers every question about names after that.

use indexmap::IndexMap;

use crate::{FlatParameter, StateError, TensorFacts};

/// What a module is, as far as names are concerned. A wrapper puts one more segment into the names of what it wraps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Wrapper {
    /// A module of the model itself. FSDP2 (`fully_shard`) leaves names alone, so its modules are of this kind too,
    /// or of [`Wrapper::Fsdp2`] where a caller wants to tell.
    #[default]
    None,
    /// `DistributedDataParallel`: `module`.
    Ddp,
    /// `FullyShardedDataParallel`: `_fsdp_wrapped_module`.
    Fsdp1,
    /// `fully_shard`: no segment.
    Fsdp2,
    /// `torch.compile`: `_orig_mod`.
    Compiled,
    /// An activation-checkpoint wrapper: `_checkpoint_wrapped_module`.
    ActivationCheckpoint,
    /// A module with its own name modifiers (`_fqn_modifiers`): name in the state dict → attribute that is left out.
    Custom(IndexMap<String, String>),
}

impl Wrapper {
    /// The child whose name is left out of canonical names, where there is a fixed one.
    pub fn segment(&self) -> Option<&'static str> {
        match self {
            Wrapper::Ddp => Some("module"),
            Wrapper::Fsdp1 => Some("_fsdp_wrapped_module"),
            Wrapper::Compiled => Some("_orig_mod"),
            Wrapper::ActivationCheckpoint => Some("_checkpoint_wrapped_module"),
            Wrapper::None | Wrapper::Fsdp2 | Wrapper::Custom(_) => None,
        }
    }

    /// Whether the name of this child is left out.
    pub fn hides(&self, child: &str) -> bool {
        match self {
            Wrapper::Custom(modifiers) => modifiers.values().any(|hidden| hidden == child),
            other => other.segment() == Some(child),
        }
    }
}

/// Which tensor it is. Two names with one identity are one tensor: a tied weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity(pub u64);

/// A parameter of a module.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Which tensor it is.
    pub identity: Identity,
    /// Whether it is trained at the moment.
    pub requires_grad: bool,
    /// Dtype and whole shape, where known.
    pub facts: Option<TensorFacts>,
    /// The flat parameter that stands here instead, with its members' names relative to this module.
    pub flat: Option<Box<FlatParameter>>,
}

impl Parameter {
    /// A trained parameter.
    pub fn new(identity: u64) -> Parameter {
        Parameter { identity: Identity(identity), requires_grad: true, facts: None, flat: None }
    }

    /// The same parameter, not trained.
    #[must_use]
    pub fn frozen(mut self) -> Parameter {
        self.requires_grad = false;
        self
    }

    /// The same parameter with what is known of its tensor.
    #[must_use]
    pub fn with_facts(mut self, facts: TensorFacts) -> Parameter {
        self.facts = Some(facts);
        self
    }
}

/// A buffer of a module.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// Which tensor it is.
    pub identity: Identity,
    /// Whether it is part of the module's state.
    pub persistent: bool,
    /// Dtype and shape, where known.
    pub facts: Option<TensorFacts>,
}

/// A module and everything below it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModuleTree {
    /// What kind of module it is.
    pub wrapper: Wrapper,
    /// Parameters of this module alone.
    pub parameters: IndexMap<String, Parameter>,
    /// Buffers of this module alone.
    pub buffers: IndexMap<String, Buffer>,
    /// Whether the module has extra state (`get_extra_state`).
    pub extra_state: bool,
    /// The flat parameter behind the original parameters below this module, where FSDP keeps those visible.
    pub manages: Option<Box<FlatParameter>>,
    /// Modules below it.
    pub children: IndexMap<String, ModuleTree>,
}

impl ModuleTree {
    /// An empty module of the model itself.
    pub fn new() -> ModuleTree {
        ModuleTree::default()
    }

    /// Adds a parameter.
    #[must_use]
    pub fn parameter(mut self, name: &str, parameter: Parameter) -> ModuleTree {
        self.parameters.insert(name.to_owned(), parameter);
        self
    }

    /// Adds a buffer.
    #[must_use]
    pub fn buffer(mut self, name: &str, identity: u64, persistent: bool) -> ModuleTree {
        self.buffers.insert(name.to_owned(), Buffer { identity: Identity(identity), persistent, facts: None });
        self
    }

    /// Gives the module extra state.
    #[must_use]
    pub fn with_extra_state(mut self) -> ModuleTree {
        self.extra_state = true;
        self
    }

    /// Adds a module below.
    #[must_use]
    pub fn child(mut self, name: &str, child: ModuleTree) -> ModuleTree {
        self.children.insert(name.to_owned(), child);
        self
    }

    /// The module inside a wrapper. Kinds without a segment of their own only mark the module.
    #[must_use]
    pub fn wrapped(mut self, wrapper: Wrapper) -> ModuleTree {
        match wrapper.segment() {
            Some(segment) => ModuleTree { wrapper, ..ModuleTree::default() }.child(segment, self),
            None => {
                // Name modifiers change names and must not be lost; the FSDP2 mark is only a mark.
                if matches!(self.wrapper, Wrapper::None | Wrapper::Fsdp2) {
                    self.wrapper = wrapper;
                }
                self
            }
        }
    }

    /// The module with the given name, which may be canonical or as the live model has it.
    pub fn find(&self, name: &str) -> Option<&ModuleTree> {
        if name.is_empty() {
            return Some(self);
        }
        let (first, rest) = name.split_once('.').unwrap_or((name, ""));
        if let Some(found) = self.children.get(first).and_then(|child| child.find(rest)) {
            return Some(found);
        }
        // The name leaves out wrappers: look for the same name in whatever this module hides.
        self.children.iter().filter(|(child, _)| self.wrapper.hides(child)).find_map(|(_, child)| child.find(name))
    }

    pub(crate) fn check(&self) -> Result<(), StateError> {
        if let Some(segment) = self.wrapper.segment()
            && !self.children.contains_key(segment)
        {
            let reason = format!("a {:?} wrapper has no child called '{segment}'", self.wrapper);
            return Err(StateError::InvalidModule { reason });
        }
        self.children.values().try_for_each(ModuleTree::check)
    }
}
