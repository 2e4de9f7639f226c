"""Optimizers over the parts of a model, and steps of training."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .case import Case, Side
from .oracle import canonical, holders


class Impossible(Exception):
    """PyTorch cannot build or train this."""


def optimizers_of(laid: Any, case: Case, side: Side, other: bool) -> list[Any]:
    """The optimizers over a model. With `other` they have other settings, which a load has to replace."""
    kind = getattr(torch.optim, case.optimizer, None)
    if kind is None:
        raise Impossible(f"torch {torch.__version__} has no {case.optimizer}")
    rate: Any = 0.5 if other else 0.01
    groups: list[dict[str, Any]] = []
    seen: set[int] = set()
    members: list[list[Any]] = [[] for _ in range(case.groups)]
    for name, param in laid.model.named_parameters():
        if id(param) in seen or (case.optimizer == "Muon" and param.dim() != 2):
            continue
        seen.add(id(param))
        first = canonical(name).split(".")[0]
        part = case.parts[int(first[1:])] if first[0] == "p" and first[1:].isdigit() else None
        members[part.group % case.groups if part is not None else 0].append(param)
    for number, params in enumerate(members):
        if not params:
            continue
        group: dict[str, Any] = {"params": params, "lr": rate * (number + 1)}
        if case.tensor_lr:
            group["lr"] = torch.tensor(rate * (number + 1))
        if case.odd_groups:
            group |= {"initial_lr": 0.25 + number + other, "tag": "b" if other else "a", "none": None}
            group |= {"odd": {1: "x", "e": {}, "l": [{"k": 1.5 + other}, []]}, "pair": (1 + other, 2.0)}
        groups.append(group)
    if case.empty_group:
        groups.insert(1, {"params": [], "lr": rate * 7})
    settings = dict(case.settings)
    if "betas" in settings:
        settings["betas"] = tuple(settings["betas"])
    if case.optimizer not in ("LBFGS", "SparseAdam", "Muon") and not settings.get("fused"):
        settings["foreach"] = side.foreach and not case.tensor_lr
    if case.optimizer == "LBFGS":
        for group in groups:
            settings["lr"] = group.pop("lr")
        groups = groups[0]["params"]
    if case.optimizers == 2 and len(groups) > 1:
        return [kind(groups[:1], **settings), kind(groups[1:], **settings)]
    return [kind(groups, **settings)]


def batch(case: Case, step: int) -> torch.Tensor:
    return torch.randn(4, case.width, generator=torch.Generator().manual_seed(100 + step))


def trained(laid: Any, optimizers: list[Any], case: Case, side: Side, start: int) -> None:
    """Steps, and what the side asks for after them."""
    model = laid.model
    for step in range(start, start + side.steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if laid.synthetic:
            _gradients_by_hand(laid, case, step)
        else:
            model(batch(case, step)).square().mean().backward()
        for optimizer in optimizers:
            if case.optimizer == "LBFGS":
                optimizer.step(lambda: _closure(model, optimizer, case, step))
            else:
                optimizer.step()
    if side.after == "zeroed":
        for optimizer in optimizers:
            optimizer.zero_grad()
    if side.after.startswith("evaluated") and not laid.synthetic:
        model.eval()
        with torch.set_grad_enabled(side.after != "evaluated"):
            model(batch(case, 77))


def _closure(model: Any, optimizer: Any, case: Case, step: int) -> Any:
    optimizer.zero_grad()
    loss = model(batch(case, step)).square().mean()
    loss.backward()
    return loss


def _gradients_by_hand(laid: Any, case: Case, step: int) -> None:
    """Gradients that depend on the element alone, on whatever rank it is."""
    if laid.side.wrapper in ("fsdp1_flat", "fsdp1_tp"):
        raise Impossible("gradients by hand for flat parameters")
    for holder in holders(laid):
        param = holder.param
        part = case.parts[int(holder.names[0].split(".")[0][1:])] if holder.names[0][0] == "p" else None
        if not param.requires_grad or (part is not None and part.unused):
            continue
        generator = torch.Generator().manual_seed(step * 1000 + len(holder.names[0]) + sum(map(ord, holder.names[0])))
        whole = torch.randn(holder.shape, generator=generator).reshape(-1).to(param.dtype)
        local = param.to_local() if isinstance(param, DTensor) else param
        grad = whole[holder.index].reshape(local.shape)
        if case.optimizer == "SparseAdam":
            grad = grad.to_sparse()
        if isinstance(param, DTensor):
            grad = DTensor.from_local(
                grad, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        param.grad = grad
