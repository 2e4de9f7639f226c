"""One case on ranks: saved on some, loaded on others, compared."""

from __future__ import annotations

import os
import pickle
import random
import re
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import RankFailed, Ranks
from torch.distributed.checkpoint.api import CheckpointException

import reshard

from . import plain, roads
from .case import THEIRS, Case
from .nets import Laid
from .oracle import canonical, content, gathered, merged, slots_by_identity, surroundings, unsharded_copies
from .training import Impossible, batch, optimizers_of, trained


@dataclass
class Outcome:
    """How a case ended: fine, impossible (PyTorch cannot build it), refused, theirs (PyTorch alone fails too) or failed."""

    how: str
    text: str = ""


def _built(case: Case, side: Any, seed: int, other: bool, start: int) -> tuple[Any, list[Any]]:
    """A model and its optimizers; what PyTorch cannot do ends here, on all ranks."""
    problem = ""
    try:
        laid = Laid(case, side, seed)
        optimizers = optimizers_of(laid, case, side, other)
        trained(laid, optimizers, case, side, start)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, problem)
    if any(told):
        raise Impossible(next(filter(None, told)))
    torch.manual_seed(case.seed)
    random.seed(case.seed)
    np.random.seed(case.seed % (1 << 32))
    if other:
        for module in laid.model.modules():
            if hasattr(module, "told"):
                module.told = {"calls": -1, "names": []} if isinstance(module.told, dict) else torch.zeros(3, dtype=torch.int64)
            for name, buffer in module._buffers.items():
                if buffer is not None and name != "cache":
                    buffer.zero_()
    return laid, optimizers


def _unchanged(before: dict[str, Any], after: dict[str, Any], when: str) -> None:
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    assert not changed, f"the {when} changed {changed[:5]}"


def _values(laid: Any, optimizers: list[Any]) -> dict[Any, Any]:
    """Values as they are, for states that are made by hand."""
    found: dict[Any, Any] = {}
    for path, module in laid.model.named_modules(remove_duplicate=False):
        if hasattr(module, "told"):
            found["extra", canonical(path)] = module.told
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            found.update({("group", number, place, key): value for key, value in group.items() if key != "params"})
    return found


