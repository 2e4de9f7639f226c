"""Writes the torch.save samples beside this file: `python make_records.py OUT` (torch 2.13).

plain/    one contiguous tensor a file; plain.json says what is in them. Our writer must make the same bytes.
zip64/    what torch writes before and after the data of a tensor past 4 GiB.
read/     everything else that a reader must understand; read.json has what it must find, by key.
refused/  files that a reader must refuse; refused.json has words that its error must contain.
"""

import collections
import hashlib
import io
import json
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

import torch

warnings.simplefilter("ignore")

DTYPES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex32 complex64 complex128"
).split()


def raw_tensor(dtype, shape):
    """A tensor whose bytes count up from zero (bits for bool)."""
    numel = 1
    for size in shape:
        numel *= size
    dtype = getattr(torch, dtype)
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    data = torch.arange(numel * dtype.itemsize) % (2 if dtype == torch.bool else 60)
    return data.to(torch.uint8).view(dtype).reshape(shape)


def data_bytes(tensor):
    if tensor.numel() == 0:
        return b""
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


def saved(obj):
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def describe(tensor):
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(data_bytes(tensor)).hexdigest(),
        "requires_grad": tensor.requires_grad,
    }


def plain(out):
    out.mkdir(exist_ok=True)
    cases = [(dtype, (2, 3), False) for dtype in DTYPES]
    shapes = [(), (0,), (10,), (2, 3, 4), (1, 300, 70, 0), (2, 1, 3, 1, 2), (300,)]
    cases += [("float32", shape, False) for shape in shapes]
    cases += [("float8_e5m2", (), True), ("bfloat16", (300, 7), True), ("float32", (1, 70000, 0), False)]
    index = []
    for dtype, shape, requires_grad in cases:
        tensor = raw_tensor(dtype, shape).requires_grad_(requires_grad)
        name = "_".join([dtype, *map(str, shape)]) + ".pt"
        (out / name).write_bytes(saved(tensor))
        index.append({"file": name, **describe(tensor)})
    (out / "five.pt").write_bytes(saved(5))
    (out / "plain.json").write_text(json.dumps(index, indent=1) + "\n")


class FrameOnly:
    """Takes what torch.save writes and keeps all but the data."""

    def __init__(self):
        self.length, self.parts = 0, []

    def write(self, data):
        if len(data) < 1 << 16:
            self.parts.append((self.length, bytes(data)))
        self.length += len(data)
        return len(data)

    def flush(self):
        pass


def zip64(out):
    out.mkdir(exist_ok=True)
    size = (1 << 32) + 5
    with tempfile.TemporaryFile() as sparse:
        sparse.truncate(size)
        tensor = torch.from_file(f"/proc/self/fd/{sparse.fileno()}", shared=True, size=size, dtype=torch.uint8)
        frame = FrameOnly()
        torch.save(tensor, frame)
    head = b"".join(data for offset, data in frame.parts if offset < size)
    tail = b"".join(data for offset, data in frame.parts if offset >= size)
    assert len(head) + size + len(tail) == frame.length
    (out / "head.bin").write_bytes(head)
    (out / "tail.bin").write_bytes(tail)


