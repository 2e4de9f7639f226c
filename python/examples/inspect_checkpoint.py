# %% [markdown]
# # Looking into a checkpoint
# Cells, as in a notebook; no torch, no model, no process group. Give the place in RESHARD_EXAMPLE.

# %%
import os

import numpy as np

import reshard

checkpoint = reshard.open(os.environ["RESHARD_EXAMPLE"])
checkpoint

# %% What is in it?
for key, tensor in checkpoint.tensors().items():
    print(f"{key:<50} {tensor.dtype:<9} {'×'.join(map(str, tensor.shape)) or 'scalar':<12} {len(tensor.chunks)} chunks")

# %% Which part of a tensor lies in which file?
name, largest = max(checkpoint.tensors().items(), key=lambda item: item[1].nbytes)
for chunk in largest.chunks:
    print(name, chunk.offsets, chunk.sizes, chunk.file)

# %% Any slice, without reading the rest
corner = largest[:2, :3] if largest.ndim == 2 else largest[:2]
print(corner)

# %% Statistics, one tensor at a time
for key, tensor in checkpoint.tensors().items():
    if tensor.dtype.startswith("float") and tensor.size:
        array = tensor.numpy().astype(np.float64)
        print(f"{key:<50} mean {array.mean():+.4f}  std {array.std():.4f}  {np.isnan(array).sum()} NaN")

# %% Everything that is not a tensor
values = {key: checkpoint[key] for key in checkpoint if not isinstance(checkpoint[key], reshard.Tensor)}
print(values)
