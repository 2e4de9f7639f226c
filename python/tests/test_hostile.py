"""Files that are hostile or merely large, in every verb: each ends in bounded time and memory, with an answer or one clear error.

`RESHARD_CAMPAIGN=1` (`make test-faults`) takes an 80 MB header and a million keys; else a tenth of it.
"""

import io
import json
import os
import pickle
import struct
import time
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import measured, served
from helpers import ALONE
from test_untrusted import FLOATS, Planting, record, tensor, text
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import reshard
import reshard.torch as rt

KEYS = 1_000_000 if "RESHARD_CAMPAIGN" in os.environ else 100_000
DEEP = 100_000

VERBS = {
    "inspect": lambda source, out: ["inspect", source],
    "ls": lambda source, out: ["ls", source],
    "show": lambda source, out: ["show", source, "w"],
    "stats": lambda source, out: ["stats", source],
    "digest": lambda source, out: ["digest", source],
    "verify": lambda source, out: ["verify", source],
    "diff": lambda source, out: ["diff", source, source],
    "convert to dcp": lambda source, out: ["convert", source, out / "d", "--to", "dcp"],
    "convert to safetensors": lambda source, out: ["convert", source, out / "m.safetensors"],
    "convert to torch": lambda source, out: ["convert", source, out / "m.pt"],
    "relayout": lambda source, out: ["relayout", source, out / "r", "--mesh", "2"],
    "merge": lambda source, out: ["merge", source, source, "--output", out / "m"],
    "edit": lambda source, out: ["edit", source, out / "e", "--set", "n=3"],
    "plan": lambda source, out: ["plan", source, "--mesh", "2"],
    "report": lambda source, out: ["report", source, "--output", out / "page.html"],
}


def many_tensors_in_a_header(base):
    """A safetensors file that is hardly more than its header."""
    entries = ",".join(f'"layer.{n:07}.weight":{{"dtype":"F32","shape":[0],"data_offsets":[4,4]}}' for n in range(KEYS))
    header = ('{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' + entries + "}").encode()
    file = base / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.0))
    return file


def long_metadata_in_a_header(base):
    header = json.dumps({"__metadata__": {"x": "y" * (80 * KEYS)}, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    file = base / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + struct.pack("<f", 1.0))
    return file


def deep_json_in_a_header(base):
    header = b'{"w":' + b"[" * (80 * KEYS)
    file = base / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    return file


def many_keys(base):
    """A checkpoint of PyTorch's whose metadata names a record once for each of many keys."""
    folder = base / "many"
    dcp.save({"w": torch.ones(2), "v": 7}, checkpoint_id=folder, **ALONE)
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "v")
    for number in range(KEYS):
        name = f"value.{number:07}"
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = info
        metadata.planner_data[name] = ("value", f"{number:07}")
    path.write_bytes(pickle.dumps(metadata))
    return folder


def zip_bomb(base):
    """Ten gigabytes of zeros in a file of ten megabytes, as a program that unpacks would see them."""
    file = base / "bomb.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02K\x07.")
        with archive.open("archive/data/0", "w", force_zip64=True) as entry:
            for _ in range(1000 if KEYS == 1_000_000 else 100):
                entry.write(bytes(10_000_000))
        archive.writestr("archive/version", b"3\n")
    return file


def compressed_pickle(base):
    file = base / "bomb.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"]" * 200_000_000 + b".")
        archive.writestr("archive/version", b"3\n")
    return file


def entries_that_overlap(base):
    """Many entries of a directory that all name the same bytes."""
    body = io.BytesIO()
    torch.save({"w": torch.ones(250_000)}, body)
    data = body.getvalue()
    end = data.rindex(b"PK\x05\x06")
    size, at = struct.unpack("<II", data[end + 12 : end + 20])
    directory = data[at : at + size]
    entries = [b"PK\x01\x02" + entry for entry in directory.split(b"PK\x01\x02")[1:]]
    tensor = next(entry for entry in entries if b"/data/0" in entry)
    copies = [tensor.replace(b"/data/0", b"/dat%c/%c" % (c, d)) for c in range(97, 123) for d in range(97, 123)]
    count, many = len(entries) + len(copies), b"".join(entries + copies)
    file = base / "overlapping.pt"
    last = b"PK\x05\x06\0\0\0\0" + struct.pack("<HHIIH", count, count, len(many), at, 0)
    file.write_bytes(data[:at] + many + last)
    return file


