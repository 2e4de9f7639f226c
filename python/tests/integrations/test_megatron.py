"""Megatron Core's distributed checkpoints: saved with two tensor-parallel ranks of four, loaded in other layouts."""

import argparse
import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")
import reshard
import reshard.torch as rt

PRELOAD = ("megatron.core.dist_checkpointing",)


def run(rank, size, folder, tp, how, save):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    # Megatron's own writer starts processes, which it may not from a daemon; the test's ranks are.
    multiprocessing.current_process()._config["daemon"] = False
    # Megatron assumes CUDA in places.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *args, **kwargs: None
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    mine = parallel_state.get_tensor_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank()

    def whole(seed, *shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    weight, bias = whole(1, 24, 12), whole(2, 24)
    rows = 24 // tp

    def tree(fill):
        make = torch.clone if fill else torch.zeros_like
        part = slice(mine * rows, (mine + 1) * rows)
        objects = ShardedObject("extra", {"scale": torch.ones(2)} if fill else None, (1,), (0,), replica_id=(0, mine, replica))
        return {
            "weight": ShardedTensor.from_rank_offsets("weight", make(weight[part]), (0, mine, tp), replica_id=replica),
            "bias": ShardedTensor.from_rank_offsets("bias", make(bias), replica_id=(0, mine, replica)),
            "exp_avg": ShardedTensor.from_rank_offsets(
                "optimizer.exp_avg", make(weight[part] * 2), (0, mine, tp), replica_id=replica
            ),
            "extra": objects,
            "iteration": 7,
            "args": argparse.Namespace(hidden=12),
        }

    if save:
        if rank == 0:
            os.makedirs(folder)
        dist.barrier()
        strategy = dist_checkpointing.serialization.get_default_save_sharded_strategy("torch_dist")
        if how == "ours":
            from reshard.integrations.megatron import SaveStrategy

            strategy = SaveStrategy()
        dist_checkpointing.save(tree(True), folder, strategy)
        return True
    strategy = None
    if how == "ours":
        from reshard.integrations.megatron import LoadStrategy

        strategy = LoadStrategy(allow_pickle=True)
    found = dist_checkpointing.load(tree(False), folder, strategy)
    part = slice(mine * rows, (mine + 1) * rows)
    assert torch.equal(found["weight"], weight[part]) and torch.equal(found["bias"], bias)
    assert torch.equal(found["exp_avg"], weight[part] * 2) and found["extra"]["scale"].tolist() == [1, 1]
    assert found["iteration"] == 7 and found["args"].hidden == 12
    return True


def test_both_load_what_the_adapter_saved(tmp_path, ranks):
    folder = str(tmp_path / "saved")
    assert ranks(4, run, folder, 2, "ours", True) == [True] * 4
    with reshard.open(folder) as ck:
        assert "reshard" in ck.writer
    assert reshard.verify(folder).sound
    for loader in ("ours", "theirs"):
        assert ranks(3, run, folder, 3, loader, False) == [True] * 3


def test_what_megatron_saved_opens_and_is_loaded_with_its_plans_in_the_metadata(tmp_path, ranks):
    folder = str(tmp_path / "saved")
    assert ranks(4, run, folder, 2, "theirs", True) == [True] * 4
    with reshard.open(folder) as ck:
        assert ck.writer == "Megatron core" and ck["iteration"] == 7
    assert reshard.verify(folder).sound
    assert ranks(3, run, folder, 3, "ours", False) == [True] * 3


def load_written(rank, size, folder, tp):
    """What a folder that is written here holds, as Megatron itself loads it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    multiprocessing.current_process()._config["daemon"] = False
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *args, **kwargs: None
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    mine = parallel_state.get_tensor_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank()
    rows = 24 // tp

    def cut(key, dtype=torch.float32):
        part = torch.zeros(rows, 12, dtype=dtype)
        return ShardedTensor.from_rank_offsets(key, part, (0, mine, tp), replica_id=replica)

    names = {slot: f"optimizer.state.{slot}.linear.weight" for slot in ("param", "exp_avg", "exp_avg_sq")}
    tree = {"model": {"linear.weight": cut("linear.weight", torch.bfloat16)}}
    tree["optimizer"] = {"param_state": {0: {slot: cut(key) for slot, key in names.items()}}}
    found = dist_checkpointing.load(tree, folder)
    return mine, found


def test_megatron_loads_a_folder_that_is_written_here(tmp_path, ranks):
    weight = torch.randn(24, 12, generator=torch.Generator().manual_seed(1))
    slots = {"exp_avg": weight * 2, "exp_avg_sq": weight.square(), "step": torch.tensor(40.0)}
    groups = [{"lr": 0.5, "betas": (0.9, 0.95), "weight_decay": 0.1, "params": ["linear.weight"]}]
    state = {
        "model": {"linear.weight": weight.bfloat16()},
        "optim": {"state": {"linear.weight": slots}, "param_groups": groups},
        "note": {"tokens": 12345},
    }
    rt.save(state, tmp_path / "dcp")
    reshard.convert(tmp_path / "dcp", tmp_path / "megatron", to="megatron", ranks=3)
    assert (tmp_path / "megatron/latest_checkpointed_iteration.txt").read_text() == "40"
    folder = tmp_path / "megatron/iter_0000040"
    for tp in (1, 2):
        for mine, found in ranks(2, load_written, str(folder), tp):
            part = slice(mine * 24 // tp, (mine + 1) * 24 // tp)
            assert torch.equal(found["model"]["linear.weight"], weight.bfloat16()[part])
            state = found["optimizer"]["param_state"][0]
            assert torch.equal(state["param"], weight.bfloat16().float()[part])
            assert torch.equal(state["exp_avg"], (weight * 2)[part]) and torch.equal(state["exp_avg_sq"], weight.square()[part])
            assert found["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
            (group,) = found["optimizer"]["optimizer"]["param_groups"]
            assert (group["lr"], group["betas"], group["step"], group["wd_mult"]) == (0.5, (0.9, 0.95), 40, 1.0)
            assert found["iteration"] == 40 and found["note"]["tokens"] == 12345
