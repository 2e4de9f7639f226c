"""Writes archives that lie, each in one way: `python make_hostile.py OUT` (Python alone, no torch).

hostile.json has, by file, words that the reader's error must contain. `content` cases open, but their pickle must
be refused; nothing in them may ever run.
"""

import json
import pickle
import struct
import sys
import zlib
from pathlib import Path

TENSOR = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu%(numel)stQ%(offset)s%(size)s%(stride)s\x89ccollections\nOrderedDict\n)RtR."
)


def integer(value):
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def numbers(*values):
    return b"(" + b"".join(map(integer, values)) + b"t"


def tensor(numel=4, offset=0, size=(4,), stride=(1,)):
    parts = {"numel": integer(numel), "offset": integer(offset), "size": numbers(*size), "stride": numbers(*stride)}
    return TENSOR % {key.encode(): value for key, value in parts.items()}


class Entry:
    def __init__(self, name, data, **lies):
        self.name, self.data, self.lies = name if isinstance(name, bytes) else f"archive/{name}".encode(), data, lies

    def local(self):
        name = self.lies.get("local_name", self.name)
        flags, method = self.lies.get("local_flags", 0x800), self.lies.get("local_method", 0)
        extra = self.lies.get("local_extra", b"")
        sizes = struct.pack("<III", zlib.crc32(self.data), len(self.data), len(self.data))
        magic = self.lies.get("local_magic", b"PK\3\4")
        return (
            magic
            + struct.pack("<HHHHH", 0, flags, method, 0, 0)
            + sizes
            + struct.pack("<HH", len(name), len(extra))
            + name
            + extra
            + self.data
        )

    def central(self, offset):
        size = self.lies.get("size", len(self.data))
        offset = self.lies.get("offset", offset)
        compressed = self.lies.get("compressed", size)
        wide = [value for value in (size, compressed, offset) if value > 0xFFFFFFFE]
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        extra = self.lies.get("extra", extra)
        low = lambda value: min(value, 0xFFFFFFFF)
        return (
            b"PK\1\2"
            + struct.pack(
                "<HHHHHHIIIHHHHHII",
                0,
                0,
                self.lies.get("flags", 0x800),
                self.lies.get("method", 0),
                0,
                0,
                self.lies.get("crc", zlib.crc32(self.data)),
                low(compressed),
                low(size),
                self.lies.get("name_len", len(self.name)),
                len(extra),
                0,
                self.lies.get("disk", 0),
                0,
                0,
                low(offset),
            )
            + self.name
            + extra
        )


def archive(*entries, count=None, directory=None, directory_len=None, zip64=None, end=b"", disk=0):
    body, offsets = b"", []
    for entry in entries:
        offsets.append(len(body))
        body += entry.local()
    central = b"".join(entry.central(offset) for entry, offset in zip(entries, offsets))
    start = len(body)
    body += central
    count = len(entries) if count is None else count
    directory = start if directory is None else directory
    directory_len = len(central) if directory_len is None else directory_len
    if zip64 is not None:
        record = dict(count=count, length=directory_len, start=directory, at=len(body), magic=b"PK\6\6") | zip64
        body += record["magic"] + struct.pack(
            "<QHHIIQQQQ", 44, 0, 45, 0, 0, record["count"], record["count"], record["length"], record["start"]
        )
        body += b"PK\6\7" + struct.pack("<IQI", 0, record["at"], 1)
    low16, low32 = min(count, 0xFFFF), lambda value: min(value, 0xFFFFFFFF)
    body += b"PK\5\6" + struct.pack("<HHHHIIH", disk, disk, low16, low16, low32(directory_len), low32(directory), len(end))
    return body + end


DATA = bytes(range(16))


def good(data_pkl=None, data=DATA, **lies):
    return [Entry("data.pkl", data_pkl or tensor()), Entry("byteorder", b"little"), Entry("data/0", data, **lies)]


class Command:
    def __reduce__(self):
        import os

        return os.system, ("touch /tmp/reshard-was-here",)


def doubled(depth):
    """Lists of the list before, twice: 2 ** depth leaves in 6 bytes each."""
    out = b"\x80\x02(]q\x00"
    for level in range(depth):
        out += b"](h%ch%ceq%c" % (level, level, level + 1)
    return out + b"t."


