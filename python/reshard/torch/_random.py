"""The random state of a rank: Python's, NumPy's, torch's on the CPU and on its devices."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import sys
from collections.abc import Collection
from typing import Any

import torch

from .._errors import InvalidInput


def random_state() -> dict[str, Any]:
    """This process's random state, as plain data and tensors."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss],
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, words, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = [name, torch.from_numpy(words.astype("int64")), int(position), int(has_gauss), float(gauss)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def random_state_like(parts: Collection[str]) -> dict[str, Any]:
    """A random state to load into, with the parts that were saved: those that this process has not are read and left out."""
    state = random_state()
    elsewhere = {
        "numpy": ["", torch.zeros(624, dtype=torch.int64, device="cpu"), 0, 0, 0.0],
        "cuda": torch.zeros(16, dtype=torch.uint8, device="cpu"),
    }
    return {name: state.get(name, elsewhere.get(name)) for name in parts}


def set_random_state(state: dict[str, Any]) -> None:
    """Sets this process's random state, as far as it has one for each part."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and importlib.util.find_spec("numpy") is not None:
        import numpy

        name, words, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((name, words.numpy().astype("uint32"), position, has_gauss, gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def derive_random_state(saved: dict[int, Any], rank: int, size: int) -> None:
    """Seeds this process from the states of another number of ranks: the same for the same states, ranks and number of ranks."""
    if not saved:
        raise InvalidInput("no random state to derive one from")
    digest = hashlib.sha256(f"{rank} of {size}".encode())
    for number in sorted(saved):
        digest.update(saved[number]["torch"].numpy().tobytes())
    seed = int.from_bytes(digest.digest()[:7], "little")
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))
