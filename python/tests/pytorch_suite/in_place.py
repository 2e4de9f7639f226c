"""What every copied test file imports first, on every rank: the CPU in place of accelerators, and reshard in its mode."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.testing._internal.common_distributed as common
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

WORLD = 4


def _on_the_cpu() -> None:
    def as_it_is(*arguments: Any, **options: Any) -> Any:
        return lambda function: function

    def itself(tensor_or_module: Any, *arguments: Any, **options: Any) -> Any:
        return tensor_or_module

    for name in ("skip_if_lt_x_gpu", "requires_accelerator_dist_backend", "requires_nccl", "requires_gloo"):
        if hasattr(common, name):
            setattr(common, name, as_it_is)
    common.at_least_x_gpu = lambda count: False
    torch.Tensor.cuda = itself  # type: ignore[assignment]
    torch.nn.Module.cuda = itself  # type: ignore[assignment,method-assign]
    torch.cuda.set_device = lambda *arguments: None  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *arguments: None  # type: ignore[assignment]
    torch.cuda.device_count = lambda: WORLD
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    if hasattr(torch, "accelerator"):
        torch.accelerator.device_count = lambda: WORLD
    # Ranks are forked from a process that has imported everything: spawned ones take longer to start than most tests take. What
    # hangs with PyTorch itself on a CPU is given up soon.
    forked = torch.multiprocessing.get_context("fork").Process
    common.MultiProcessTestCase._spawn_processes = lambda test: test._start_processes(forked)  # type: ignore[method-assign]
    common.TIMEOUT_DEFAULT = 150
    import torch.testing._internal.common_fsdp as fsdp

    made = FSDP.__init__

    def on_the_cpu(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **{**options, "device_id": torch.device("cpu")})

    FSDP.__init__ = on_the_cpu  # type: ignore[method-assign]
    fsdp.DEVICE_COUNT = WORLD // 2
    for cls in (getattr(fsdp, name, None) for name in ("FSDPTest", "FSDPTestMultiThread")):
        if cls is not None:
            cls.world_size = property(lambda self: WORLD // 2)


def _replace(pairs: dict[int, Any]) -> None:
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith("reshard"):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in pairs:
                setattr(module, name, pairs[id(value)])


def _storage() -> None:
    import reshard.torch as rt

    class Reader(rt.StorageReader):
        def __init__(self, path: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(path, *arguments, allow_pickle=True, **options)

    _replace({id(dcp.FileSystemReader): Reader, id(dcp.FileSystemWriter): rt.StorageWriter})


def _state() -> None:
    from torch.distributed.fsdp import StateDictType

    import reshard.torch as rt

    def given(model: Any, optim: Any, optim_state_dict: Any = None, group: Any = None) -> Any:
        settings = FSDP.get_state_dict_type(model) if any(isinstance(m, FSDP) for m in model.modules()) else None
        full = settings is not None and settings.state_dict_type == StateDictType.FULL_STATE_DICT
        config = getattr(settings, "optim_state_dict_config", None)
        return rt.optim_state_dict(
            model,
            optim,
            optim_state_dict,
            group,
            full=full,
            rank0_only=bool(getattr(config, "rank0_only", False)),
            cpu_offload=bool(getattr(config, "offload_to_cpu", False)),
            as_torch=not full,
        )

    names = "optim_state_dict_to_load full_optim_state_dict sharded_optim_state_dict shard_full_optim_state_dict "
    names += "flatten_sharded_optim_state_dict scatter_full_optim_state_dict rekey_optim_state_dict"
    for name in names.split():
        setattr(FSDP, name, staticmethod(getattr(rt, name)))
    FSDP.optim_state_dict = staticmethod(given)  # type: ignore[method-assign]


def _calls() -> None:
    import reshard

    reshard.install(allow_pickle=True)


os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
_on_the_cpu()
_MODE = os.environ.get("RESHARD_IN_PLACE", "")
{"": lambda: None, "storage": _storage, "calls": _calls, "state": _state}[_MODE]()
