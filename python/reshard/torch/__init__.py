"""reshard for PyTorch: what ``torch.distributed.checkpoint`` does, faster, safer, and into any layout.

::

    import reshard.torch as rt

    rt.save({"model": model_state, "optim": optimizer_state}, "ckpt/step-100")
    handle = rt.async_save(state, "ckpt/step-200")
    report = rt.load(state, "s3://bucket/step-200")

    dcp.save(state, storage_writer=rt.StorageWriter("ckpt/step-300"))
    dcp.load(state, storage_reader=rt.StorageReader("ckpt/step-300"))
"""

from __future__ import annotations

from .._reports import LoadReport, OptimizerReport, SaveReport
from ._checkpointer import Checkpointer
from ._leaf import PerRank, ShardView
from ._load import exists, load
from ._manager import CheckpointManager
from ._sampler import FollowedLoader, ResumableSampler
from ._save import AsyncSaveHandle, AsyncSaver, async_save, save
from ._storage import StorageReader, StorageWriter
from .state import (
    OptimizerStateDict,
    StateDictOptions,
    StateError,
    StateMismatch,
    flatten_sharded_optim_state_dict,
    full_optim_state_dict,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    load_sharded_optimizer_state_dict,
    optim_state_dict,
    optim_state_dict_to_load,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
    shard_full_optim_state_dict,
    sharded_optim_state_dict,
)

__all__ = [
    "AsyncSaveHandle",
    "AsyncSaver",
    "CheckpointManager",
    "Checkpointer",
    "FollowedLoader",
    "LoadReport",
    "OptimizerReport",
    "OptimizerStateDict",
    "PerRank",
    "ResumableSampler",
    "SaveReport",
    "ShardView",
    "StateDictOptions",
    "StateError",
    "StateMismatch",
    "StorageReader",
    "StorageWriter",
    "async_save",
    "exists",
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "load",
    "load_sharded_optimizer_state_dict",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "rekey_optim_state_dict",
    "save",
    "scatter_full_optim_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
]
