"""What a case is, how one is made of a seed, and what makes it a possible one."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass, field, replace
from typing import Any

FSDP1 = ("fsdp1_flat", "fsdp1_orig", "fsdp1_tp")
FSDP2 = ("fsdp2", "hsdp", "tp_fsdp2")
TENSOR_PARALLEL = ("tp", "tp_fsdp2", "fsdp1_tp")
WRAPPERS = ("none", "ddp", "fsdp1_flat", "fsdp1_orig", "fsdp1_tp", "fsdp2", "hsdp", "tp", "tp_fsdp2")
#: Roads whose state-dict calls are PyTorch's own.
THEIRS = ("theirs", "theirs_storage")
#: Roads whose state dicts have PyTorch's own tensors.
AS_TORCH = ("our_calls_storage", "drop_in", "installed")
SAVE_ROADS = ("ours", "async", "direct", "stateful", "our_calls_storage", "drop_in", "installed", "full", *THEIRS)
LOAD_ROADS = ("ours", "direct", "stateful", "our_calls_storage", "drop_in", "installed", "by_hand", "broadcast", *THEIRS)
#: What torch.optim has; those that a release lacks are left out when a case is played.
OPTIMIZERS = ("Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD LBFGS Muon NAdam RAdam RMSprop Rprop SGD SparseAdam").split()
#: Optimizers whose state is no function of elements, or that need all of a parameter.
WHOLE = ("LBFGS", "SparseAdam", "Adafactor", "Muon")


@dataclass(frozen=True)
class Part:
    """One module of a model."""

    kind: str = "block"
    size: int = 5
    dtype: str = "float32"
    bias: bool = True
    #: Wrapped by itself, and a parameter group of its own if there are several.
    unit: bool = False
    frozen: bool = False
    unused: bool = False
    extra: str = ""
    inner: str = ""
    group: int = 0


@dataclass(frozen=True)
class Side:
    """How the model is laid out, and what has been done with it."""

    wrapper: str = "none"
    world: int = 1
    strategy: str = "full"
    outer: str = ""
    steps: int = 1
    after: str = "trained"
    foreach: bool = True


@dataclass(frozen=True)
class Case:
    seed: int = 0
    width: int = 4
    parts: tuple[Part, ...] = ()
    optimizer: str = "AdamW"
    settings: dict[str, Any] = field(default_factory=dict)
    groups: int = 1
    empty_group: bool = False
    odd_groups: bool = False
    tensor_lr: bool = False
    optimizers: int = 1
    source: Side = Side()
    target: Side = Side()
    save: str = "ours"
    load: str = "ours"
    options: dict[str, Any] = field(default_factory=dict)
    save_options: dict[str, Any] = field(default_factory=dict)
    load_options: dict[str, Any] = field(default_factory=dict)
    #: A random plain state instead of a model.
    plain: bool = False

    def text(self) -> str:
        """The case as a command takes it: what differs from the simplest."""
        return json.dumps(_differing(self), separators=(",", ":"))


def _differing(thing: Any) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for one in dataclasses.fields(thing):
        value = getattr(thing, one.name)
        default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        if value != default:
            if dataclasses.is_dataclass(value):
                value = _differing(value)
            elif one.name == "parts":
                value = [_differing(part) for part in value]
            given[one.name] = value
    return given


def case_of(text: str) -> Case:
    """The case that a text names."""
    given = json.loads(text)
    parts = tuple(Part(**part) for part in given.pop("parts", ()))
    sides = {name: Side(**given.pop(name, {})) for name in ("source", "target")}
    return Case(**given, **sides, parts=parts)


def random_case(seed: int, worlds: tuple[int, int] | None = None, fsdp2: bool = True) -> Case:
    """A case, by its seed alone (and what a batch has in common)."""
    rng = random.Random(seed)
    if rng.random() < 0.12:
        return Case(
            seed=seed, plain=True, save=rng.choice(("ours", "storage", "async")), load=rng.choice(("ours", "storage", "open"))
        )
    worlds = worlds or (rng.randint(1, 4), rng.randint(1, 4))
    names = [name for name in WRAPPERS if fsdp2 or name not in FSDP2]
    optimizer = rng.choice(OPTIMIZERS) if rng.random() < 0.6 else rng.choice(("AdamW", "Adam", "SGD"))
    case = Case(
        seed=seed,
        width=rng.choice((1, 3, 4, 5, 8)),
        parts=tuple(_part(rng) for _ in range(rng.randint(0, 5))),
        optimizer=optimizer,
        settings=_settings(rng, optimizer),
        groups=rng.choice((1, 1, 2, 3)),
        empty_group=rng.random() < 0.15,
        odd_groups=rng.random() < 0.2,
        tensor_lr=rng.random() < 0.2,
        optimizers=rng.choice((1, 1, 1, 2)),
        source=_side(rng, names, worlds[0], (0, 1, 1, 2)),
        target=_side(rng, names, worlds[1], (0, 0, 1)),
        save=rng.choice(SAVE_ROADS),
        load=rng.choice(LOAD_ROADS),
        options=_options(rng),
        save_options=_save_options(rng),
        load_options=_load_options(rng),
    )
    return possible(case)


def _part(rng: random.Random) -> Part:
    kind = rng.choice(("block", "block", "norm", "batch", "bag", "empty", "scalars", "tied"))
    return Part(
        kind=kind,
        size=rng.choice((1, 2, 3, 5, 7, 8)),
        dtype=rng.choice(("float32", "float32", "float32", "float64", "bfloat16", "float16")),
        bias=rng.random() < 0.7,
        unit=rng.random() < 0.5,
        frozen=rng.random() < 0.15,
        unused=rng.random() < 0.15,
        extra=rng.choice(("", "", "dict", "tensor")),
        inner=rng.choice(("", "", "", "checkpointed", "compiled", "compiled_checkpointed", "checkpointed_compiled")),
        group=rng.randint(0, 2),
    )


def _side(rng: random.Random, names: list[str], world: int, steps: tuple[int, ...]) -> Side:
    return Side(
        wrapper=rng.choice(names),
        world=world,
        strategy=rng.choice(("full", "full", "grad_op", "no_shard", "hybrid", "hybrid_zero2")),
        # Tracing takes seconds, so that it is done now and then.
        outer=rng.choice(("", "", "", "compiled")) if rng.random() < 0.96 else "traced",
        steps=rng.choice(steps),
        after=rng.choice(("trained", "zeroed", "evaluated", "evaluated_with_gradients")),
        foreach=rng.random() < 0.5,
    )


def _settings(rng: random.Random, optimizer: str) -> dict[str, Any]:
    choices: dict[str, list[dict[str, Any]]] = {
        "Adam": [{"amsgrad": True}, {"fused": True}, {"weight_decay": 0.1}, {"maximize": True}],
        "AdamW": [{"amsgrad": True}, {"fused": True}, {"betas": [0.5, 0.75]}],
        "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.5}, {"fused": True}],
        "RMSprop": [{"centered": True}, {"momentum": 0.9}, {"centered": True, "momentum": 0.5}],
        "Adagrad": [{"initial_accumulator_value": 0.5}, {"lr_decay": 0.1}],
        "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    }
    return rng.choice([{}, *choices.get(optimizer, [])])


def _options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name in ("cpu_offload", "ignore_frozen_params", "flatten_optimizer_state_dict"):
        if rng.random() < 0.2:
            options[name] = True
    if rng.random() < 0.1:
        options["strict"] = False
    return options


def _save_options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in (
        ("files_per_rank", 2),
        ("check_replicas", True),
        ("check_files", False),
        ("split_replicated_above", 16),
        ("checksums", False),
        ("sync", False),
        ("overwrite", True),
        ("strict_values", True),
    ):
        if rng.random() < 0.15:
            options[name] = value
    return options


def _load_options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in (("verify", rng.choice(("never", "always"))), ("exchange", True), ("cast", "widening"), ("strict", False)):
        if rng.random() < 0.15:
            options[name] = value
    return options


def possible(case: Case) -> Case:
    """The case without what cannot be, by PyTorch's own rules or by the meaning of the words."""
    if case.plain:
        return case
    source, target = _possible_side(case.source), _possible_side(case.target)
    wrappers = (source.wrapper, target.wrapper)
    sharded = any(name in FSDP1 + FSDP2 for name in wrappers)
    whole = case.optimizer in WHOLE
    if whole and case.optimizer in ("LBFGS", "SparseAdam"):
        source, target = (_for_whole(side, case.optimizer) for side in (source, target))
        wrappers = (source.wrapper, target.wrapper)
        sharded = any(name in FSDP1 + FSDP2 for name in wrappers)
    if case.optimizer in ("Adafactor", "Muon"):
        # A part of a flat parameter is no matrix: they keep other slots of it than of the parameter, or take it not at all.
        source, target = (_for_whole(side, case.optimizer) if side.wrapper in FSDP1 else side for side in (source, target))
        wrappers = (source.wrapper, target.wrapper)
        sharded = any(name in FSDP1 + FSDP2 for name in wrappers)
    parts = tuple(_possible_part(part, sharded, wrappers) for part in case.parts)
    if source.steps == 0:
        # Slots that a checkpoint does not have are missing, which is not what is asked here.
        target = replace(target, steps=0)
    save, load = case.save, case.load
    if (save == "stateful") != (load == "stateful"):
        # Its keys are its own.
        save = load = "ours"
    options = dict(case.options)
    if (save == "direct") or (load == "direct"):
        options = {}
    if case.optimizer == "LBFGS":
        options.pop("flatten_optimizer_state_dict", None)
        # Its state holds lists, which the oracle tells as text alone.
        load = "ours" if load in ("by_hand", "broadcast") else load
    if any(road in THEIRS for road in (save, load)):
        # PyTorch steps optimizers to find their slots.
        source = replace(source, steps=max(source.steps, 1))
    # Parts of flat parameters inside of slices are no DTensors: state dicts of PyTorch's own tensors are refused.
    save = "ours" if save in AS_TORCH and source.wrapper == "fsdp1_tp" else save
    load = "ours" if load in AS_TORCH and target.wrapper == "fsdp1_tp" else load
    if (save in THEIRS) != (load in THEIRS):
        # PyTorch's names of what is compiled inside of another wrapper are not those of the bare model.
        parts = tuple(replace(part, inner="checkpointed" if "checkpointed" in part.inner else "") for part in parts)
    if load in ("by_hand", "broadcast"):
        options.pop("ignore_frozen_params", None)
        options.pop("flatten_optimizer_state_dict", None)
        options.pop("cpu_offload", None)
    groups = 1 if case.optimizer == "LBFGS" else case.groups
    return replace(
        case,
        source=source,
        target=target,
        parts=parts,
        save=save,
        load=load,
        options=options,
        groups=groups,
        empty_group=case.empty_group and groups > 1,
        # What PyTorch's planner does not keep of groups' values is refused (test_state_planned.py).
        odd_groups=case.odd_groups and save != "our_calls_storage",
        # Objects have a key each, state dicts of several optimizers one.
        optimizers=case.optimizers if groups > 1 and not case.empty_group and "direct" not in (save, load) else 1,
        tensor_lr=case.tensor_lr and case.optimizer in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adamax"),
    )


