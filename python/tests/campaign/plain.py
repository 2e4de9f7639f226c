"""Random plain states: what comes back is what went in, or the save says no."""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import ALONE, DTYPES, random_bytes
from test_values import random_value
from test_values import same as same_value

import reshard
import reshard.torch as rt

from .case import Case

KEYS = (
    "a",
    "b",
    "a.b",
    "",
    "0",
    0,
    1,
    "1",
    "None",
    "ünïcode",
    "with space",
    "x/y",
    "_",
    "state",
    "param_groups",
    "..",
    "a" * 300,
)


def random_tensor(rng: random.Random) -> torch.Tensor:
    """A tensor as odd as a program can have it: any dtype, no elements, no dimensions, not contiguous, a part of a larger one."""
    shape = rng.choice([(), (0,), (1,), (3,), (2, 3), (0, 4), (2, 1, 3), (5, 2)])
    tensor = random_bytes(shape, getattr(torch, rng.choice(DTYPES)), rng.randrange(1 << 30))
    kind = rng.randrange(6)
    if kind == 0 and tensor.dim() == 2:
        return tensor.t()
    if kind == 1 and tensor.dim():
        return tensor[::2]
    if kind == 2:
        return tensor.expand(2, *tensor.shape)
    if kind == 3 and tensor.is_floating_point() and tensor.element_size() > 1:
        return torch.nn.Parameter(tensor)
    return tensor


def random_state(rng: random.Random, depth: int = 0) -> dict[Any, Any]:
    state: dict[Any, Any] = {}
    for _ in range(rng.randint(0 if depth else 1, 5)):
        key = rng.choice(KEYS)
        kind = rng.randrange(7)
        if kind < 2:
            state[key] = random_tensor(rng)
        elif kind == 2 and depth < 3:
            state[key] = random_state(rng, depth + 1)
        elif kind == 3 and depth < 3:
            state[key] = [random_tensor(rng) if rng.random() < 0.5 else random_state(rng, 3) for _ in range(rng.randint(0, 3))]
        elif kind == 4:
            state[key] = (random_value(rng),)
        else:
            state[key] = random_value(rng)
    return state


def wanted_of(tree: Any, rng: random.Random) -> Any:
    """Where a state is loaded into: the same containers with other content."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros(tree.shape, dtype=torch.uint8).to(tree.dtype)
    if type(tree) is dict:
        return {key: wanted_of(value, rng) for key, value in tree.items()}
    if type(tree) is list:
        return [wanted_of(value, rng) for value in tree]
    return "another"


def difference(a: Any, b: Any, at: str = "") -> str:
    """Where two states differ first; nothing where they do not."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return f"{at}: saved {a!r}, loaded {b!r}"
        # Of one element any stride counts as contiguous.
        x, y = (t.detach().clone(memory_format=torch.contiguous_format).reshape(-1) for t in (a, b))
        same = not x.numel() or torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    elif type(a) is dict and type(b) is dict and list(map(repr, a)) == list(map(repr, b)):
        return next(filter(None, (difference(a[key], b[key], f"{at}[{key!r}]") for key in a)), "")
    elif type(a) in (list, tuple) and type(a) is type(b) and len(a) == len(b):
        return next(filter(None, (difference(x, y, f"{at}[{n}]") for n, (x, y) in enumerate(zip(a, b)))), "")
    else:
        same = same_value(a, b)
    return "" if same else f"{at}: saved {a!r}, loaded {b!r}"


def _named(tree: Any) -> Any:
    """A state whose keys are texts: PyTorch's calls sort them at the top, and load the others under their text."""
    if type(tree) is dict:
        return {str(key): _named(value) for key, value in tree.items()}
    return [_named(value) for value in tree] if type(tree) is list else tree


def run(case: Case, path: str) -> str:
    """Saves and loads a random state in this process alone."""
    rng = random.Random(case.seed)
    state = random_state(rng)
    if "storage" in (case.save, case.load):
        if not ALONE and dist.get_world_size() > 1:
            return "refused: calls of this torch are for all ranks"
        state = _named(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if case.save == "storage":
                dcp.save(state, storage_writer=rt.StorageWriter(path), **ALONE)
            elif case.save == "async":
                rt.async_save(state, path, strict_values=True, no_dist=True).result()
            else:
                rt.save(state, path, strict_values=True, no_dist=True)
        except (reshard.InvalidInput, dcp.CheckpointException) as error:
            return f"refused: {type(error).__name__}"
        if case.load == "open":
            return _by_key(state, path)
        wanted = wanted_of(state, rng)
        if case.load == "storage":
            try:
                dcp.load(wanted, storage_reader=rt.StorageReader(path), **ALONE)
            except dcp.CheckpointException as error:
                if _wants_what_is_empty(state, str(error)):
                    return "refused: PyTorch's planner wants an empty dict of a list, which is no key"
                if case.save == "storage" and _fails_without_us(state, wanted_of(state, rng), f"{path}-theirs"):
                    return f"refused: by PyTorch's planner: {type(error).__name__}"
                raise
        else:
            rt.load(wanted, path, no_dist=True)
        found = difference(state, wanted)
        if found and case.save == "storage" and _fails_without_us(state, wanted_of(state, rng), f"{path}-theirs"):
            return f"refused: PyTorch's planner loses it: {found}"
    assert not found, found
    return "fine"


def _fails_without_us(state: dict[Any, Any], wanted: dict[Any, Any], path: str) -> bool:
    """Whether PyTorch's planners cannot load what they have saved, over PyTorch's own storage: of a list of dicts they want the
    empty ones, which they do not save, and of a time they pickle no fold."""
    dcp.save(state, checkpoint_id=path, **ALONE)
    try:
        dcp.load(wanted, checkpoint_id=path, **ALONE)
    except dcp.CheckpointException:
        return True
    return bool(difference(state, wanted))


def _wants_what_is_empty(state: dict[Any, Any], error: str) -> bool:
    missing = re.search(r"Missing key in checkpoint state_dict: (.+)\.\n", error)
    return missing is not None and missing[1] in _empty_keys(state, "")


def _empty_keys(tree: Any, prefix: str) -> set[str]:
    """The flattened keys of containers that hold nothing."""
    below = tree.items() if type(tree) is dict else enumerate(tree)
    found: set[str] = set()
    for key, value in below:
        if type(value) in (dict, list):
            found |= _empty_keys(value, f"{prefix}{key}.") if value else {f"{prefix}{key}"}
    return found


def _by_key(state: dict[Any, Any], path: str) -> str:
    """Leaves by their flattened keys, without a state to load into."""
    with reshard.open(path) as checkpoint:
        keys = set(checkpoint)
        for key, value in state.items():
            if not isinstance(value, (dict, list)):
                assert str(key) in keys, f"{key!r} is not among {sorted(keys)}"
                found = checkpoint[str(key)]
                if not isinstance(value, torch.Tensor):
                    assert not difference(value, found), difference(value, found, repr(key))
    return "fine"
