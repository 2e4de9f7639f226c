"""A tiny model, its data, and digests of whole states, for runs of real trainers on CPU ranks."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def net() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 50), nn.ReLU(), nn.Linear(50, 33), nn.ReLU(), nn.Linear(33, 24))


def batch(step: int) -> torch.Tensor:
    """The data of a step, the same on every rank: losses do not depend on how many there are."""
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(step))


def _feed(digest, key, value):
    if isinstance(value, dict):
        for name in sorted(value, key=str):
            _feed(digest, f"{key}.{name}", value[name])
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            _feed(digest, f"{key}.{index}", each)
    elif isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(f"{key} {whole.dtype}".encode())
        digest.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(f"{key}={value!r}".encode())


def digest(state) -> str:
    """Of a state, bit for bit; DTensors are put together."""
    found = hashlib.sha256()
    _feed(found, "", state)
    return found.hexdigest()[:16]


def full_digest(model, optimizer) -> tuple[str, str]:
    """Of a model and its optimizer, by PyTorch's own calls, whatever wraps them."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return digest(states[0]), digest(states[1])