def archives():
    yield "empty", b"", "empty"
    yield "garbage", bytes(range(256)) * 4, "signature"
    yield "only_end", archive(), "signature"
    yield "cut", archive(*good())[:-1], "no end record"
    yield "long_comment", archive(*good(), end=b"x" * 70)[:-1], "no end record"
    yield "size_past_archive", archive(*good(size=1 << 20)), "archive/data/0", "past the archive"
    yield "size_2_63", archive(*good(size=1 << 63)), "archive/data/0", "past the archive"
    yield "size_2_64", archive(*good(size=(1 << 64) - 1)), "archive/data/0", "past the archive"
    yield "offset_past_archive", archive(*good(offset=1 << 31)), "archive/data/0"
    yield "offset_2_64", archive(*good(offset=(1 << 64) - 2)), "archive/data/0"
    yield "offset_into_directory", archive(*good(offset=300)), "archive/data/0"
    yield "same_place", archive(*good(offset=0)), "overlap"
    yield "inside_another", archive(*good(offset=40)), "overlap"
    yield (
        "reaches_into_next",
        archive(Entry("data.pkl", tensor()), Entry("data/0", DATA, size=60), Entry("version", b"3\n")),
        "archive/data/0",
        "archive/version",
    )
    yield (
        "long_local_extra",
        archive(
            Entry("data.pkl", tensor(), local_extra=b""), Entry("data/0", DATA, size=64, local_extra=b"FB\x20\0" + b"Z" * 32)
        ),
        "archive/data/0",
    )
    yield "twice", archive(*good(), Entry("data/0", DATA)), "occurs twice"
    yield "two_sizes", archive(*good(compressed=8)), "two sizes"
    yield "deflated", archive(*good(method=8)), "archive/data/0", "deflate"
    yield "encrypted", archive(*good(flags=0x801)), "encrypted"
    yield "other_disk", archive(*good(disk=3)), "another part"
    yield "end_other_disk", archive(*good(), disk=1), "several parts"
    yield "long_name", archive(*good(name_len=60000)), "cut short"
    yield "name_not_utf8", archive(Entry(b"archive/\xff\xfe", b"")), "UTF-8"
    yield "no_folder", archive(Entry(b"data.pkl", tensor())), "folder"
    yield "zip64_extra_missing", archive(*good(size=1 << 40, extra=b"")), "zip64"
    yield "zip64_extra_short", archive(*good(size=1 << 40, extra=b"\1\0\4\0aaaa")), "zip64"
    yield "extra_length_lies", archive(*good(size=1 << 40, extra=b"\1\0\xff\xffaaaa")), "zip64"
    yield "too_many_entries", archive(*good(), count=9000), "don't fit"
    yield "too_few_entries", archive(*good(), count=2), "more than its entries"
    yield "entries_2_63", archive(*good(), count=0xFFFF, zip64={"count": 1 << 63}), "don't fit"
    yield "directory_outside", archive(*good(), directory=1 << 30), "outside the archive"
    yield "directory_2_63", archive(*good(), directory=0xFFFFFFFF, zip64={"start": 1 << 63}), "outside the archive"
    yield "directory_len_2_63", archive(*good(), directory_len=0xFFFFFFFF, zip64={"length": 1 << 63}), "outside the archive"
    yield "zip64_end_outside", archive(*good(), zip64={"at": 1 << 62}), "outside the archive"
    yield "zip64_end_missing", archive(*good(), zip64={"magic": b"PKxx"}), "no zip64 end record"
    yield "ends_disagree", archive(*good(), zip64={"count": 2}), "disagree"
    yield "byteorder", archive(Entry("data.pkl", tensor()), Entry("byteorder", b"middle")), "byte order", "middle"
    yield "long_byteorder", archive(Entry("data.pkl", tensor()), Entry("byteorder", b"l" * 5000)), "byteorder", "16"


