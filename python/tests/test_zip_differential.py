"""Archives that two readers could read differently: reshard reads what PyTorch reads, or refuses."""

import io
import random
import struct
import zipfile

import pytest
import torch

import reshard

W = torch.arange(64.0)


def base():
    buffer = io.BytesIO()
    torch.save({"w": W, "n": 7}, buffer)
    return buffer.getvalue()


def entries(data):
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return [(info.filename, file.read(info)) for info in file.infolist()]


def packed(parts, method=zipfile.ZIP_STORED, comment=b"", streamed=False, zip64=False):
    class Unseekable(io.RawIOBase):
        def __init__(self):
            self.bytes = bytearray()

        def writable(self):
            return True

        def write(self, data):
            self.bytes += data
            return len(data)

    target = Unseekable() if streamed else io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as file:
        for name, content in parts:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            with file.open(info, "w", force_zip64=zip64) as into:
                into.write(content)
        file.comment = comment
    return bytes(target.bytes) if streamed else target.getvalue()


def other_pickle(data):
    """The pickle with another number in it."""
    name, content = next((name, content) for name, content in entries(data) if name.endswith("/data.pkl"))
    assert content.count(b"K\x07") == 1
    return name, content.replace(b"K\x07", b"K\x08")


def patched(data, needle, offset, new, nth=0):
    """Bytes changed at an offset from the nth occurrence of a mark."""
    at = -1
    for _ in range(nth + 1):
        at = data.index(needle, at + 1)
    return data[: at + offset] + new + data[at + offset + len(new) :]


