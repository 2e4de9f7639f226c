"""Records behind DCP's zstd transform: what PyTorch compressed is read, and PyTorch reads what is compressed here."""

import pathlib
import pickle
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import ALONE

import reshard
import reshard.torch as rt

extension = pytest.importorskip("torch.distributed.checkpoint._extension", reason="stream transforms came with torch 2.7")
zstd = pytest.mark.skipif(
    not getattr(extension.ZStandard, "is_available", lambda: extension.pyzstd is not None)(),
    reason="PyTorch compresses with the package zstandard or pyzstd, and neither is installed",
)


def state():
    torch.manual_seed(0)
    noise = torch.randn(70, 50)
    return {
        "model": {"noise": noise, "turned": noise.t(), "zeros": torch.zeros(300, 1000), "half": torch.ones(5, 4).bfloat16()},
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "step": 12,
        "text": "words " * 20_000,
        "nested": [{"lr": 0.1, "betas": (0.9, 0.99)}, None],
    }


def same(found, expected):
    for key, value in expected.items():
        if isinstance(value, dict):
            same(found[key], value)
        elif isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


def blank(tree):
    if isinstance(tree, dict):
        return {key: blank(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [blank(value) for value in tree]
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else None


@pytest.fixture
def theirs(tmp_path):
    folder = tmp_path / "theirs"
    writer = dcp.FileSystemWriter(folder, _extensions=[extension.ZStandard()], thread_count=2)
    dcp.save(state(), storage_writer=writer, **ALONE)
    return folder


@zstd
def test_what_pytorch_compressed_is_read(theirs, tmp_path):
    infos = pickle.loads((theirs / ".metadata").read_bytes()).storage_data.values()
    assert all(list(info.transform_descriptors) == ["stream.zstd/1"] for info in infos)
    assert sum(file.stat().st_size for file in theirs.iterdir()) < 100_000
    expected = state()
    loaded = blank(expected)
    rt.load(loaded, theirs)
    same(loaded, expected)
    report = reshard.verify(theirs)
    assert report.sound and not report.findings and report.unchecked == 0
    with reshard.open(theirs) as ck:
        assert ck["step"] == 12 and ck["text"] == expected["text"]
    # Slices, also backwards: only what is before them is decompressed.
    part = torch.zeros(3, 9)
    view = rt.ShardView(torch.float32, (70, 50), [((60, 41), part)])
    rt.load({"model": {"noise": view}}, theirs, strict=False)
    assert torch.equal(part, expected["model"]["noise"][60:63, 41:50])
    reshard.convert(theirs, tmp_path / "plain.pt")
    same(torch.load(tmp_path / "plain.pt"), expected)
    reshard.convert(theirs, tmp_path / "again", to="dcp", ranks=2, compression="zstd")
    again = blank(expected)
    rt.load(again, tmp_path / "again")
    same(again, expected)


@zstd
def test_pytorch_reads_what_is_compressed_here(tmp_path):
    expected = state()
    rt.save(expected, tmp_path / "ours", compression="zstd")
    loaded = blank(expected)
    dcp.load(loaded, checkpoint_id=tmp_path / "ours", **ALONE)
    same(loaded, expected)
    saver = rt.AsyncSaver()
    saver.save(expected, tmp_path / "background", compression="zstd").result()
    loaded = blank(expected)
    dcp.load(loaded, checkpoint_id=tmp_path / "background", **ALONE)
    same(loaded, expected)


def test_it_takes_less_room_and_is_what_was_saved(tmp_path):
    expected = state()
    rt.save(expected, tmp_path / "plain")
    rt.save(expected, tmp_path / "small", compression="zstd")
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).iterdir()) for name in ("plain", "small")]
    assert sizes[1] < sizes[0] / 5
    loaded = blank(expected)
    rt.load(loaded, tmp_path / "small")
    same(loaded, expected)
    assert reshard.verify(tmp_path / "small").sound
    with pytest.raises(reshard.InvalidInput, match='"zstd"'):
        rt.save(expected, tmp_path / "other", compression="lz4")


@zstd
def test_damage_is_never_a_number(theirs):
    expected = state()["model"]["noise"]
    random.seed(3)
    for file in sorted(theirs.glob("*.distcp")):
        whole = file.read_bytes()
        for _ in range(25):
            damaged = bytearray(whole)
            damaged[random.randrange(len(whole))] ^= 1 << random.randrange(8)
            file.write_bytes(damaged)
            try:
                with reshard.open(theirs) as ck:
                    found = torch.from_numpy(ck["model.noise"].numpy())
            except reshard.ReshardError:
                continue
            assert torch.equal(found, expected)
        file.write_bytes(whole)


@zstd
def test_a_bomb_is_refused(tmp_path):
    folder = pathlib.Path(tmp_path / "bomb")
    writer = dcp.FileSystemWriter(folder, _extensions=[extension.ZStandard()])
    dcp.save({"text": "a" * 80_000_000, "zeros": torch.zeros(4)}, storage_writer=writer, **ALONE)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 100_000
    with reshard.open(folder) as ck, pytest.raises(reshard.ReshardError, match="decompresses to more than"):
        ck["text"]
    assert torch.equal(torch.from_numpy(reshard.open(folder)["zeros"].numpy()), torch.zeros(4))
