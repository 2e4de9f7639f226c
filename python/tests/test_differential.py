"""Our inert decoder beside Python's own: what we accept is what pickle makes of it, and nothing else is imported.

Pickles are made of random values, of random instructions and of both with bytes changed; archives are taken apart and put
together wrongly. `RESHARD_DIFFERENTIAL` says how many, and `RESHARD_SEED` where to begin.
"""

import io
import os
import pickle
import random
import struct
import warnings
import zipfile

import pytest
import torch
from test_untrusted import archive, glob, text
from test_values import PLAIN, random_value, same

import reshard
from reshard import _reshard

COUNT = int(os.environ.get("RESHARD_DIFFERENTIAL", "1500"))
SEED = int(os.environ.get("RESHARD_SEED", "0"))

#: What our decoder takes for data. Whatever else a pickle names must not be in what it accepts.
DATA = {
    "_codecs.encode",
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.Counter",
    "copyreg._reconstructor",
    "decimal.Decimal",
    "fractions.Fraction",
    "uuid.UUID",
    "numpy.dtype",
    "numpy.ndarray",
    "torch.serialization._get_layout",
    "torch.Size",
    "torch.device",
}
BUILTIN = {
    "set",
    "frozenset",
    "bytes",
    "bytearray",
    "complex",
    "slice",
    "range",
    "int",
    "float",
    "str",
    "bool",
    "list",
    "dict",
    "tuple",
    "object",
}


#: Values that every protocol can pickle, and pickles whole.
STABLE = [
    name for name, value in PLAIN.items() if name not in ("memory_format", "folded") and not isinstance(value, torch.Tensor)
]


class Ran(Exception):
    """The pickle asked for something that is not data."""


class Watched(pickle.Unpickler):
    """Python's own unpickler, which imports data and raises for the rest."""

    def find_class(self, module, name):
        module = {"numpy.core.multiarray": "numpy._core.multiarray"}.get(module, module)
        found = super().find_class(module, name)
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        known = (
            f"{module}.{name}" in DATA
            or (module == "builtins" and name in BUILTIN | {"xrange", "long", "unicode"})
            or module in ("datetime", "pathlib", "numpy._core.multiarray")
            or (module == "torch" and isinstance(found, (torch.dtype, torch.memory_format)))
        )
        if not known:
            raise Ran(f"{module}.{name}")
        return found

    def persistent_load(self, pid):
        raise Ran("a storage")


def theirs(body):
    return Watched(io.BytesIO(body)).load()


def ours(body):
    """(value,) of what we accept as plain, None of anything else."""
    try:
        found = _reshard.decode_record(archive([("archive/data.pkl", body), ("archive/version", b"3\n")]))
    except reshard.ReshardError:
        return None
    return None if found.class_name is not None else (found.value,)


def compare(body, what):
    found = ours(body)
    if found is None:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = theirs(body)
        except Exception as error:
            raise AssertionError(f"{what}: accepted as {found[0]!r}, Python says {error!r}: {body!r}") from error
    assert same(found[0], expected), f"{what}: {found[0]!r}, Python says {expected!r}: {body!r}"
    return True


PIECES = [
    *(b"K" + bytes([n]) for n in (0, 1, 2, 7)),
    *(b"h" + bytes([n]) for n in (0, 1, 2)),
    *(b"q" + bytes([n]) for n in (0, 1, 2)),
    b"N", b"\x88", b"\x89", b"]", b"}", b")", b"(", b"\x8f", b"0", b"1", b"2", b"a", b"e", b"s", b"u", b"t", b"\x85", b"\x86",
    b"\x87", b"R", b"b", b"\x81", b"\x90", b"\x91", b"\x94", b"l", b"d", b"o", b"Q", b"\x92", b"I01\n", b"I1\n", b"L5L\n", b"F1.5\n",
    b"Vab\n", b"S'a'\n", b"G" + struct.pack(">d", 0.5), b"C\x01x", b"\x96" + struct.pack("<Q", 1) + b"y", text("a"), text("int"),
    glob("collections", "OrderedDict"), glob("collections", "Counter"), glob("collections", "defaultdict"), glob("builtins", "set"),
    glob("builtins", "list"), glob("builtins", "dict"), glob("builtins", "int"), glob("builtins", "bytearray"), glob("builtins", "complex"),
    glob("builtins", "getattr"), glob("builtins", "slice"), glob("builtins", "range"), glob("torch", "Size"), glob("posix", "getpid"),
    glob("fractions", "Fraction"), glob("decimal", "Decimal"), glob("_codecs", "encode"), glob("datetime", "timedelta"),
]  # fmt: skip