def archives():
    data = base()
    parts = entries(data)
    root = parts[0][0].split("/")[0]
    pickle_name, changed = other_pickle(data)
    storage = next(name for name, _ in parts if name.endswith("/data/0"))
    other = b"\0" * (W.numel() * 4)
    yield "as it is", data
    yield "packed anew", packed(parts)
    yield "a pickle twice, the other last", packed([*parts, (pickle_name, changed)])
    yield "a pickle twice, the other first", packed([(pickle_name, changed), *parts])
    yield "a pickle in capitals", packed([*parts, (pickle_name.upper(), changed)])
    yield "a pickle in capitals first", packed([(f"{root}/DATA.PKL", changed), *parts])
    yield "a pickle in capitals alone", packed([(name.replace("data.pkl", "DATA.PKL"), part) for name, part in parts])
    yield "a storage twice", packed([*parts, (storage, other)])
    yield "a storage in another case", packed([*parts, (storage.replace("data/", "DATA/"), other)])
    yield "a backslash", packed([(name.replace("/data/", "/data\\"), part) for name, part in parts])
    yield "a backslash beside", packed([*parts, (f"{root}\\data.pkl", changed)])
    yield "two folders", packed([*parts, ("other/data.pkl", changed), ("other/version", b"3\n")])
    yield "two folders, the other first", packed([("other/data.pkl", changed), ("other/version", b"3\n"), *parts])
    yield "no folder", packed([(name.split("/", 1)[1], part) for name, part in parts])
    yield "out of the folder", packed([*parts, (f"{root}/../data.pkl", changed)])
    yield "prefix data", b"#!/bin/sh\nexit 0\n" + data
    yield "a page of prefix data", b"\0" * 4096 + data
    yield "trailing data", data + b"trailing"
    yield "another archive behind", data + packed([(pickle_name, changed), *[p for p in parts if p[0] != pickle_name]])
    yield "another archive before", packed([(pickle_name, changed), *[p for p in parts if p[0] != pickle_name]]) + data
    yield "a comment", packed(parts, comment=b"hello")
    yield "an archive in the comment", packed(parts, comment=packed([(pickle_name, changed)]))
    yield "compressed", packed(parts, zipfile.ZIP_DEFLATED)
    yield "data descriptors", packed(parts, streamed=True)
    yield "zip64", packed(parts, zip64=True)
    yield "zip64 with data descriptors", packed(parts, streamed=True, zip64=True)
    yield "no version", packed([part for part in parts if not part[0].endswith("/version")])
    yield "no pickle", packed([part for part in parts if not part[0].endswith("/data.pkl")])
    yield "no storage", packed([part for part in parts if part[0] != storage])
    yield "a storage that is too short", packed([(name, part[:100] if name == storage else part) for name, part in parts])
    yield "a storage that is too long", packed([(name, part * 2 if name == storage else part) for name, part in parts])
    yield "an empty storage", packed([(name, b"" if name == storage else part) for name, part in parts])
    yield "big endian", packed([(name, b"big" if name.endswith("/byteorder") else part) for name, part in parts])
    yield "an odd byte order", packed([(name, b"middle" if name.endswith("/byteorder") else part) for name, part in parts])
    yield "another version", packed([(name, b"99\n" if name.endswith("/version") else part) for name, part in parts])
    yield "a folder entry", packed([(f"{root}/", b""), *parts])
    yield "a name with NUL", data.replace(b"/data.pkl", b"/data\0pkl")
    for nth, where in enumerate(("the pickle", "a later entry", "a still later entry")):
        # 16: CRC in the directory; 14: in the local header; 20 and 24: sizes; 42: where it starts; 8: flags; 10: method.
        yield f"the CRC of {where} in the directory", patched(data, b"PK\x01\x02", 16, b"\1\2\3\4", nth)
        yield f"the CRC of {where} in its header", patched(data, b"PK\x03\x04", 14, b"\1\2\3\4", nth)
        yield f"the size of {where} in the directory", patched(data, b"PK\x01\x02", 24, struct.pack("<I", 3), nth)
        yield f"both sizes of {where} in the directory", patched(data, b"PK\x01\x02", 20, struct.pack("<II", 3, 3), nth)
        yield f"where {where} starts", patched(data, b"PK\x01\x02", 42, struct.pack("<I", 1), nth)
        yield f"{where} is the first entry", patched(data, b"PK\x01\x02", 42, struct.pack("<I", 0), nth)
        yield f"{where} is encrypted", patched(data, b"PK\x01\x02", 8, b"\1\0", nth)
        yield f"{where} is of another method", patched(data, b"PK\x01\x02", 10, b"\x63\0", nth)
        yield f"the name of {where} in its header", patched(data, b"PK\x03\x04", 30, b"X", nth)
        yield f"the name of {where} in the directory", patched(data, b"PK\x01\x02", 46, b"X", nth)
    yield "fewer entries than there are", patched(data, b"PK\x05\x06", 8, struct.pack("<HH", 2, 2))
    yield "more entries than there are", patched(data, b"PK\x05\x06", 8, struct.pack("<HH", 99, 99))
    yield "several disks", patched(data, b"PK\x05\x06", 4, struct.pack("<HH", 1, 1))
    yield "cut", data[:-30]
    yield "cut in the middle", data[: len(data) // 2]


ARCHIVES = dict(archives())


def ours(path):
    try:
        with reshard.open(path) as checkpoint:
            return checkpoint["n"], checkpoint["w"].numpy().tobytes()
    except reshard.ReshardError as error:
        return type(error).__name__


def theirs(path):
    try:
        state = torch.load(path, weights_only=True)
        return state["n"], state["w"].numpy().tobytes()
    except Exception as error:
        return type(error).__name__


#: What PyTorch refuses for reasons of its own, and which means one thing only.
STRICTER = {"no version", "another version", "both sizes of a still later entry in the directory"}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_is_read_as_pytorch_reads_it_or_refused(name, tmp_path):
    path = tmp_path / "t.pt"
    path.write_bytes(ARCHIVES[name])
    mine, other = ours(path), theirs(path)
    if isinstance(mine, tuple) and name not in STRICTER:
        assert mine == other, f"{name}: {mine[:1]} here, {other if isinstance(other, str) else other[:1]} there"
    if not isinstance(mine, tuple):
        assert not reshard.verify(path).sound if other != mine else True
    if name in ("as it is", "packed anew"):
        assert mine == other == (7, W.numpy().tobytes())


def test_changed_bytes_around_the_data_are_read_alike_or_refused(tmp_path):
    """Headers, directory and end: thousands of them by hand, a fixed few hundred here."""
    data = base()
    start = data.index(W.numpy().tobytes())
    outside = [*range(start), *range(start + W.numel() * 4, len(data))]
    path = tmp_path / "t.pt"
    read = 0
    for seed in range(600):
        generator = random.Random(seed)
        changed = bytearray(data)
        for _ in range(generator.choice((1, 1, 1, 2, 4))):
            at = generator.choice(outside)
            changed[at] = generator.choice((changed[at] ^ (1 << generator.randrange(8)), 0, 255, generator.randrange(256)))
        path.write_bytes(changed)
        mine = ours(path)
        if isinstance(mine, tuple):
            read += 1
            other = theirs(path)
            assert not isinstance(other, tuple) or mine == other, f"seed {seed}: {mine[0]} here, {other[0]} there"
            if mine != (7, W.numpy().tobytes()):
                assert not reshard.verify(path).sound, f"seed {seed}: another value, and called sound"
    assert read > 20, "padding may be anything"
