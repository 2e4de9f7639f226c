"""The calls against PyTorch's own, on the same models: names, values, groups, options."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint.state_dict as pt
from models import FOUR, assert_close, everything, here, make, optimizer, train

import reshard.torch as rt


def trained(layout, variant="", kind="adamw", steps=2):
    model = make(layout, variant)
    optim = optimizer(model, kind)
    train(model, optim, steps)
    return model, optim


def without(tree, segment):
    if isinstance(tree, dict):
        return {key.replace(segment, ""): without(value, segment) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)) and type(tree) is not torch.Size:
        return type(tree)(without(value, segment) for value in tree)
    return tree.replace(segment, "") if isinstance(tree, str) else tree


def compare(layout, variant, kind):
    """State by us and by PyTorch, whole, key by key."""
    model, optim = trained(layout, variant, kind)
    ours = rt.get_state_dict(model, optim)
    theirs = pt.get_state_dict(model, optim)
    if layout == "compiled_ac":
        # PyTorch leaves the compiled module's segment in where a checkpoint wrapper is around it.
        theirs = without(theirs, "_orig_mod.")
    assert list(ours[0]) == list(theirs[0]), (list(ours[0]), list(theirs[0]))
    assert_close(everything(theirs[0]), everything(dict(ours[0])), f"{layout}/{variant}/model")
    assert_close(everything(theirs[1]["state"]), everything(ours[1]["state"]), f"{layout}/{variant}/{kind}/optim")
    key = lambda group: sorted(group["params"])
    for ours_group, theirs_group in zip(
        sorted(ours[1]["param_groups"], key=key), sorted(theirs[1]["param_groups"], key=key), strict=True
    ):
        assert_close(
            {k: v for k, v in theirs_group.items() if k != "params"}, {k: v for k, v in ours_group.items() if k != "params"}
        )
        assert sorted(ours_group["params"]) == sorted(theirs_group["params"])


def as_pytorch(rank, size, cases):
    failed = []
    for case in cases:
        try:
            compare(*case)
        except Exception as error:
            import traceback

            failed.append(f"{case}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}")
    return failed


TWO_RANKS = [
    ("single", "", "adamw"),
    ("ddp", "", "adamw"),
    ("ddp", "tied", "sgd"),
    ("ddp", "frozen", "adamw"),
    ("ddp_ac_compiled", "", "adamw"),
    ("compiled_ac", "", "groups"),
    ("single", "norm", "adagrad"),
    ("ddp", "extra", "adamw"),
    ("compiled_ac", "extra", "adamw"),
    ("fsdp2", "extra", "adamw"),
    ("fsdp1_flat", "", "adamw"),
    ("fsdp1_flat", "", "sgd"),
    ("fsdp1_flat", "", "groups"),
    ("fsdp1_flat", "frozen", "adamw"),
    ("fsdp1_orig", "", "adamw"),
    ("fsdp1_orig", "", "groups"),
    ("fsdp1_orig", "", "adagrad"),
    ("fsdp1_orig", "frozen", "adamw"),
    ("fsdp1_flat", "tied", "adamw"),
    ("fsdp1_orig", "tied", "adamw"),
    ("fsdp2", "tied", "adamw"),
    ("fsdp1_flat_ac", "", "adamw"),
    ("fsdp1_orig_ac", "", "adamw"),
    ("fsdp1_grad_op", "", "adamw"),
    ("fsdp2", "", "adamw"),
    ("fsdp2", "", "groups"),
    ("fsdp2", "frozen", "sgd"),
    ("fsdp2", "", "tensor_lr"),
]
FOUR_RANKS = [(layout, "", "adamw") for layout in FOUR]


def test_as_pytorch_on_two_ranks(ranks):
    failed = ranks(2, as_pytorch, [case for case in TWO_RANKS if here(case[0])], timeout=180)
    assert not failed[0], "\n".join(failed[0])


def test_as_pytorch_on_four_ranks(ranks):
    failed = ranks(4, as_pytorch, FOUR_RANKS, timeout=180)
    assert not failed[0], "\n".join(failed[0])
