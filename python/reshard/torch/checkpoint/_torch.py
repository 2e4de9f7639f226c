"""PyTorch's own functions and classes, taken before anything may have been put in their place."""

from __future__ import annotations

import torch.distributed.checkpoint as _dcp
from torch.distributed.checkpoint import filesystem as _filesystem
from torch.distributed.checkpoint import optimizer as _optimizer
from torch.distributed.checkpoint import state_dict_loader as _loader
from torch.distributed.checkpoint import state_dict_saver as _saver

save = _saver.save
async_save = _saver.async_save
load = _loader.load
save_state_dict = _saver.save_state_dict
load_state_dict = _loader.load_state_dict
FileSystemWriter = _filesystem.FileSystemWriter
FileSystemReader = _filesystem.FileSystemReader
#: Since 2.7; None before.
HuggingFaceStorageWriter = getattr(_dcp, "HuggingFaceStorageWriter", None)
HuggingFaceStorageReader = getattr(_dcp, "HuggingFaceStorageReader", None)
load_sharded_optimizer_state_dict = _optimizer.load_sharded_optimizer_state_dict
