"""DeepSpeed with ZeRO 1, 2 and 3: saved on four ranks in the background, resumed on three and on five, by the adapter and by DeepSpeed."""

import importlib
import os
import pathlib

import pytest
import torch

pytest.importorskip("deepspeed")
from trainers import batch, digest, net

import reshard

PRELOAD = ("deepspeed",)


class Parts:
    """Tensor parallel ranks beside each other, and data parallel ranks of each part."""

    def __init__(self, rank, size, parts):
        self.rank, self.size, self.parts = rank, size, parts
        models = [torch.distributed.new_group(range(first, first + parts)) for first in range(0, size, parts)]
        groups = [torch.distributed.new_group(range(part, size, parts)) for part in range(parts)]
        self.model, self.data = models[rank // parts], groups[rank % parts]

    def get_model_parallel_rank(self):
        return self.rank % self.parts

    def get_model_parallel_world_size(self):
        return self.parts

    def get_model_parallel_group(self):
        return self.model

    def get_data_parallel_rank(self):
        return self.rank // self.parts

    def get_data_parallel_world_size(self):
        return self.size // self.parts

    def get_data_parallel_group(self):
        return self.data


def run(
    rank,
    size,
    folder,
    stage,
    ours,
    resume,
    steps=2,
    bf16=False,
    frozen=False,
    broken=False,
    background=True,
    every=None,
    universal=False,
    one=False,
    parts=1,
):
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", CROSS_RANK="0")
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    # A faster all_reduce for the CPU, which DeepSpeed would compile now.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    # Its kernels for bfloat16 use instructions that not every CPU has which says so.
    torch.backends.mkldnn.enabled = False
    model = net()
    mpu = Parts(rank, size, parts) if parts > 1 else None
    if mpu is not None:
        # Each tensor parallel rank has a part of its own.
        for parameter in model.parameters():
            parameter.data.add_(0.01 * mpu.get_model_parallel_rank())
    if frozen:
        model[0].weight.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    config = {
        "train_batch_size": 60,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
        "checkpoint": {"load_universal": universal},
    }
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    # Of a universal checkpoint DeepSpeed gives every group the options of the first with ZeRO-3.
    groups = [{"params": trained, "weight_decay": 0.1}] if one else groups
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config, mpu=mpu)
    checkpoints = None
    if ours:
        from reshard.integrations import deepspeed as adapter

        checkpoints = adapter.attach(engine, background=background)
    step = 0
    if resume:
        _, client = engine.load_checkpoint(folder)
        step = client["step"]

    def state():
        """Every trained parameter in float32 with its moments, put together from all ranks, and what is frozen."""
        parts = {}
        if stage == 3:
            for name, parameter in engine.module.named_parameters():
                if parameter.requires_grad:
                    slots = [safe_get_full_optimizer_state(parameter, slot) for slot in ("exp_avg", "exp_avg_sq")]
                    parts[name] = [safe_get_full_fp32_param(parameter), *slots]
        else:
            optimizer = engine.optimizer
            mine = []
            for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
                slots = optimizer.optimizer.state[flat]
                for parameter in group:
                    if parameter._hp_mapping is not None:
                        there, here = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
                        values = [
                            each[here.start : here.start + here.numel] for each in (flat, slots["exp_avg"], slots["exp_avg_sq"])
                        ]
                        mine.append((engine.param_names[parameter], there.start, [each.detach().clone() for each in values]))
            alike = engine.optimizer.dp_process_group
            gathered = [None] * torch.distributed.get_world_size(alike)
            torch.distributed.all_gather_object(gathered, mine, alike)
            for name, _, values in sorted((part for each in gathered for part in each), key=lambda part: part[:2]):
                parts.setdefault(name, []).append(values)
            parts = {name: [torch.cat(each) for each in zip(*pieces, strict=True)] for name, pieces in parts.items()}
        if frozen:
            with deepspeed.zero.GatheredParameters([engine.module[0].weight]):
                parts["frozen"] = engine.module[0].weight.detach().clone()
        parts["groups"] = [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]
        return digest(parts)

    loaded = state() if resume else None
    losses = []
    for _ in range(steps):
        x = batch(step)
        x = x.bfloat16() if bf16 else x
        loss = (engine(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
        step += 1
        losses.append(loss.item())
        if every is not None and step % every == 0:
            engine.save_checkpoint(folder, client_state={"step": step})
    if not resume:
        if broken:

            def fails(folder, name, content):
                raise OSError(28, "No space left on device")

            if rank == 1:
                reshard._reshard.publish_file = fails
        engine.save_checkpoint(folder, client_state={"step": step})
        loaded = state()
        if broken:
            try:
                checkpoints.settle()
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        # Training goes on while the files are written: they hold what was there when they were saved.
        x = batch(step)
        x = x.bfloat16() if bf16 else x
        engine.backward((engine(x) - x).square().mean())
        engine.step()
        if checkpoints is not None:
            checkpoints.settle()
    return loaded, losses, step


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_is_resumed_on_other_ranks(tmp_path, ranks, stage):
    folder = str(tmp_path / "run")
    saved, _, _ = ranks(4, run, folder, stage, True, False)[0]
    tag = pathlib.Path(folder, "latest").read_text()
    assert tag == "global_step2" and not list(pathlib.Path(folder, tag).glob(".*partial"))
    # DeepSpeed itself loads what the adapter saved, on as many ranks; what comes after is the same.
    own, losses, step = ranks(4, run, folder, stage, False, True)[0]
    assert own == saved and step == 4
    for size in (3, 5):
        loaded, went_on, _ = ranks(size, run, folder, stage, True, True)[0]
        assert loaded == saved
        assert went_on == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_deepspeed_saved_is_resumed_on_other_ranks_and_deepspeed_refuses(tmp_path, ranks, stage):
    folder = str(tmp_path / "run")
    frozen = stage == 3
    saved, _, _ = ranks(4, run, folder, stage, False, False, 2, True, frozen)[0]
    assert ranks(3, run, folder, stage, True, True, 1, True, frozen)[0][0] == saved
    with pytest.raises(AssertionError, match="not currently supported|size of tensor"):
        ranks(3, run, folder, stage, False, True, 1, True, frozen)


def test_a_checkpoint_that_one_rank_cannot_write_is_not_published(tmp_path, ranks):
    folder = str(tmp_path / "run")
    ranks(2, run, folder, 2, True, False)
    seen = ranks(2, run, folder, 2, True, False, 3, False, False, True)
    assert "rank 1: OSError" in seen[0] and seen[1].startswith("OSError")
    assert pathlib.Path(folder, "latest").read_text() == "global_step2"
    assert not [each.name for each in pathlib.Path(folder, "global_step3").iterdir() if each.suffix in (".pt", ".partial")]


def run_in_parts(rank, size, folder, stage, ours, resume):
    return run(rank, size, folder, stage, ours, resume, frozen=stage == 3, parts=2)


@pytest.mark.parametrize("stage", [2, 3])
def test_with_tensor_parallelism_a_run_is_resumed_on_other_data_parallel_ranks(tmp_path, ranks, stage):
    folder = str(tmp_path / "run")
    saved = ranks(4, run_in_parts, folder, stage, True, False)
    assert saved[0][0] == saved[2][0] != saved[1][0] == saved[3][0]
    own = ranks(4, run_in_parts, folder, stage, False, True)
    assert [state for state, *_ in own] == [state for state, *_ in saved]
    for size in (6, 2):
        for rank, (state, losses, step) in enumerate(ranks(size, run_in_parts, folder, stage, True, True)):
            assert state == saved[rank % 2][0] and step == 4
            assert losses == pytest.approx(own[rank % 2][1], rel=1e-5)


def killed(rank, size, folder):
    """Saves step after step in the background until it is killed."""
    import random
    import signal
    import threading
    import time

    def kill():
        time.sleep(random.Random(rank).uniform(0.3, 0.6))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    try:
        run(rank, size, folder, 2, True, False, 100_000, every=1)
    except RuntimeError:
        # The other one was killed first, and gloo says so; this one follows.
        time.sleep(5)


def test_a_run_that_is_killed_while_it_saves_goes_on_from_a_whole_checkpoint(tmp_path, ranks):
    folder = str(tmp_path / "run")
    ranks(2, run, folder, 2, True, False)
    ranks(2, killed, folder, may_die=True)
    tag = pathlib.Path(folder, "latest").read_text()
    import reshard

    assert reshard.verify(pathlib.Path(folder, tag)).sound
    _, _, step = ranks(3, run, folder, 2, True, True, 1)[0]
    assert step == int(tag.removeprefix("global_step")) + 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_resumes_on_other_ranks_from_a_universal_folder_that_is_written_here(tmp_path, ranks, stage):
    folder, written, by_way = (str(tmp_path / name) for name in ("run", "universal", "by-way"))
    one = stage == 3
    kept = (2, False, False, False, True, None)
    saved, _, _ = ranks(4, run, folder, stage, False, False, *kept, False, one)[0]
    # The run as it goes on without a stop.
    again, losses, _ = ranks(4, run, folder, stage, False, True, *kept, False, one)[0]
    assert again == saved
    reshard.convert(folder, written, to="deepspeed-universal", skip_opaque=True)
    assert reshard.verify(written).sound
    # By way of a DCP folder of another layout it is the same.
    reshard.convert(folder, tmp_path / "dcp", to="dcp", ranks=3, skip_opaque=True)
    reshard.convert(tmp_path / "dcp", by_way, to="deepspeed-universal")
    for size, universal in ((2, written), (3, written), (5, by_way)):
        loaded, went_on, step = ranks(size, run, universal, stage, False, True, *kept, True, one)[0]
        assert loaded == saved and step == 4
        assert went_on == pytest.approx(losses, rel=1e-5)


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_files_that_want_to_run_code_are_refused_by_name(tmp_path):
    from reshard.integrations import deepspeed as adapter

    file, marker = str(tmp_path / "mp_rank_00_model_states.pt"), tmp_path / "marker"
    torch.save({"module": {"w": torch.ones(3)}, "client": Hostile(str(marker))}, file)
    with pytest.raises(reshard.UntrustedPickle, match="posix.mkdir.*execute code") as caught:
        adapter.CheckpointEngine(background=False).load(file)
    assert caught.value.class_name == "posix.mkdir" and "allow_pickle=True" in caught.value.hint and not marker.exists()
    adapter.CheckpointEngine(background=False, allow_pickle=True).load(file)
    assert marker.exists()


def test_what_deepspeed_stores_itself_needs_no_trust():
    from reshard.integrations import deepspeed as adapter

    engine = adapter.CheckpointEngine(background=False)
    fixtures = pathlib.Path(__file__).parents[3] / "crates/reshard/tests/foreign"
    files = sorted(fixtures.glob("deepspeed-*/**/*_states.pt"))
    assert len(files) > 20
    for file in files:
        assert isinstance(engine.load(str(file), map_location="cpu"), dict)
