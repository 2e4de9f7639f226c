"""Tensors on a device come through a bounded amount of memory, however large they are. The device here is a pretence: memory
that the describing code is told the CPU cannot read."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import ALONE, random_bytes, same
from test_cross import layouts, mesh_of, sharded

import reshard
import reshard.torch as rt
from reshard.torch import _describe, _staging

SIZE, COUNT = 100_000, 2


class Watched(_staging.Blocks):
    """Counts what is lent."""

    def __init__(self):
        self.made = self.lent_now = self.most = self.times = 0
        self._watch = threading.Lock()
        super().__init__(SIZE, COUNT, self._made)

    def _made(self, size):
        with self._watch:
            self.made += 1
        return torch.empty(size, dtype=torch.uint8)

    def lent(self):
        watched = self
        inner = super().lent()

        class Lending:
            def __enter__(self):
                block = inner.__enter__()
                with watched._watch:
                    watched.lent_now += 1
                    watched.times += 1
                    watched.most = max(watched.most, watched.lent_now)
                return block

            def __exit__(self, *error):
                with watched._watch:
                    watched.lent_now -= 1
                return inner.__exit__(*error)

        return Lending()


def pretend(patch):
    """Everything that is not plain and contiguous, which is described without asking, is on a device from now on."""
    blocks = Watched()
    patch(_staging, "_blocks", blocks)
    patch(_describe, "is_cpu", lambda tensor: False)
    return blocks


@pytest.fixture
def blocks(monkeypatch):
    return pretend(monkeypatch.setattr)


def views(fill=True):
    """Leaves that are described with care: shards, strided tensors, small and large."""
    made = {
        "large": random_bytes((1500, 1000), torch.float32, 1),
        "half": random_bytes((300, 70), torch.bfloat16, 2),
        "small": random_bytes((3,), torch.int8, 3),
        "empty": torch.empty(0, 3),
    }
    strided = {
        "transposed": random_bytes((400, 300), torch.float32, 4).T,
        "channels": random_bytes((8, 6, 5, 4), torch.float32, 5).permute(0, 3, 1, 2),
        "every_other": random_bytes((1000, 8), torch.int64, 6)[:, ::2],
        "rows": random_bytes((40, 200_000), torch.float32, 7)[::3, :150_000],
    }
    if not fill:
        made = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
        return {**made, **{name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in strided.items()}}
    shards = {name: rt.ShardView(t.dtype, t.shape, [((0,) * t.dim(), t)]) for name, t in made.items()}
    return {**shards, **strided}, {**made, **strided}


def check(path, wanted):
    found = views(fill=False)
    rt.load({"model": found}, path)
    for name, tensor in wanted.items():
        assert same(found[name], tensor), name


def bounded(blocks):
    assert 0 < blocks.made <= COUNT and 0 < blocks.most <= COUNT and blocks.lent_now == 0
    # Far more went through them than they hold.
    assert blocks.times > 10 * COUNT


def test_a_save_goes_through_a_few_blocks(path, blocks, monkeypatch):
    state, wanted = views()
    rt.save({"model": state}, path)
    bounded(blocks)
    monkeypatch.undo()
    check(path, wanted)
    with reshard.open(path) as ck:
        assert ck["model.large"].shape == (1500, 1000)


@pytest.mark.parametrize("budget", [None, 1_000_000])
def test_a_save_in_the_background_too(path, blocks, monkeypatch, budget):
    state, wanted = views()
    kept = {name: tensor.clone() for name, tensor in wanted.items()}
    handle = rt.AsyncSaver(staging_budget=budget).save({"model": state}, path)
    bounded(blocks)
    times = blocks.times
    for tensor in wanted.values():
        tensor.zero_()
    handle.result()
    assert blocks.times == times, "what is written in the background was copied before"
    monkeypatch.undo()
    check(path, kept)


def test_through_pytorch_too(path, blocks, monkeypatch):
    _, wanted = views()
    dcp.save({"model": wanted}, storage_writer=rt.StorageWriter(path), **ALONE)
    bounded(blocks)
    monkeypatch.undo()
    check(path, wanted)


def test_a_load_goes_through_a_few_blocks(path, blocks):
    state, wanted = views()
    rt.save({"model": wanted}, path)
    kept = {name: tensor.clone() for name, tensor in wanted.items()}
    for verify in ("whole", "never"):
        for tensor in wanted.values():
            tensor.zero_()
        blocks.times = 0
        report = rt.load({"model": state}, path, verify=verify)
        bounded(blocks)
        assert report.verified == (len(kept) - 1 if verify == "whole" else 0)
        for name, tensor in wanted.items():
            assert same(tensor, kept[name]), name


def test_a_load_converts_on_its_way(path, blocks):
    rt.save({"x": torch.arange(90_000.0).reshape(300, 300), "z": torch.tensor([[1 + 2j, 3 - 4j]])}, path)
    halves = torch.zeros(300, 300, dtype=torch.float64).T
    conjugate = torch.zeros(1, 2, dtype=torch.complex64).conj()
    rt.load({"x": halves, "z": conjugate}, path, cast="any")
    assert same(halves, torch.arange(90_000.0, dtype=torch.float64).reshape(300, 300))
    assert conjugate.tolist() == [[1 + 2j, 3 - 4j]]


def test_a_load_through_pytorch_too(path, blocks):
    _, wanted = views()
    rt.save({"model": wanted}, path)
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load({"model": found}, storage_reader=rt.StorageReader(path), **ALONE)
    bounded(blocks)
    for name, tensor in wanted.items():
        assert same(found[name], tensor), name


def test_what_cannot_be_written_fails_the_load_by_name(path, blocks, monkeypatch):
    def broken(self, *_):
        raise RuntimeError("the device is gone")

    state, wanted = views()
    rt.save({"model": wanted}, path)
    monkeypatch.setattr(_staging.DeviceMemory, "write", broken)
    with pytest.raises(reshard.ReshardError, match="the device is gone"):
        rt.load({"model": state}, path)


def on_ranks(rank, size, path):
    kept = _describe.is_cpu
    blocks = pretend(setattr)
    whole = torch.arange(9.0 * 8 * 5000).reshape(9 * 8, 5000)
    for layout, (shape, placements) in layouts(size).items():
        rt.save({"w": sharded(whole, mesh_of(shape), placements)}, f"{path}-{layout}", check_replicas=True)
    assert blocks.made <= COUNT and blocks.times > 20
    for layout in layouts(size):
        for other, (shape, placements) in layouts(size).items():
            found = sharded(torch.zeros_like(whole), mesh_of(shape), placements)
            rt.load({"w": found}, f"{path}-{layout}", exchange=layout < other)
            wanted = sharded(whole, mesh_of(shape), placements)
            assert same(found.to_local(), wanted.to_local()), (layout, other)
    assert blocks.made <= COUNT
    _describe.is_cpu = kept
    for layout in layouts(size):
        found = {"w": torch.zeros_like(whole)}
        rt.load(found, f"{path}-{layout}")
        assert same(found["w"], whole), layout


def test_every_layout_on_ranks(ranks, path):
    ranks(4, on_ranks, path)


def test_what_cannot_be_read_fails_the_save_by_name(path, blocks, monkeypatch):
    def broken(self, offset, into):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(_staging.DeviceMemory, "read", broken)
    with pytest.raises(reshard.ReshardError, match="the device is gone"):
        rt.save({"model": views()[0]}, path)
    assert not rt.exists(path)
    with pytest.raises(reshard.ReshardError, match="the device is gone"):
        rt.async_save({"model": views()[0]}, path).result()
    assert not rt.exists(path)


def test_a_block_that_cannot_be_made_is_not_counted():
    def make(size):
        if not allowed:
            raise MemoryError
        return torch.empty(size, dtype=torch.uint8)

    allowed = []
    blocks = _staging.Blocks(10, 1, make)
    for _ in range(2):
        with pytest.raises(MemoryError), blocks.lent():
            pass
    allowed.append(True)
    with blocks.lent() as block:
        assert len(block) == 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_real_device(path):
    _state, wanted = views()
    on_device = {name: tensor.cuda() for name, tensor in wanted.items()}
    rt.save({"model": on_device}, path)
    check(path, wanted)
    found = {name: torch.zeros_like(tensor) for name, tensor in on_device.items()}
    rt.load({"model": found}, path)
    for name, tensor in wanted.items():
        assert same(found[name].cpu(), tensor), name