def _each(cases: list[Any], one: Callable[..., tuple[str, Any]]) -> list[Any]:
    """How each case ended on this rank. After an error the processes are not what they were: the rest is for others."""
    results: list[Any] = []
    for given in cases:
        if results and results[-1][0] in ("impossible", "failed", "again"):
            results.append(("again", ""))
            continue
        try:
            results.append(one(*given))
        except Impossible as error:
            results.append(("impossible", str(error)))
        except (Exception, CheckpointException) as error:
            results.append(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"))
    return results


def saved_on(rank: int, size: int, cases: list[tuple[Case, str]]) -> list[Any]:
    return _each(cases, _saved)


def _saved(case: Case, path: str) -> tuple[str, Any]:
    if case.plain:
        return "plain", plain.run(case, path) if dist.get_rank() == 0 else ""
    laid, optimizers = _built(case, case.source, case.seed, False, 0)
    before = gathered(laid, optimizers)
    around = surroundings(laid, optimizers)
    roads.save(case, laid, optimizers, path)
    if case.save not in THEIRS:
        _unchanged(around, surroundings(laid, optimizers), "save")
        after = gathered(laid, optimizers)
        changed = [key for key in {**before, **after} if _differs(before.get(key), after.get(key))]
        assert not changed, f"the save changed {changed[:5]}"
    return "fine", pickle.dumps((before, _values(laid, optimizers)))


def _differs(a: Any, b: Any) -> bool:
    if hasattr(a, "rows") and hasattr(b, "rows"):
        return a.rows.tobytes() != b.rows.tobytes() or a.index.tobytes() != b.index.tobytes() or a.dtype != b.dtype
    return type(a) is not type(b) or a != b


def loaded_on(rank: int, size: int, cases: list[tuple[Case, str, bytes]]) -> list[Any]:
    return _each(cases, _loaded)


def _loaded(case: Case, path: str, data: bytes) -> tuple[str, Any]:
    laid, optimizers = _built(case, case.target, case.seed + 1, True, 50)
    saved = pickle.loads(data)
    before = gathered(laid, optimizers)
    around, slots = surroundings(laid, optimizers), slots_by_identity(optimizers)
    try:
        roads.load(case, laid, optimizers, path, saved)
    except (reshard.Mismatch, CheckpointException) as error:
        if isinstance(error, CheckpointException) and re.search(r"optim\S* expected BytesStorageMetadata", str(error)):
            # LBFGS has None where the checkpoint has tensors, in lists that fill up.
            raise Impossible("PyTorch's planner loads no tensor where there is a value") from error
        if isinstance(error, CheckpointException) and "Missing key" not in str(error):
            raise
        missing = re.search(r"Missing key in checkpoint state_dict: (\S+)\.\n", str(error))
        if missing and isinstance(error, CheckpointException) and _is_below(path, missing[1]):
            # PyTorch's load drops ShardedTensors of which a rank has nothing, and takes what is left for a state of torch 2.3.
            raise Impossible("PyTorch's planner takes the state for one of torch 2.3") from error
        wanted = {key for key in before if key[0] == "slot"} - {key for key in saved["whole"] if key[0] == "slot"}
        if wanted:
            # What is wanted and was not saved has to be refused.
            return "refused", str(error)
        raise
    after = gathered(laid, optimizers)
    if case.load not in THEIRS:
        _unchanged(around, surroundings(laid, optimizers), "load")
        for one, other in zip(slots, slots_by_identity(optimizers)):
            moved = [key[1] for key in one if key in other and one[key] != other[key]]
            assert not moved, f"the load made new tensors for the slots {sorted(set(moved))}"
    _used(laid, case, optimizers, after, saved)
    return "fine", pickle.dumps((before, after))


def _is_below(path: str, key: str) -> bool:
    """Whether a checkpoint has a dict under a key, taken apart."""
    with reshard.open(path) as checkpoint:
        return any(stored.startswith(f"{key}.") for stored in checkpoint)


def _used(laid: Any, case: Case, optimizers: list[Any], after: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """What was loaded is what the next forward uses, and is still there after it."""
    for name, tensor in unsharded_copies(laid):
        whole = saved["whole"].get(("param", name))
        frozen = case.options.get("ignore_frozen_params") and _is_frozen(case, name)
        if whole is not None and not frozen:
            assert content(tensor).tobytes() == whole[2], f"{name}: what the next forward uses is not what was loaded"
    if laid.synthetic:
        return
    laid.model.eval()
    with torch.no_grad():
        try:
            laid.model(batch(case, 78))
        except Exception as error:
            # Tensor parallelism of torch 2.5 on one rank; FSDP1 traced: flat by torch 2.5, with gradients by torch 2.15.
            of_dynamo = type(error).__module__.startswith("torch._dynamo") or "Dynamo" in f"{type(error).__name__}: {error}"
            if not isinstance(error, IndexError) and not of_dynamo:
                raise
            raise Impossible(f"the model does not run: {type(error).__name__}: {error}") from error
    again = gathered(laid, optimizers)
    lost = [key for key in after if _differs(after[key], again.get(key))]
    assert not lost, f"lost after the next forward: {lost[:5]}"


def _is_frozen(case: Case, name: str) -> bool:
    first = name.split(".")[0]
    return first[0] == "p" and first[1:].isdigit() and case.parts[int(first[1:])].frozen


def _compared(case: Case, saved: dict[Any, Any], before: dict[Any, Any], after: dict[Any, Any]) -> str:
    """What is there after the load and was not there before the save, or the other way round."""
    expected = dict(saved)
    for key, value in before.items():
        if key[0] == "cache" or (key[0] == "param" and case.options.get("ignore_frozen_params") and _is_frozen(case, key[1])):
            expected[key] = value
    if case.options.get("flatten_optimizer_state_dict"):
        # Groups are told by their members' names: one without members says nothing.
        empty = {key[1:] for key, value in expected.items() if key[0] == "members" and not value}
        for tree in (expected, after):
            for key in [key for key in tree if key[0] == "group" and key[1:3] in empty]:
                del tree[key]
    lines = []
    for key in sorted({**expected, **after}, key=repr):
        if key not in after:
            lines.append(f"{key} is gone")
        elif key not in expected:
            lines.append(f"{key} is new: {str(after[key])[:80]}")
        elif expected[key] != after[key] or type(expected[key]) is not type(after[key]):
            lines.append(f"{key}: saved {str(expected[key])[:160]}, loaded {str(after[key])[:160]}")
    return "\n".join(lines)


class Player:
    """Plays cases on ranks."""

    def __init__(self) -> None:
        self.ranks = Ranks(("campaign.play", "torch._dynamo"))

    def play(self, cases: list[Case]) -> list[Outcome]:
        """Cases that have their world sizes in common, in the same processes; one by one where something goes wrong."""
        try:
            outcomes = self._together(cases)
            again = [number for number, outcome in enumerate(outcomes) if outcome.how == "again"]
            for number, outcome in zip(again, self.play([cases[number] for number in again]) if again else ()):
                outcomes[number] = outcome
            return outcomes
        except (RankFailed, AssertionError) as error:
            failure = str(error)
        if len(cases) == 1:
            return [self._failed(cases[0], failure)]
        outcomes = [self.play([case])[0] for case in cases]
        if not any(outcome.how in ("failed", "theirs") for outcome in outcomes):
            outcomes[0] = Outcome("failed", f"only together with others: {failure}")
        return outcomes

    def _failed(self, case: Case, text: str) -> Outcome:
        theirs = [road for road in (case.save, case.load) if road in THEIRS]
        if theirs and not (case.save == case.load == "theirs"):
            # PyTorch from end to end: what it cannot do is not asked of our storage.
            control = self.play([replace(case, save="theirs", load="theirs")])[0]
            if control.how != "fine":
                return Outcome("theirs", text)
        elif theirs:
            return Outcome("theirs", text)
        return Outcome("failed", text)

    def _together(self, cases: list[Case]) -> list[Outcome]:
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            paths = [os.path.join(folder, str(number)) for number in range(len(cases))]
            outcomes: list[Outcome | None] = [None] * len(cases)
            told = self._on_ranks(cases[0].source.world, saved_on, list(zip(cases, paths)))
            loads: list[tuple[int, tuple[Case, str, bytes]]] = []
            wholes: dict[int, Any] = {}
            for number, case in enumerate(cases):
                hows = [rank[number] for rank in told]
                outcomes[number] = self._ended(case, hows)
                if outcomes[number] is not None:
                    continue
                pieces = [pickle.loads(data) for _, data in hows]
                try:
                    whole = merged([found for found, _ in pieces])
                except AssertionError as error:
                    # Ranks that differ before anything was saved are no state that anyone could save.
                    outcomes[number] = Outcome("impossible", f"oracle: {error}")
                    continue
                wholes[number] = whole
                loads.append((number, (case, paths[number], pickle.dumps({"whole": whole, "values": pieces[0][1]}))))
            if loads:
                given = [load for _, load in loads]
                told = self._on_ranks(cases[0].target.world, loaded_on, given)
            for place, (number, (case, _, _)) in enumerate(loads):
                hows = [rank[place] for rank in told]
                outcomes[number] = self._ended(case, hows)
                if outcomes[number] is None:
                    pieces = [pickle.loads(data) for _, data in hows]
                    outcomes[number] = self._compare(case, wholes[number], pieces)
            return [outcome or Outcome("failed", "no outcome") for outcome in outcomes]

    def _on_ranks(self, world: int, function: Callable[..., list[Any]], given: list[Any]) -> list[Any]:
        def is_failure(results: Any) -> bool:
            # Others may wait for this rank in a collective that it will never reach.
            return any(how in ("failed", "impossible") for how, _ in results)

        return self.ranks.run(world, function, given, timeout=300 + 20 * len(given), grace=30, is_failure=is_failure)

    def _ended(self, case: Case, hows: list[Any]) -> Outcome | None:
        """The outcome of a case that has ended already."""
        for rank, (how, text) in enumerate(hows):
            if how == "failed":
                return self._failed(case, f"rank {rank}: {text}")
            if how == "again":
                return Outcome("again")
        how, text = hows[0]
        if how == "plain":
            return Outcome("refused" if "refused" in text else "fine", text)
        return Outcome(how, text) if how in ("impossible", "refused") else None

    def _compare(self, case: Case, saved: dict[Any, Any], pieces: list[Any]) -> Outcome:
        try:
            before, after = merged([b for b, _ in pieces]), merged([a for _, a in pieces])
        except AssertionError as error:
            return self._failed(case, f"after the load: {error}")
        difference = _compared(case, saved, before, after)
        return self._failed(case, difference) if difference else Outcome("fine")