def contents():
    yield "local_header_missing", archive(*good(local_magic=b"XXXX")), "archive/data/0", "no local header"
    yield "local_name_differs", archive(*good(local_name=b"archive/data/1")), "another name"
    yield "local_deflated", archive(*good(local_method=8)), "deflate"
    yield "no_pickle", archive(Entry("version", b"3\n")), "data.pkl"
    yield "pickle_crc", archive(Entry("data.pkl", tensor(), crc=1), Entry("data/0", DATA)), "CRC-32", "data.pkl"
    yield "no_storage", archive(Entry("data.pkl", tensor())), "data/0"
    yield "storage_2_62", archive(*good(tensor(numel=1 << 62))), "overflows"
    yield "storage_too_long", archive(*good(tensor(numel=5))), "20 bytes"
    yield "size_too_long", archive(*good(tensor(size=(5,)))), "outside its storage"
    yield "size_2_62", archive(*good(tensor(size=(1 << 62,)))), "outside its storage"
    yield "size_overflows", archive(*good(tensor(size=(1 << 40, 1 << 40), stride=(0, 0)))), "outside its storage"
    yield "repeated_past_63_bits", archive(*good(tensor(size=(1 << 62,), stride=(0,)))), "more bytes than 63 bits"
    yield "stride_too_long", archive(*good(tensor(size=(2, 2), stride=(3, 1)))), "outside its storage"
    yield "stride_2_62", archive(*good(tensor(size=(2, 2), stride=(1 << 62, 1)))), "outside its storage"
    yield "offset_too_far", archive(*good(tensor(offset=1))), "outside its storage"
    yield "offset_2_62", archive(*good(tensor(offset=1 << 62))), "outside its storage"
    yield "negative_offset", archive(*good(tensor(offset=-1))), "storage offset"
    yield "negative_size", archive(*good(tensor(size=(-4,)))), "size"
    yield "huge_number", archive(*good(tensor(size=(1 << 70,)))), "size"
    yield "rank_differs", archive(*good(tensor(size=(2, 2)))), "strides"
    yield "many_dims", archive(*good(tensor(size=(1,) * 100, stride=(1,) * 100))), "at most 64"
    yield "os_system", archive(Entry("data.pkl", pickle.dumps(Command(), protocol=2))), "system"
    yield (
        "os_system_beside_tensor",
        archive(*good(b"\x80\x02}(X\x01\0\0\0a" + tensor()[2:-1] + b"X\x01\0\0\0bcposix\nsystem\nX\x01\0\0\0x\x85Ru.")),
        "posix.system",
    )
    yield "eval_in_key", archive(*good(b"\x80\x02}cbuiltins\neval\nX\x01\0\0\x001\x85R" + tensor()[2:-1] + b"s.")), "eval"
    yield "unknown_class", archive(Entry("data.pkl", b"\x80\x02cevil.module\nClass\n)\x81}b.")), "evil.module"
    yield "no_arguments", archive(*good(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.")), "too few arguments"
    yield "no_tuple", archive(*good(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nK\x01R.")), ""
    yield (
        "storage_is_a_number",
        archive(*good(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\0K\x01\x85K\x01\x85\x89NtR.")),
        "without storage",
    )
    yield (
        "reference_of_other_form",
        archive(*good(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01QK\0K\x01\x85K\x01\x85\x89NtR.")),
        "unknown form",
    )
    parameter = b"ctorch._utils\n_rebuild_parameter\n("
    nested = b"\x80\x02" + parameter * 200 + tensor()[2:-1] + b"\x88NtR" * 200 + b"."
    yield "parameters_in_parameters", archive(*good(nested)), "nested"
    yield "parameter_in_itself", archive(*good(b"\x80\x02ctorch._utils\n_rebuild_parameter\n(]q\0h\0a\x88NtR.")), ""
    yield (
        "duplicate_key",
        archive(*good(b"\x80\x02}(X\x01\0\0\0a" + tensor()[2:-1] + b"X\x01\0\0\0a" + tensor()[2:-1] + b"u.")),
        "a",
        "twice",
    )
    yield "doubled_30_times", archive(Entry("data.pkl", doubled(30))), "more values"
    yield "doubled_beside_tensor", archive(*good(doubled(30)[:-1] + tensor()[2:-1] + b"\x86.")), "more values"
    yield "contains_itself", archive(Entry("data.pkl", b"\x80\x02]q\0h\0a.")), "itself"


def main():
    out = Path(sys.argv[1])
    out.mkdir(exist_ok=True)
    expected = {"archives": {}, "contents": {}}
    for kind, cases in (("archives", archives()), ("contents", contents())):
        for name, data, *words in cases:
            expected[kind][name] = words
            (out / f"{name}.pt").write_bytes(data)
    (out / "hostile.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
