"""Stream extensions of the caller's own, on both sides of our storage: PyTorch reads what was written here, and the other way round."""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import ALONE
from test_compressed import blank, same, state

import reshard
import reshard.torch as rt
import reshard.torch.checkpoint as drop_in

extension = pytest.importorskip("torch.distributed.checkpoint._extension", reason="stream transforms came with torch 2.7")


class Turned(extension.StreamTransformExtension):
    """Turns every bit."""

    @staticmethod
    def registry_name():
        return "stream.turned"

    @staticmethod
    def from_descriptor(version):
        assert version == "3"
        return Turned()

    def get_descriptor(self):
        return "stream.turned/3"

    def transform_to(self, output):
        class Writer(io.RawIOBase):
            def writable(self):
                return True

            def write(self, data):
                output.write(bytes(255 - byte for byte in bytes(data)))
                return len(memoryview(data).cast("B"))

        return Writer()

    def transform_from(self, input):
        return io.BytesIO(bytes(255 - byte for byte in input.read()))


def registry():
    known = extension.ExtensionRegistry()
    known.register(Turned)
    return known


def small():
    expected = state()
    expected["model"]["zeros"] = torch.zeros(3, 4)
    expected["text"] = "words"
    return expected


WRITERS = {"ours": rt.StorageWriter, "drop-in": drop_in.FileSystemWriter, "theirs": dcp.FileSystemWriter}
READERS = {"ours": rt.StorageReader, "drop-in": drop_in.FileSystemReader, "theirs": dcp.FileSystemReader}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_what_went_through_an_extension_comes_back(tmp_path, writer, reader):
    expected = small()
    extensions = [Turned()]
    if writer == "ours" and getattr(extension.ZStandard, "is_available", lambda: extension.pyzstd is not None)():
        # PyTorch's writer names two in an order in which its own reader cannot undo them.
        extensions.append(extension.ZStandard())
    dcp.save(small(), storage_writer=WRITERS[writer](tmp_path, _extensions=extensions), **ALONE)
    assert b"words" not in b"".join(file.read_bytes() for file in tmp_path.glob("*.distcp"))
    loaded = blank(expected)
    dcp.load(loaded, storage_reader=READERS[reader](tmp_path, _extension_registry=registry()), **ALONE)
    same(loaded, expected)


def test_the_drop_in_calls_write_through_the_engine(tmp_path):
    expected = small()
    drop_in.save(small(), storage_writer=drop_in.FileSystemWriter(tmp_path, _extensions=[Turned()]), **ALONE)
    # Its sidecar: published by the engine, with checksums.
    report = reshard.verify(tmp_path)
    assert report.sound and report.checked > 0 and report.unchecked > 0
    assert all("stream.turned" in finding.what and "not checked" in finding.what for finding in report.findings)
    loaded = blank(expected)
    drop_in.load(loaded, storage_reader=drop_in.FileSystemReader(tmp_path, _extension_registry=registry()), **ALONE)
    same(loaded, expected)


def test_zstd_alone_is_read_by_the_engine(tmp_path):
    if not getattr(extension.ZStandard, "is_available", lambda: extension.pyzstd is not None)():
        pytest.skip("PyTorch has no zstd here")
    expected = small()
    dcp.save(small(), storage_writer=rt.StorageWriter(tmp_path, _extensions=[extension.ZStandard()]), **ALONE)
    loaded = blank(expected)
    rt.load(loaded, tmp_path)
    same(loaded, expected)
    report = reshard.verify(tmp_path)
    assert report.sound and not report.findings


def test_what_cannot_be_undone_is_named(tmp_path):
    dcp.save(small(), storage_writer=rt.StorageWriter(tmp_path, _extensions=[Turned()]), **ALONE)
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.load(blank(small()), storage_reader=rt.StorageReader(tmp_path), **ALONE)
    assert "stream.turned/3" in str(error.value) and "_extension_registry" in str(error.value)
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.load(blank(small()), storage_reader=rt.StorageReader(tmp_path, extension.ExtensionRegistry()), **ALONE)
    assert "stream.turned/3" in str(error.value)
    with pytest.raises(reshard.ReshardError, match="stream.turned/3"):
        rt.load(blank(small()), tmp_path)


def test_damage_behind_an_extension_is_found(tmp_path):
    dcp.save(small(), storage_writer=rt.StorageWriter(tmp_path, _extensions=[Turned()]), **ALONE)
    file = next(tmp_path.glob("*.distcp"))
    whole = bytearray(file.read_bytes())
    whole[200] ^= 1
    file.write_bytes(whole)
    with pytest.raises(dcp.CheckpointException, match="checksum"):
        dcp.load(blank(small()), storage_reader=rt.StorageReader(tmp_path, registry()), **ALONE)


def test_parts_of_a_transformed_tensor(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    dcp.save({"w": whole.t()}, storage_writer=rt.StorageWriter(tmp_path, _extensions=[Turned()]), **ALONE)
    into = {"w": torch.zeros(8, 6)[::2, ::2]}
    dcp.load(into, storage_reader=rt.StorageReader(tmp_path, registry()), **ALONE)
    assert torch.equal(into["w"], whole.t())
