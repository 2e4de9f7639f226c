"""torchtitan's checkpoint manager: saved on four ranks, resumed on three, with its own manager and with ours."""

import pathlib

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchtitan")
pytest.importorskip("tyro")
from trainers import batch, digest, net

PRELOAD = ("torchtitan.components.checkpointer.dcp",)


class TrainState:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class Loader:
    """The state of torchtitan's data loader: one entry for each rank."""

    def state_dict(self):
        return {f"dp_rank_{dist.get_rank()}": b"position", "world_size": dist.get_world_size()}

    def load_state_dict(self, state):
        pass


class Adapter:
    hf_assets_path = None

    def __init__(self, files):
        names = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
        self.fqn_to_index_mapping = {f"model.{name}": 1 + (i > 2) for i, name in enumerate(names)} if files == 2 else None

    def to_hf(self, state):
        return {f"model.{key}": value for key, value in state.items()}

    def from_hf(self, state):
        return {key.removeprefix("model."): value for key, value in state.items()}

    def get_hf_storage_reader(self, path, quantized):
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        return HuggingFaceStorageReader(path)


def run(rank, size, folder, ours, mode, steps, resume, files=0):
    import torchtitan.components.checkpointer.dcp as titan
    from torch.distributed.checkpoint.staging import StagingOptions
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw

    # No GPU: no pinned memory.
    titan.StagingOptions = lambda **_: StagingOptions(False, True, True, False)
    manager = titan.CheckpointManager
    if ours:
        from reshard.integrations.torchtitan import CheckpointManager as manager
    mesh = init_device_mesh("cpu", (size,))
    model = net()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    config = default_adamw(lr=1e-2)
    config.implementation = "for-loop"
    optimizers = OptimizersContainer(config, model_parts=[model])
    schedulers = LRSchedulersContainer(optimizers, lambda step: 1 / (1 + step))
    state = TrainState()
    more = {"last_save_in_hf": True, "last_save_model_only": True} if files and not resume else {"last_save_model_only": False}
    if files and resume:
        more = {"initial_load_path": f"{folder}/step-{steps}", "initial_load_in_hf": True, "initial_load_model_only": True}
    options = manager.Config(
        enable=True,
        folder=folder + "-none" if files and resume else folder,
        interval=2,
        async_mode=mode,
        keep_latest_k=2,
        exclude_from_loading=["dataloader"] if resume else [],
        **more,
    )
    checkpoints = options.build(
        dataloader=Loader(),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=Adapter(files),
        base_folder="",
    )

    def digests():
        return digest(dict(model.state_dict())), digest(optimizers.state_dict())

    loaded = None
    if resume:
        assert checkpoints.load()
        loaded = digests()
    losses = []
    end = state.step + steps
    while state.step < end:
        x = batch(state.step)
        loss = (model(x) - x).square().mean()
        loss.backward()
        checkpoints.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        state.step += 1
        losses.append(loss.item())
        if not resume:
            checkpoints.save(state.step, last_step=state.step == end)
    if not resume:
        checkpoints.maybe_wait_for_saving()
    result = loaded or digests(), losses
    checkpoints.close()
    return result


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_run_is_resumed_on_other_ranks_by_either(tmp_path, ranks, mode):
    folder = str(tmp_path / "run")
    saved, _ = ranks(4, run, folder, True, mode, 4, False)[0]
    assert sorted(path.name for path in pathlib.Path(folder).iterdir()) == ["step-2", "step-4"]
    import reshard

    with reshard.open(f"{folder}/step-4") as ck:
        assert "reshard" in ck.writer
    assert reshard.verify(f"{folder}/step-4").sound
    loaded, losses = ranks(3, run, folder, True, mode, 2, True)[0]
    assert loaded == saved
    # However it was saved, torchtitan's own manager goes on from it with the same losses.
    assert ranks(3, run, folder, False, "disabled", 2, True)[0] == (loaded, losses)


def test_what_torchtitan_saved_is_resumed(tmp_path, ranks):
    folder = str(tmp_path / "run")
    saved, _ = ranks(4, run, folder, False, "disabled", 4, False)[0]
    assert ranks(3, run, folder, True, "disabled", 2, True)[0][0] == saved


@pytest.mark.parametrize("files", [1, 2])
def test_hugging_face_export_and_import(tmp_path, ranks, files):
    folder = str(tmp_path / "run")
    (model, _), _ = ranks(4, run, folder, True, "disabled", 4, False, files)[0]
    assert (pathlib.Path(folder) / "step-4" / "model.safetensors.index.json").exists()
    for ours in (True, False):
        assert ranks(3, run, folder, ours, "disabled", 4, True, files)[0][0][0] == model