def deep_pickle(base):
    file = base / "deep.pt"
    file.write_bytes(record(b"]" * DEEP + b"a" * (DEEP - 1) + b"."))
    return file


def deep_dicts(base):
    file = base / "deep.pt"
    file.write_bytes(record(b"}" + b"K\x01}" * DEEP + b"s" * DEEP + b"."))
    return file


def deep_tuples_of_a_value(base):
    folder = base / "deep"
    planted = record(b")" + b"\x85" * DEEP + b".")
    dcp.save({"x": 7, "w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(folder), planner=Planting(planted), **ALONE)
    return folder


def deep_metadata(base):
    folder = base / "deep"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, **ALONE)
    (folder / ".metadata").write_bytes(b"\x80\x02" + b"]" * DEEP + b"a" * (DEEP - 1) + b".")
    return folder


def long_pickle_of_references(base):
    """A value of tuples that each hold the one before twice: small, and without end when written out."""
    laughs = b"]q\x00" + b"".join(b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(60))
    file = base / "laughs.pt"
    file.write_bytes(record(b"}(" + text("x") + laughs + text("w") + tensor() + b"u.", data=FLOATS))
    return file


def a_value_of_references(base):
    """The same as one value of a checkpoint."""
    folder = base / "laughs"
    laughs = b"]q\x00" + b"".join(b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(60))
    planner = Planting(record(laughs + b"."))
    dcp.save({"x": 7, "w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(folder), planner=planner, **ALONE)
    return folder


FILES = [
    many_tensors_in_a_header,
    long_metadata_in_a_header,
    deep_json_in_a_header,
    many_keys,
    zip_bomb,
    compressed_pickle,
    entries_that_overlap,
    deep_pickle,
    deep_dicts,
    deep_tuples_of_a_value,
    deep_metadata,
    long_pickle_of_references,
    a_value_of_references,
]


@pytest.fixture(scope="module", params=FILES, ids=lambda make: make.__name__)
def hostile(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp(request.param.__name__))


def size_of(path):
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_ends_in_bounded_time_and_memory(hostile, verb, tmp_path):
    code, seconds, memory, said = measured(*VERBS[verb](hostile, tmp_path))
    size = size_of(hostile)
    print(f"{hostile.name} {verb}: exit {code}, {seconds:.1f} s, {memory / 1e6:.0f} MB of {size / 1e6:.1f} MB: {said[:300]}")
    assert code in (0, 1, 2), (code, said[:2000])
    assert "panicked" not in said and "Traceback" not in said, said[:2000]
    if code == 2:
        assert said.count("error:") == 1, said[:2000]
    assert len(said) < 20_000, said[:2000]
    assert memory < 200e6 + 40 * size, (memory, size)
    assert seconds < 20 + 5e-6 * size, (seconds, size)


def test_a_server_answers_and_ends(hostile):
    size = size_of(hostile)
    found = served(hostile, ["w", "v", "value.0000001", "no such key"], 60 + 1e-5 * size)
    print(f"{hostile.name}: exit {found.code}, {found.memory / 1e6:.0f} MB of {size / 1e6:.1f} MB: {found.said[:300]}")
    assert found.code == (0 if found.answers else 2), found.said[:2000]
    assert "panicked" not in found.said and len(found.said) < 20_000, found.said[:2000]
    assert found.memory < 200e6 + 40 * size, (found.memory, size)
    for page, (status, answer) in found.answers.items():
        assert status in (200, 404) and answer, (page, status, answer[:200])


def test_a_load_ends_too(hostile):
    start = time.monotonic()
    state = {"w": torch.zeros(2)}
    try:
        rt.load(state, hostile)
    except (reshard.ReshardError, RecursionError) as error:
        assert not isinstance(error, RecursionError) and str(error)
    assert time.monotonic() - start < 60
