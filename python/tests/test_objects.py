"""Everything on an object store: a real S3 server on loopback, in a process of its own."""

import os
import pathlib
import subprocess
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import ALONE, assert_same_tree, same, zeroed
from test_cross import mesh_of, sharded, zoo
from torch.distributed.tensor import Shard

import reshard
import reshard.torch as rt

KEY, SECRET, REGION, BUCKET = "key", "secret", "us-east-1", "bucket"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The folder that holds the buckets, and how to reach the server."""
    program = os.environ.get("RESHARD_S3_SERVER")
    if not program:
        pytest.skip("RESHARD_S3_SERVER names no S3 server: `make test-python` builds one")
    folder = tmp_path_factory.mktemp("objects")
    (folder / BUCKET).mkdir()
    process = subprocess.Popen([program, folder, KEY, SECRET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    endpoint = process.stdout.readline().strip()
    assert endpoint.startswith("http://"), endpoint
    yield folder / BUCKET, {"endpoint": endpoint, "region": REGION, "aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
    # It ends when its input does.
    process.stdin.close()
    process.wait(20)


@pytest.fixture
def options(server):
    return server[1]


@pytest.fixture
def path(request):
    return f"s3://{BUCKET}/{request.node.name}"


def test_what_is_saved_is_loaded(path, options):
    state = zoo()
    report = rt.save(state, path, storage_options=options)
    assert report.path == path and rt.exists(path, storage_options=options)
    loaded = zeroed(state)
    assert rt.load(loaded, path, storage_options=options).verified > 0
    assert_same_tree(state, loaded)
    with pytest.raises(reshard.ReshardError, match="already exists"):
        rt.save(state, path, storage_options=options)
    rt.async_save({"x": torch.arange(5)}, path, overwrite=True, storage_options=options).result()
    found = {"x": torch.zeros(5, dtype=torch.int64)}
    rt.load(found, path, storage_options=options)
    assert found["x"].tolist() == [0, 1, 2, 3, 4]


def test_an_upload_in_parts_and_slices_of_it(path, options):
    # More than one part of an upload, and of a download.
    big = torch.arange(5 << 20, dtype=torch.float32).reshape(-1, 1024)
    rt.save({"big": big, "small": torch.ones(3)}, path, storage_options=options)
    found = {"big": torch.zeros_like(big), "small": torch.zeros(3)}
    report = rt.load(found, path, storage_options=options)
    assert same(found["big"], big) and report.bytes_read < 1.1 * big.nbytes
    with reshard.open(path, storage_options=options) as ck:
        assert (ck["big"][10:12, 5:7] == big[10:12, 5:7].numpy()).all()


def test_settings_of_the_environment(path, options, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint"])
    monkeypatch.setenv("AWS_REGION", REGION)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    rt.save({"x": torch.ones(2)}, path)
    state = {"x": torch.zeros(2)}
    rt.load(state, path)
    assert state["x"].tolist() == [1, 1]


def test_through_pytorch(path, options):
    state = {**zoo(), "groups": [{"lr": i / 10, "betas": (0.9, 0.99)} for i in range(30)]}
    dcp.save(state, storage_writer=rt.StorageWriter(path, storage_options=options), **ALONE)
    loaded = zeroed(state)
    dcp.load(loaded, storage_reader=rt.StorageReader(path, storage_options=options), **ALONE)
    assert_same_tree(state, loaded)


def on_ranks(rank, size, path, options):
    whole = torch.arange(64.0 * 48).reshape(64, 48)
    mesh = mesh_of((size,))
    rt.save({"w": sharded(whole, mesh, [Shard(0)]), "mine": rt.PerRank(rank)}, path, storage_options=options)
    for exchange in (False, True):
        state = {"w": sharded(torch.zeros_like(whole), mesh, [Shard(1)]), "mine": rt.PerRank(None)}
        rt.load(state, path, storage_options=options, exchange=exchange)
        assert same(state["w"].to_local(), sharded(whole, mesh, [Shard(1)]).to_local()) and state["mine"].value == rank
    missing = None
    try:
        rt.load({"w": torch.zeros(1)}, path + "-not-there", storage_options=options)
    except reshard.ReshardError as error:
        missing = type(error).__name__
    return missing


def test_ranks_save_together_and_load_in_another_layout(ranks, path, options):
    assert ranks(3, on_ranks, path, options) == ["NotFound"] * 3


def test_a_manager_keeps_the_newest(path, server):
    bucket, options = server
    with rt.CheckpointManager(path, keep_last=2, storage_options=options) as manager:
        for step in range(1, 5):
            manager.save(step, {"x": torch.full((3,), step)})
    assert manager.steps() == [3, 4]
    state = {"x": torch.zeros(3, dtype=torch.int64)}
    assert manager.restore(state).step == 4 and state["x"].tolist() == [4, 4, 4]
    root = path.rsplit("/", 1)[1]
    left = {found.parent.name for found in pathlib.Path(bucket).rglob(".metadata") if root in found.parts}
    assert left == {"step-3", "step-4"}


def test_a_flipped_bit_is_found(path, server):
    bucket, options = server
    rt.save({"model": {"w": torch.arange(1000.0)}}, path, storage_options=options)
    file = next(pathlib.Path(bucket, path.rsplit("/", 1)[1]).glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[content.index(torch.arange(500.0, 510.0).numpy().tobytes())] ^= 1
    file.write_bytes(content)
    with pytest.raises(reshard.Corrupt, match="model.w"):
        rt.load({"model": {"w": torch.zeros(1000)}}, path, storage_options=options)


def test_what_is_refused_is_said_soon(path, options):
    wrong = {**options, "aws_secret_access_key": "wrong", "max_retries": 0}
    start = time.monotonic()
    with pytest.raises(reshard.StorageError):
        rt.save({"x": torch.ones(1)}, path, storage_options=wrong)
    with pytest.raises(reshard.ReshardError, match="nonsense"):
        rt.save({"x": torch.ones(1)}, path, storage_options={**options, "nonsense": 1})
    nobody = {**options, "endpoint": "http://127.0.0.1:9", "max_retries": 1}
    with pytest.raises(reshard.StorageError, match="127.0.0.1:9|127.0.0.1"):
        rt.load({"x": torch.ones(1)}, path, storage_options=nobody)
    assert time.monotonic() - start < 30
