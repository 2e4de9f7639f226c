"""Megatron Core's distributed checkpoints: saved with two tensor-parallel ranks of four, loaded in other layouts."""

import argparse
import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")
import reshard

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