#: Programs that do something with calls, so that random ones get that far.
PHRASES = [
    glob("builtins", "set") + b"]q\x05(K\x01K\x02e\x85R",
    b"h\x05K\x03a",
    glob("collections", "OrderedDict") + b"]](K\x01K\x02ea\x85R",
    glob("collections", "OrderedDict") + b")RK\x01K\x02s",
    glob("collections", "Counter") + b"}K\x01K\x02s\x85R",
    glob("collections", "defaultdict") + glob("builtins", "int") + b"\x85RK\x01K\x02s",
    glob("builtins", "slice") + b"NK\x01N\x87R",
    glob("builtins", "frozenset") + b"](K\x01I01\nG" + struct.pack(">d", 1.0) + b"e\x85R",
    glob("fractions", "Fraction") + text("3/6") + b"\x85R",
    glob("fractions", "Fraction") + b"K\x03K\x06\x86R",
    glob("decimal", "Decimal") + text("1.0") + b"\x85R",
    glob("torch", "Size") + b"K\x01K\x02\x86\x85R",
    glob("datetime", "timedelta") + b"K\x01K\x02K\x03\x87R",
    b"}(K\x01K\x02I01\nK\x03u",
]


def program(rng):
    body = b"".join(rng.choice(PHRASES) if rng.random() < 0.2 else rng.choice(PIECES) for _ in range(rng.randrange(1, 9)))
    return b"\x80\x02" + body + b"." + (b"K\x01." if rng.random() < 0.02 else b"")


def changed(rng, body):
    body = bytearray(body)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(body))
        action = rng.randrange(4)
        if action == 0:
            body[at] = rng.randrange(256)
        elif action == 1:
            del body[at : at + rng.randrange(1, 4)]
        elif action == 2:
            body[at:at] = rng.choice(PIECES)
        else:
            body[at] ^= 1 << rng.randrange(8)
        if not body:
            return b"."
    return bytes(body)


def test_what_is_accepted_is_what_python_reads():
    taken = {"values": 0, "programs": 0, "changed": 0}
    for seed in range(SEED, SEED + COUNT):
        rng = random.Random(seed)
        value = pickle.dumps(random_value(rng, names=STABLE), rng.randrange(6))
        taken["values"] += compare(value, f"seed {seed}, a value")
        taken["programs"] += compare(program(rng), f"seed {seed}, a program")
        taken["changed"] += compare(changed(rng, value), f"seed {seed}, a value changed")
    # The test means something only while a good part is accepted.
    assert taken["values"] > 0.8 * COUNT and taken["programs"] > 0.02 * COUNT and taken["changed"] > 0.02 * COUNT, taken


def test_torch_reads_the_same():
    """Torch's restricted unpickler, where it reads such a pickle at all."""
    read = 0
    for seed in range(SEED, SEED + COUNT // 10):
        rng = random.Random(seed)
        body = pickle.dumps(random_value(rng, names=STABLE), 2) if seed % 2 else program(rng)
        record = archive([("archive/data.pkl", body), ("archive/version", b"3\n")])
        found = ours(body)
        if found is None:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = torch.load(io.BytesIO(record), weights_only=True)
        except Exception:
            continue
        read += 1
        assert same(found[0], expected), (seed, found[0], expected)
    assert read > COUNT // 100


def rearranged(rng, entries):
    """An archive of the same entries, put together in one of the ways in which readers may differ."""
    entries = list(entries)
    way = rng.randrange(8)
    name, data = rng.choice(entries)
    other = pickle.dumps("other", 2)
    if way == 0:
        entries.insert(rng.randrange(len(entries) + 1), (name, other))
    elif way == 1:
        entries.insert(rng.randrange(len(entries) + 1), (name.upper(), other))
    elif way == 2:
        entries.remove((name, data))
        entries.append((name.upper(), data))
    elif way == 3:
        entries.insert(0, ("other/data.pkl", other))
    elif way == 4:
        entries.append((name + "\0", other))
    elif way == 5:
        return archive(entries) + archive([("archive/data.pkl", other)])
    elif way == 6:
        return archive([("archive/data.pkl", other)]) + archive(entries)
    return archive(entries, comment=rng.choice([b"", b"PK\x05\x06" + bytes(18)]))


def test_archives_hold_one_thing_for_every_reader():
    accepted = 0
    entries = [("archive/data.pkl", pickle.dumps({"a": 1}, 2)), ("archive/byteorder", b"little"), ("archive/version", b"3\n")]
    for seed in range(SEED, SEED + COUNT // 5):
        record = rearranged(random.Random(seed), entries)
        try:
            found = _reshard.decode_record(record)
        except reshard.ReshardError:
            continue
        accepted += 1
        assert found.class_name is None and found.value == torch.load(io.BytesIO(record), weights_only=True), seed
    assert accepted


def test_every_plain_value_survives_every_protocol():
    for name in STABLE:
        value = PLAIN[name]
        for protocol in range(6):
            body = pickle.dumps((value,), protocol)
            found = ours(body)
            # Python's oldest protocols and numpy's newest spell some of them in ways of their own.
            if found is None and (protocol < 2 or protocol == 5):
                continue
            assert found is not None, (name, protocol)
            assert same(found[0], (value,)), (name, protocol, found)


def test_zip_modules_agree_that_a_record_is_an_archive():
    record = archive([("archive/data.pkl", b"\x80\x02N.")])
    found = _reshard.decode_record(record)
    assert zipfile.is_zipfile(io.BytesIO(record)) and found.value is None and found.class_name is None
    with pytest.raises(reshard.ReshardError):
        _reshard.decode_record(b"\0" + record)
