"""Every layout into every other one, by us and across with PyTorch, and training that goes on after it."""

from __future__ import annotations

import os
import pickle
import traceback

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as pt
from models import ALL, BY_FSDP2, FOUR, assert_close, everything, fsdp2_averages, here, make, optimizer, train

import reshard.torch as rt


def barrier():
    dist.barrier()


def saved(layout, path, by="rt", kind="adamw", seed=7):
    """A checkpoint of a trained model, and its state with every tensor whole."""
    model = make(layout, seed=seed)
    optim = optimizer(model, kind)
    train(model, optim, 2)
    ours = rt.get_state_dict(model, optim)
    whole = everything({"model": dict(ours[0]), "optim": ours[1]})
    if by == "rt":
        rt.save({"model": ours[0], "optim": ours[1]}, path)
    else:
        theirs = pt.get_state_dict(model, optim)
        dcp.save({"model": theirs[0], "optim": theirs[1]}, checkpoint_id=path)
    return whole


def load_ours(model, optim, path):
    model_state, optim_state = rt.get_state_dict(model, optim)
    state = {"model": model_state, "optim": optim_state}
    rt.load(state, path)
    rt.set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])


def load_theirs(model, optim, path):
    model_state, optim_state = pt.get_state_dict(model, optim)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=path)
    pt.set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])


def state_of(model, optim):
    model_state, optim_state = rt.get_state_dict(model, optim)
    return everything({"model": dict(model_state), "optim": optim_state})


def without_groups(state):
    """Order of groups' members differs between layouts; tensors and names do not."""
    groups = [{**g, "params": sorted(g["params"])} for g in state["optim"]["param_groups"]]
    return {"model": state["model"], "state": state["optim"]["state"], "groups": groups}


def matrix(rank, size, layouts, folder, how):
    failed = []
    references = {}
    for index, layout in enumerate(layouts):
        if how == "dcp_to_rt" and layout == "fsdp1_no_shard":
            continue  # PyTorch has no sharded state dict for it.
        try:
            references[layout] = saved(
                layout, os.path.join(folder, f"{how}-{layout}"), "dcp" if how == "dcp_to_rt" else "rt", seed=index
            )
        except Exception as error:
            failed.append(f"saving {layout}: {error}\n{traceback.format_exc(limit=-5)}")
    for target in layouts:
        if how == "rt_to_dcp" and target == "fsdp1_no_shard":
            continue
        model = make(target, seed=99)
        optim = optimizer(model)
        for layout, reference in references.items():
            path = os.path.join(folder, f"{how}-{layout}")
            try:
                (load_theirs if how == "rt_to_dcp" else load_ours)(model, optim, path)
                assert_close(without_groups(reference), without_groups(state_of(model, optim)), f"{layout} into {target}")
            except Exception as error:
                failed.append(f"{layout} into {target}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-5)}")
    return failed


def check(results):
    assert not results[0], f"{len(results[0])} failures\n" + "\n".join(results[0][:5])


def test_every_layout_into_every_other_on_two_ranks(ranks, tmp_path):
    check(ranks(2, matrix, ALL, str(tmp_path), "rt", timeout=180))


def test_every_layout_into_every_other_on_four_ranks(ranks, tmp_path):
    check(ranks(4, matrix, here(*FOUR, "ddp", "fsdp1_flat", "fsdp2"), str(tmp_path), "rt", timeout=240))


def test_pytorch_saves_and_we_load(ranks, tmp_path):
    check(ranks(2, matrix, ALL, str(tmp_path), "dcp_to_rt", timeout=180))


def test_we_save_and_pytorch_loads(ranks, tmp_path):
    check(ranks(2, matrix, ALL, str(tmp_path), "rt_to_dcp", timeout=180))


def resume(rank, size, cases, folder):
    """n steps, save, another layout, m steps: the same as n + m steps."""
    failed = []
    for first, second, exact in cases:
        mixed = (first in BY_FSDP2) != (second in BY_FSDP2)
        if len(here(first, second)) < 2 or (mixed and not fsdp2_averages()):
            continue
        try:
            path = os.path.join(folder, f"{first}-{second}")
            model = make(first)
            optim = optimizer(model)
            train(model, optim, 3)
            model_state, optim_state = rt.get_state_dict(model, optim)
            rt.save({"model": model_state, "optim": optim_state}, path)
            train(model, optim, 2, start=3)
            straight = state_of(model, optim)
            model = make(second, seed=1)
            optim = optimizer(model)
            load_ours(model, optim, path)
            train(model, optim, 2, start=3)
            assert_close(without_groups(straight), without_groups(state_of(model, optim)), f"{first} to {second}", exact)
        except Exception as error:
            failed.append(f"{first} to {second}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-5)}")
    return failed


def test_training_resumes_on_another_layout(ranks, tmp_path):
    cases = [
        ("fsdp1_flat", "fsdp2", True),
        ("fsdp2", "fsdp1_flat", True),
        ("ddp", "fsdp1_orig", True),
        ("fsdp1_orig", "ddp", True),
        ("fsdp1_flat", "fsdp1_flat", True),
        ("fsdp1_grad_op", "fsdp1_orig", True),
    ]
    check(ranks(2, resume, cases, str(tmp_path), timeout=120))
    cases = [("tp_fsdp2", "fsdp1_flat", False), ("fsdp1_hybrid", "tp_fsdp2", False), ("hsdp", "ddp", True)]
    check(ranks(4, resume, cases, str(tmp_path), timeout=120))


def save_on(rank, size, layout, path):
    whole = saved(layout, path)
    # As bytes: a tensor would be handed over by a process that is gone by then.
    return pickle.dumps(whole) if rank == 0 else None


def load_on(rank, size, layout, path):
    model = make(layout, seed=3)
    optim = optimizer(model)
    load_ours(model, optim, path)
    whole = state_of(model, optim)
    return pickle.dumps(whole) if rank == 0 else None


def test_four_ranks_to_three_and_back(ranks, tmp_path):
    cases = [("fsdp1_flat", "fsdp2"), ("fsdp2", "fsdp1_flat"), ("tp_fsdp2", "fsdp1_orig"), ("fsdp1_orig", "fsdp1_flat")]
    for index, (first, second) in enumerate(cases):
        if len(here(first, second)) < 2:
            continue
        path = str(tmp_path / str(index))
        a = ranks(4, save_on, first, path)[0]
        b = ranks(3, load_on, second, path)[0]
        assert_close(without_groups(pickle.loads(a)), without_groups(pickle.loads(b)), f"{first} on 4 to {second} on 3")