def repack(data, compression=zipfile.ZIP_STORED, drop=(), root=None, replace=None):
    """The same archive as Python's own zip writer lays it out: no padding, sizes in the local headers."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(buffer, "w", compression) as target:
        for info in source.infolist():
            folder, name = info.filename.split("/", 1)
            if name not in drop:
                content = (replace or {}).get(name, source.read(info))
                target.writestr(f"{root or folder}/{name}", content)
    return buffer.getvalue()


def readable():
    base = torch.arange(24, dtype=torch.float32)
    half = torch.arange(12, dtype=torch.bfloat16)
    yield "strided", {"t": base.reshape(4, 6).t(), "column": base.reshape(4, 6)[:, 2], "step": base[3::5]}
    yield "offset", {"tail": base[20:], "scalar": base[7], "empty": base[24:]}
    yield "shared", {"a": base[:12], "b": base[6:18], "whole": base, "again": base}
    yield "expanded", {"e": torch.tensor([[1.5], [2.5]]).expand(2, 3)}
    yield "parameter", {"p": torch.nn.Parameter(half.clone()), "frozen": torch.nn.Parameter(half.clone(), False)}
    yield "buffer", {"b": torch.nn.Buffer(half.clone()), "t": half}
    yield "every_dtype", {dtype: raw_tensor(dtype, (2, 3)) for dtype in DTYPES}
    yield "zero", {"empty": torch.empty(0, 3), "zero_dim": torch.tensor(2.5), "none": torch.empty(0)}
    with_attribute = torch.arange(3)
    with_attribute.tag = "kept by torch, not needed here"
    yield "attribute", {"t": with_attribute}
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    yield "state_dict", module.state_dict()


def find_tensors(value):
    return {key: describe(tensor) for key, tensor in value.items()}


def read(out):
    out.mkdir(exist_ok=True)
    expected = {}

    def add(name, data, value):
        (out / f"{name}.pt").write_bytes(data)
        expected[name] = find_tensors(value)

    for name, value in readable():
        add(name, saved(value), value)
    value = {"a": torch.arange(5), "b": torch.arange(6, dtype=torch.float64).reshape(2, 3)}
    data = saved(value)
    add("repacked", repack(data), value)
    add("renamed", repack(data, root="my model"), value)
    old = (".format_version", ".storage_alignment", "byteorder", ".data/serialization_id")
    add("old_entries", repack(data, drop=old), value)
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        swapped = {
            "byteorder": b"big",
            "data/0": source.read("archive/data/0")[::-1],
            "data/1": source.read("archive/data/1")[::-1],
        }
    reverse = {key: tensor.flip(0).flip(-1) if tensor.dim() > 1 else tensor.flip(0) for key, tensor in value.items()}
    add("big_endian", repack(data, replace=swapped), reverse)
    torch.serialization.set_crc32_options(False)
    add("no_crc", saved(value), value)
    torch.serialization.set_crc32_options(True)
    nested = {"model": collections.OrderedDict(w=torch.arange(3)), "list": [torch.arange(2), {"x": 1}], "lr": 0.5}
    (out / "nested.pt").write_bytes(saved(nested))
    (out / "read.json").write_text(json.dumps(expected, indent=1) + "\n")


class Subclass(torch.Tensor):
    pass


def refused(out):
    out.mkdir(exist_ok=True)
    expected = {}

    def add(name, data, *words):
        (out / f"{name}.pt").write_bytes(data)
        expected[name] = words

    ones = torch.ones(2, 2)
    tensor = torch.arange(4)
    quantised = torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)
    add("quantised", saved({"layer": {"weight": quantised}}), "layer.weight", "quantised")
    add("sparse_coo", saved({"w": ones.to_sparse()}), "w", "sparse")
    add("sparse_csr", saved([1, ones.to_sparse_csr()]), "1", "sparse")
    add("meta", saved({"m": ones.to("meta")}), "m", "meta device")
    add("nested", saved({"n": torch.nested.nested_tensor([ones, tensor.float()[:2].reshape(1, 2)])}), "n", "nested")
    add("subclass", saved({"s": ones.as_subclass(Subclass)}), "Subclass")
    add("bits", saved({"b": tensor.view(torch.bits16)}), "b", "torch.bits16")
    buffer = io.BytesIO()
    torch.save({"t": tensor}, buffer, _use_new_zipfile_serialization=False)
    add("legacy", buffer.getvalue(), "torch 1.6")
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), buffer)
    add("torchscript", buffer.getvalue(), "TorchScript")
    add("deflated", repack(saved(tensor), zipfile.ZIP_DEFLATED), "compressed", "archive/data.pkl")
    add("bzip2", repack(saved(tensor), zipfile.ZIP_BZIP2), "zip method 12")
    add("storage", saved(tensor.untyped_storage()), "storage")
    (out / "refused.json").write_text(json.dumps(expected, indent=1) + "\n")


def main():
    out = Path(sys.argv[1])
    plain(out / "plain")
    zip64(out / "zip64")
    read(out / "read")
    refused(out / "refused")


if __name__ == "__main__":
    main()