def _possible_side(side: Side) -> Side:
    wrapper, world = side.wrapper, side.world
    if world % 2 and wrapper in ("hsdp", "tp_fsdp2", "fsdp1_tp"):
        wrapper = {"hsdp": "fsdp2", "tp_fsdp2": "fsdp2", "fsdp1_tp": "fsdp1_orig"}[wrapper]
    strategy = side.strategy if wrapper.startswith("fsdp1") else "grad_op" if side.strategy == "grad_op" else "full"
    if wrapper not in FSDP1 + FSDP2:
        strategy = "full"
    if "hybrid" in strategy and (world % 2 or wrapper == "fsdp1_tp"):
        strategy = "full"
    if wrapper == "fsdp1_tp" and strategy == "no_shard":
        strategy = "full"
    return replace(side, wrapper=wrapper, strategy=strategy)


def _for_whole(side: Side, optimizer: str) -> Side:
    """Where such an optimizer can run. Sparse gradients are for FSDP1's original parameters alone, which are cut into plain tensors;
    LBFGS goes over all parameters at once, which is no state of theirs on several ranks."""
    if side.wrapper == "ddp" or (optimizer == "SparseAdam" and side.wrapper == "fsdp1_orig"):
        return replace(side, outer="")
    if optimizer == "LBFGS" and side.wrapper == "fsdp1_orig" and side.world == 1:
        return replace(side, outer="", strategy="full")
    return replace(side, wrapper="none", outer="", strategy="full")


def _possible_part(part: Part, sharded: bool, wrappers: tuple[str, ...]) -> Part:
    if part.kind == "block" and "fsdp1_tp" in wrappers:
        # Gradients by hand are for parameters that are not flat: layers have to compute.
        part = replace(part, size=2 * part.size if part.size % 2 else part.size)
    if part.kind == "empty" and any(name in FSDP2 for name in wrappers):
        # FSDP2 reduces no gradient without elements.
        part = replace(part, frozen=True)
    if part.kind == "tied":
        # Parameters are shared inside of one unit only.
        return replace(part, unit=False, frozen=False, unused=False, dtype="float32", group=0, inner="", bias=part.bias)
    if part.kind == "scalars" and sharded:
        # FSDP takes no parameter without dimensions.
        part = replace(part, kind="bag")
    if part.kind == "batch":
        part = replace(part, dtype="float32", inner="" if "checkpointed" in part.inner else part.inner)
    odd = part.frozen or part.unused or part.dtype != "float32"
    unit = part.unit or (sharded and odd)
    return replace(part, unit=unit, group=part.group if unit else 0)
