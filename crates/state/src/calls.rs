//! The calls as users know them: getting and setting the state of a model, of its optimizers, or of both, under one set
//! of options. None of them steps an optimizer, and getting changes nothing.

use crate::optimizer::combine;
use crate::{
    FlatLoad, FlatLoadReport, FlatModel, FlatOptimizer, LiveOptimizer, LoadTarget, ModelState, ModuleTree, Names, OptimizerState,
    PhaseTimings, RawOptimizer, SetModel, SlotTensor, StateDictOptions, StateError, TensorFacts, TensorLike, flatten_optimizer,
    get_model_state, optim_state_to_load, set_model_state, sharded_optim_state, unflatten_optimizer,
};

/// Optimizer state in the form the options ask for.
#[derive(Clone, Debug)]
pub enum OptimizerTree<T> {
    /// `{"state": …, "param_groups": …}`.
    Nested(OptimizerState<T>),
    /// `state.{name}.{slot}`, `param_groups.{name}.{key}`.
    Flattened(FlatOptimizer<T>),
}

/// Plans reading the state of one or several optimizers over a model.
pub fn get_optimizer_state<T: TensorLike>(
    model: &ModuleTree,
    optimizers: Vec<(RawOptimizer<T>, LiveOptimizer<T>)>,
    options: &StateDictOptions,
    timings: &mut PhaseTimings,
) -> Result<OptimizerTree<SlotTensor<T>>, StateError> {
    options.check()?;
    if optimizers.is_empty() {
        let reason = "optimizer state is asked for and no optimizer is given".to_owned();
        return Err(StateError::InvalidOptions { reason });
    }
    let names = Names::of(model)?;
    let flats = FlatModel::of(model)?;
    let mut states = Vec::with_capacity(optimizers.len());
    for (raw, live) in optimizers {
        states.push(sharded_optim_state(raw, &live, &names, &flats, timings)?);
    }
    let state = combine(states)?;
    Ok(match options.flatten_optimizer_state_dict {
        true => OptimizerTree::Flattened(flatten_optimizer(&state)?),
        false => OptimizerTree::Nested(state),
    })
}

/// The state of a model and its optimizers, as a plan.
#[derive(Clone, Debug)]
pub struct StatePlan<T> {
    /// The model's part.
    pub model: ModelState,
    /// The optimizers' part; None without optimizers.
    pub optimizer: Option<OptimizerTree<SlotTensor<T>>>,
    /// Time per phase.
    pub timings: PhaseTimings,
}

/// Plans reading the state of a model and of its optimizers.
pub fn get_state<T: TensorLike>(
    model: &ModuleTree,
    submodules: &[&str],
    optimizers: Vec<(RawOptimizer<T>, LiveOptimizer<T>)>,
    options: &StateDictOptions,
) -> Result<StatePlan<T>, StateError> {
    let mut timings = PhaseTimings::default();
    let plan = get_model_state(model, submodules, options)?;
    let optimizer = match optimizers.is_empty() {
        true => None,
        false => Some(get_optimizer_state(model, optimizers, options, &mut timings)?),
    };
    Ok(StatePlan { model: plan, optimizer, timings })
}

/// Plans setting the state of optimizers over a model.
pub fn set_optimizer_tree<T: TensorLike>(
    model: &ModuleTree,
    given: OptimizerTree<SlotTensor<T>>,
    live: &[LiveOptimizer<T>],
    target: LoadTarget,
    options: &StateDictOptions,
) -> Result<(Vec<FlatLoad<T>>, FlatLoadReport), StateError> {
    options.check()?;
    let names = Names::of(model)?;
    let flats = FlatModel::of(model)?;
    let (given, unexpected) = match given {
        OptimizerTree::Nested(state) => {
            let size = state.state.len() + state.param_groups.len() + state.user_state.len();
            options.check_given(None, Some(size), false)?;
            (state, Vec::new())
        }
        OptimizerTree::Flattened(flat) => {
            options.check_given(None, Some(flat.len()), false)?;
            let whole: Vec<LiveOptimizer<SlotTensor<T>>> = live.iter().map(crate::flat_load::with_whole_options).collect();
            let (state, left) = unflatten_optimizer(&flat, &whole, &names)?;
            (state, left.unexpected)
        }
    };
    let (loads, mut report) = optim_state_to_load(given, live, &names, &flats, target, options)?;
    report.unexpected.extend(unexpected);
    Ok((loads, report))
}

/// What is given to set the state of a model and its optimizers.
#[derive(Clone, Debug)]
pub struct StateGiven<'a, T> {
    /// Keys of the model's state and, where known, their facts; None where only optimizers are set.
    pub model: Option<Vec<(&'a str, Option<TensorFacts>)>>,
    /// The optimizers' state; None where only the model is set.
    pub optimizer: Option<OptimizerTree<SlotTensor<T>>>,
}

/// What setting a model's state and its optimizers' comes to.
pub type SetState<T> = (Option<SetModel>, Option<(Vec<FlatLoad<T>>, FlatLoadReport)>);

/// Plans setting the state of a model and of its optimizers.
pub fn set_state<T: TensorLike>(
    model: &ModuleTree,
    given: StateGiven<'_, T>,
    live: &[LiveOptimizer<T>],
    target: LoadTarget,
    options: &StateDictOptions,
) -> Result<SetState<T>, StateError> {
    options.check()?;
    let model_plan = match given.model {
        None => None,
        Some(keys) => {
            let facts: indexmap::IndexMap<&str, Option<TensorFacts>> = keys.into_iter().collect();
            let known = |key: &str| facts.get(key).cloned().flatten();
            Some(set_model_state(model, facts.keys().copied(), known, options)?)
        }
    };
    let optimizer_plan = match given.optimizer {
        None if live.is_empty() => None,
        None => return Err(StateError::Empty { what: "optimizer" }),
        Some(tree) => Some(set_optimizer_tree(model, tree, live, target, options)?),
    };
    Ok((model_plan, optimizer_plan))
}
