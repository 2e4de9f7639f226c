"""Makes pickles and metadata files that lie, with the words that the error must contain.

usage: python make_hostile.py OUT_DIR

Needs no torch: stand-ins with torch's class names are enough to pickle by name. `values/` are pickles that a reader
of plain values must refuse, `metadata/` are `.metadata` files that must be refused; `expected.json` in each
gives for every file words of the error. `NAME.runs` is a large file in short: lines of `COUNT HEX`, each standing
for COUNT times these bytes. Loading one of these with Python's own pickle can run commands.
"""

import enum
import json
import os
import pickle
import shutil
import struct
import sys
import types

out = sys.argv[1]
shutil.rmtree(out, ignore_errors=True)


def write(folder, cases):
    os.makedirs(f"{out}/{folder}")
    for name, (data, _) in cases.items():
        if isinstance(data, bytes):
            with open(f"{out}/{folder}/{name}", "wb") as f:
                f.write(data)
        else:
            with open(f"{out}/{folder}/{name}.runs", "w") as f:
                f.writelines(f"{count} {part.hex()}\n" for part, count in data)
    with open(f"{out}/{folder}/expected.json", "w") as f:
        json.dump({name: words for name, (_, words) in cases.items()}, f, indent=1)


class Runs:
    def __init__(self, f, *args):
        self.call = (f, args)

    def __reduce__(self):
        return self.call


def p4(body):
    return b"\x80\x04" + body + b"."


def short(text):
    raw = text.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


def u64(n):
    return struct.pack("<Q", n)


def laughs(levels):
    """A list of lists of lists …, each twice in the next: tiny, and 2**levels leaves once written out."""
    body = b"(]\x94"  # memo 0
    for i in range(levels):
        body += b"]\x94(" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"e"
    return body + b"t"


deep = 1_000_000
values = {
    "os_system.p0": (pickle.dumps(Runs(os.system, "echo run"), 0), ["system", "refused"]),
    "os_system.p2": (pickle.dumps(Runs(os.system, "echo run"), 2), ["system", "refused"]),
    "os_system.p4": (pickle.dumps(Runs(os.system, "echo run"), 4), ["system", "refused", "byte"]),
    "eval_in_a_dict.p4": (pickle.dumps({"a": [Runs(eval, "1+1")]}, 4), ["builtins", "eval", "refused"]),
    "exec_by_inst.p0": (b"(S'print(1)'\ni__builtin__\nexec\n.", ["exec", "refused"]),
    "call_through_getattr.p4": (
        p4(short("builtins") + short("getattr") + b"\x93" + short("os") + short("system") + b"\x93" + short("x") + b"\x86R"),
        ["os", "system", "refused"],
    ),
    "call_of_a_call.p4": (p4(short("builtins") + short("getattr") + b"\x93)R)R"), ["expects a class by name", "byte"]),
    "unknown_class.p4": (p4(short("my.own.module") + short("Thing") + b"\x93)\x81"), ["my.own.module.Thing", "refused"]),
    "unknown_class.p0": (b"cmy.own\nThing\n.", ["my.own.Thing", "refused"]),
    "extension_registry": (b"\x80\x02\x82\x01.", ["extension registry"]),
    "out_of_band_buffer": (b"\x80\x05\x97.", ["out-of-band buffer"]),
    "persistent_id": (b"\x80\x02U\x01xQ.", ["reference to a storage"]),
    "nested_lists": ([(b"]", deep), (b"a", deep - 1), (b".", 1)], ["levels of nesting"]),
    "nested_marks": ([(b"(", deep), (b"t", deep), (b".", 1)], ["levels of nesting", "byte 1000"]),
    "nested_tuples": ([(b")", 1), (b"\x85", deep), (b".", 1)], ["levels of nesting"]),
    "billion_laughs": (p4(laughs(200)), ["once shared parts are written out"]),
    "million_laughs": (p4(laughs(19)), ["once shared parts are written out"]),
    "long_string_many_times": (
        [(b"\x80\x04(X" + struct.pack("<I", 1 << 20), 1), (b"a", 1 << 20), (b"\x94", 1), (b"h\x00", 20_000), (b"t.", 1)],
        ["once shared parts are written out"],
    ),
    "copies_of_one_string": (
        [
            (b"\x80\x04" + short("_codecs") + short("encode") + b"\x93\x94X" + struct.pack("<I", 10_000), 1),
            (b"a", 10_000),
            (b"\x94" + short("latin1") + b"\x86\x94(", 1),
            (b"h\x00h\x02R", 50_000),
            (b"t\x87.", 1),
        ],
        ["bytes of copied text"],
    ),
    "memo_slot_far_away": (b"\x80\x02Nr\xff\xff\xff\xffj\xfe\xff\xff\xff.", ["memo slot 4294967294"]),
    "memo_slot_of_text": (b"Np99999999999999999999\n.", ["malformed memo slot"]),
    "memo_slot_empty": (b"\x80\x02h\x07.", ["memo slot 7", "byte 2"]),
    "contains_itself": (p4(b"]\x94h\x00a"), ["contains itself"]),
    "contains_itself_in_a_dict": (p4(b"}\x94" + short("k") + b"h\x00s"), ["contains itself"]),
    "string_of_2_63_bytes": (p4(b"\x8d" + u64(1 << 63) + b"abc"), ["cut short at byte 2"]),
    "bytes_of_2_64_bytes": (p4(b"\x8e" + u64((1 << 64) - 1) + b"abc"), ["cut short at byte 2"]),
    "bytearray_of_2_63_bytes": (b"\x80\x05\x96" + u64(1 << 63) + b"abc.", ["cut short at byte 2"]),
    "string_of_4_gib": (b"\x80\x02X\xff\xff\xff\xffabc.", ["cut short at byte 2"]),
    "integer_of_4_gib": (b"\x80\x02\x8b\xff\xff\xff\xffabc.", ["cut short at byte 2"]),
    "integer_of_a_megabyte": (
        [(b"\x80\x02\x8b" + struct.pack("<I", 1 << 20), 1), (b"\x01", 1 << 20), (b".", 1)],
        ["bytes of an integer"],
    ),
    "integer_of_a_million_digits": ([(b"L", 1), (b"9", deep), (b"L\n.", 1)], ["digits of an integer"]),
    "frame_of_2_63_bytes": (b"\x80\x04\x95" + u64(1 << 63) + b"N.", ["cut short at byte 2"]),
    "duplicate_key": (p4(b"}(" + short("a") + b"K\x01" + short("a") + b"K\x02u"), ["'a' occurs twice"]),
    "duplicate_key_true_and_one": (p4(b"}(K\x01K\x01\x88K\x02u"), ["occurs twice"]),
    "duplicate_in_a_set": (p4(b"\x8f(K\x01K\x01\x90"), ["occurs twice"]),
    "list_as_a_key": (p4(b"}]K\x01s"), ["a key that cannot be one"]),
    "odd_number_of_items": (p4(b"}(K\x01u"), ["pairs"]),
    "append_to_a_dict": (p4(b"}K\x01a"), ["a list to append to"]),
    "set_item_of_an_int": (p4(b"K\x01K\x01K\x01s"), ["a dict to set items of"]),
    "build_of_a_list": (p4(b"]}b"), ["an object to give a state to"]),
    "pop_below_a_mark": (p4(b"K\x01(\x85"), ["not there"]),
    "empty_stack": (b"\x80\x04.", ["not there"]),
    "no_mark": (b"\x80\x04K\x01t.", ["an open mark"]),
    "lone_surrogate": (p4(b"\x8c\x03\xed\xa0\x80"), ["not valid Unicode"]),
    "lone_surrogate.p0": (b"V\\ud800\n.", ["not valid Unicode"]),
    "not_utf8": (p4(b"\x8c\x01\xff"), ["not valid Unicode"]),
    "protocol_6": (b"\x80\x06N.", ["protocol 6"]),
    "unknown_instruction": (b"\x80\x04\xff.", ["0xff", "byte 2"]),
    "nothing": (b"", ["cut short at byte 0"]),
    "text": (b"hello", ["memo slot 101"]),
    "size_of_strings": (p4(short("torch") + short("Size") + b"\x93" + short("x") + b"\x85\x85R"), ["torch.Size"]),
    "quantised_dtype": (p4(short("torch") + short("qint8") + b"\x93"), ["torch.qint8"]),
    "bytes_of_beyond_latin1": (
        p4(short("_codecs") + short("encode") + b"\x93" + short("\u20ac") + short("latin1") + b"\x86R"),
        ["arguments"],
    ),
}
write("values", values)


# Stand-ins for torch's classes; pickle writes only their names.
def module(name):
    m = types.ModuleType(name)
    sys.modules[name] = m
    return m


def cls(mod, name, **attrs):
    c = type(name, (), {"__module__": mod, **attrs})
    setattr(sys.modules[mod], name, c)
    return c


META, FS = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
for name in ("torch", "torch.serialization", META, FS):
    module(name)
Metadata, Tensor, Bytes, Chunk, Index, StorageMeta = (
    cls(META, n)
    for n in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta")
)
Properties = cls(META, "TensorProperties", __getstate__=lambda s: s.values)
Info = cls(FS, "_StorageInfo")
Format = enum.Enum("_MEM_FORMAT_ENCODING", {"TORCH_CONTIGUOUS_FORMAT": 0}, module=META)
sys.modules[META]._MEM_FORMAT_ENCODING = Format


class Size(tuple):
    def __reduce__(self):
        return (Size, (tuple(self),))


Size.__module__, Size.__qualname__ = "torch", "Size"
sys.modules["torch"].Size = Size


def _get_layout(name):
    pass


_get_layout.__module__, _get_layout.__qualname__ = "torch.serialization", "_get_layout"
sys.modules["torch.serialization"]._get_layout = _get_layout


class Global:
    """Pickled as a bare name in torch."""

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return self.name


def dtype(name):
    d = Global(name)
    setattr(sys.modules["torch"], name, d)
    d.__module__ = "torch"
    return d


float32, qint8 = dtype("float32"), dtype("qint8")


def make(c, **fields):
    obj = c()
    obj.__dict__.update(fields)
    return obj


def properties(dtype=float32, layout="torch.strided", values=5):
    state = (dtype, Runs(_get_layout, layout), False, Format(0), False, (1,), 1)[:values]
    return make(Properties, values=state)


def chunk(offsets, sizes):
    return make(Chunk, offsets=Size(offsets), sizes=Size(sizes))


def tensor(size, *chunks, **kw):
    return make(Tensor, properties=properties(**kw), size=Size(size), chunks=[chunk(*c) for c in chunks])


def index(fqn, offset=None, index=None):
    fields = dict(fqn=fqn, index=index)
    if offset is not None:
        fields["offset"] = Size(offset)
    return make(Index, **fields)


def info(path="__0_0.distcp", offset=0, length=100, **more):
    return make(Info, relative_path=path, offset=offset, length=length, **more)


def metadata(entries, storage, planner=None, **more):
    m = make(Metadata, state_dict_metadata=entries, planner_data=planner, storage_data=dict(storage), **more)
    return pickle.dumps(m, 4)


one = {"w": tensor([4, 2], ([0, 0], [4, 2]))}
place = (index("w", [0, 0], 0), info())


def with_path(path):
    return metadata(one, [(index("w", [0, 0], 0), info(path))])


def with_chunks(size, *chunks):
    return metadata({"w": tensor(size, *chunks)}, [(index("w", c[0], i), info(offset=100 * i)) for i, c in enumerate(chunks)])


def renamed(field, data=None):
    """A sound file in which one byte of a field's name has changed, everywhere that it is written."""
    data = data or metadata(
        one, [place], storage_meta=make(StorageMeta, checkpoint_id="x", save_id="s", load_id=None, modules=[])
    )
    assert field.encode() in data
    return data.replace(field.encode(), field[:-1].encode() + b"~")


huge = 1 << 63
good = metadata(one, [place])
cases = {
    "os_system_as_an_extra_field": (metadata(one, [place], hook=Runs(os.system, "echo run")), ["system", "refused"]),
    "os_system_instead": (pickle.dumps(Runs(os.system, "echo run"), 4), ["system", "refused"]),
    "os_system_as_a_path": (metadata(one, [(index("w", [0, 0], 0), info(Runs(os.system, "echo run")))]), ["system"]),
    "eval_as_a_size": (metadata({"w": make(Tensor, properties=properties(), size=Runs(eval, "1"), chunks=[])}, []), ["eval"]),
    "unknown_class_as_a_field": (metadata(one, [place], extra=Runs(shutil.copy, "a", "b")), ["shutil.copy", "refused"]),
    "not_metadata": (pickle.dumps({"state_dict_metadata": {}}, 4), ["expected an instance of `Metadata`", "a dict"]),
    "a_million_lists": ([(b"]", deep), (b"a", deep - 1), (b".", 1)], ["expected an instance of `Metadata`", "a list"]),
    "no_entries": (pickle.dumps(make(Metadata, storage_data={}), 4), ["`state_dict_metadata` is missing"]),
    "path_parent": (with_path("../__0_0.distcp"), ["`w`", "../__0_0.distcp", ".."]),
    "path_parent_inside": (with_path("a/../../b"), ["`w`", "stay inside"]),
    "path_parent_of_windows": (with_path("a\\..\\..\\b"), ["`w`", "stay inside"]),
    "path_absolute": (with_path("/etc/passwd"), ["/etc/passwd", "absolute"]),
    "path_drive": (with_path("C:\\x"), ["drive"]),
    "path_nul": (with_path("a\0b"), ["NUL"]),
    "path_empty": (with_path(""), ["empty"]),
    "path_folder": (with_path("."), ["folder"]),
    "path_not_text": (with_path(7), ["`relative_path`", "the int 7"]),
    "chunk_outside": (with_chunks([4, 2], ([0, 0], [4, 2]), ([4, 0], [1, 2])), ["`w`", "chunk 1"]),
    "chunk_outside_by_size": (with_chunks([4, 2], ([0, 0], [4, 3])), ["`w`", "chunk 0"]),
    "chunk_of_other_rank": (with_chunks([4, 2], ([0], [4])), ["`w`", "chunk 0"]),
    "chunk_ranks_disagree": (metadata({"w": tensor([4, 2], ([0, 0], [4]))}, [place]), ["`w`", "chunk 0"]),
    "chunk_negative": (with_chunks([4, 2], ([-1, 0], [4, 2])), ["`w`", "chunk 0", "negative"]),
    "chunk_past_64_bits": (with_chunks([4, 2], ([huge, 0], [huge, 2])), ["`w`", "chunk 0"]),
    "chunk_end_past_64_bits": (with_chunks([huge - 1, 2], ([huge - 1, 0], [huge - 1, 2])), ["`w`"]),
    "chunk_of_text": (with_chunks([4, 2], (["a", "b"], [4, 2])), ["`w`", "chunk 0", "`offsets`"]),
    "chunk_without_sizes": (
        metadata({"w": make(Tensor, properties=properties(), size=Size([4]), chunks=[make(Chunk, offsets=Size([0]))])}, []),
        ["`sizes` is missing"],
    ),
    "chunk_is_an_int": (
        metadata({"w": make(Tensor, properties=properties(), size=Size([4]), chunks=[3])}, []),
        ["chunk 0", "the int 3"],
    ),
    "shape_past_64_bits": (with_chunks([huge // 2, 8], ([0, 0], [1, 1])), ["`w`", "shape"]),
    "shape_missing": (metadata({"w": make(Tensor, properties=properties(), chunks=[])}, []), ["`size` is missing"]),
    "storage_missing": (metadata(one, []), ["`w`", "no storage info", "[0, 0]"]),
    "storage_missing_for_one_chunk": (
        metadata({"w": tensor([4], ([0], [2]), ([2], [2]))}, [(index("w", [0], 0), info())]),
        ["`w`", "no storage info", "[2]"],
    ),
    "storage_missing_for_a_value": (metadata({"v": make(Bytes)}, []), ["`v`", "no storage info", "value"]),
    "storage_of_a_value_has_an_offset": (
        metadata({"v": make(Bytes)}, [(index("v", [0], 0), info())]),
        ["`v`", "no storage info"],
    ),
    "storage_twice": (
        pickle.dumps(
            make(
                Metadata,
                state_dict_metadata=one,
                planner_data=None,
                storage_data={index("w", [0, 0], 0): info(), index("w", [0, 0], 0): info("b")},
            ),
            4,
        ),
        ["`w`", "two storage infos"],
    ),
    "storage_end_past_64_bits": (
        metadata(one, [(index("w", [0, 0], 0), info(offset=(1 << 64) - 1, length=2))]),
        ["`w`", "cannot be 2 bytes long"],
    ),
    "storage_offset_past_64_bits": (metadata(one, [(index("w", [0, 0], 0), info(offset=1 << 64))]), ["`offset`", "2^64"]),
    "storage_length_negative": (metadata(one, [(index("w", [0, 0], 0), info(length=-1))]), ["`length`", "-1"]),
    "storage_length_float": (metadata(one, [(index("w", [0, 0], 0), info(length=1.5))]), ["`length`", "a float"]),
    "storage_is_a_dict": (metadata(one, [(index("w", [0, 0], 0), {"relative_path": "a"})]), ["`_StorageInfo`", "a dict"]),
    "storage_key_is_a_string": (metadata(one, [("w", info())]), ["`MetadataIndex`", "a str"]),
    "transforms_not_text": (metadata(one, [(index("w", [0, 0], 0), info(transform_descriptors=[1]))]), ["transform_descriptors"]),
    "key_is_an_int": (metadata({1: tensor([1], ([0], [1]))}, []), ["key of `state_dict_metadata`", "the int 1"]),
    "entry_is_a_string": (metadata({"w": "tensor"}, []), ["`w`", "a str"]),
    "dtype_quantised": (metadata({"w": tensor([1], ([0], [1]), dtype=qint8)}, []), ["`w`"]),
    "layout_sparse": (metadata({"w": tensor([1], ([0], [1]), layout="torch.sparse_coo")}, []), ["`w`"]),
    "properties_of_four": (metadata({"w": tensor([1], ([0], [1]), values=4)}, []), ["`w`", "`properties`"]),
    "properties_of_seven": (metadata({"w": tensor([1], ([0], [1]), values=7)}, []), ["`w`", "`properties`"]),
    "planner_path_of_floats": (metadata(one, [place], planner={"w": (1.5,)}), ["`w`", "a float", "position 0"]),
    "planner_path_is_a_string": (metadata(one, [place], planner={"w": "w"}), ["`w`", "a tuple"]),
    "version_is_an_int": (metadata(one, [place], version=1), ["`version`"]),
    "storage_meta_is_a_string": (metadata(one, [place], storage_meta="x"), ["`storage_meta`"]),
    **{
        f"no_{field}": (renamed(field), [f"`{field}` is missing"])
        for field in (
            "state_dict_metadata",
            "planner_data",
            "storage_data",
            "properties",
            "chunks",
            "offsets",
            "sizes",
            "fqn",
            "relative_path",
            "length",
            "checkpoint_id",
            "save_id",
            "load_id",
        )
    },
    "no_relative_path_of_a_value": (
        renamed("relative_path", metadata({"v": make(Bytes)}, [(index("v"), info())])),
        ["`v`", "`relative_path` is missing"],
    ),
    "no_storage_data_of_nothing": (
        pickle.dumps(make(Metadata, state_dict_metadata={}, planner_data=None), 4),
        ["`storage_data` is missing"],
    ),
    "no_planner_data_of_nothing": (
        pickle.dumps(make(Metadata, state_dict_metadata={}, storage_data={}), 4),
        ["`planner_data` is missing"],
    ),
    "storage_of_a_smaller_chunk_at_the_same_offset": (
        metadata({"w": tensor([4], ([0], [4]), ([0], [2]))}, [(index("w", [0], 0), info())]),
        ["`w`", "no storage info", "[0]"],
    ),
    "duplicate_key": (
        # The second "v" overwrites "w" in the pickle's text, so that both keys are the same.
        metadata({"v": tensor([1], ([0], [1])), "w": tensor([1], ([0], [1]))}, []).replace(b"\x8c\x01w", b"\x8c\x01v"),
        ["`v` occurs twice"],
    ),
    "duplicate_field": (
        metadata(one, [place], planner={}).replace(b"planner_data", b"storage_data"),
        ["`storage_data` occurs twice"],
    ),
}
write("metadata", cases)
# Sound one by one, but the chunks don't tile their tensor: decoded, and found by the check of coverage.
write(
    "coverage",
    {
        "gap": (with_chunks([6], ([0], [2]), ([4], [2])), ["`w`", "no chunk holds [2:4]"]),
        "no_chunks": (with_chunks([6]), ["`w`", "no chunk holds [0:6]"]),
        "overlap": (with_chunks([6], ([0], [4]), ([2], [4])), ["`w`", "chunks 0 and 1 both hold [2:4]"]),
    },
)

# Sound but unusual: decoded, with the chunks' record offsets (or the value's) by key.
two = {"w": tensor([4], ([0], [2]), ([2], [2]))}
at = lambda offset, hint, start: (index("w", [offset], hint), info(offset=start))
metaclass = Runs(getattr, Format, "TORCH_CONTIGUOUS_FORMAT")
old_enum = make(
    Tensor,
    properties=make(Properties, values=(float32, Runs(_get_layout, "torch.strided"), True, metaclass, False)),
    size=Size([2]),
    chunks=[chunk([0], [2])],
)
folder = f"{out}/odd"
os.makedirs(folder)
odd = {
    "hints_swapped": (metadata(two, [at(0, 1, 10), at(2, 0, 20)]), {"w": [10, 20]}),
    "hints_absent": (metadata(two, [at(2, None, 20), at(0, None, 10)]), {"w": [10, 20]}),
    "hints_out_of_range": (metadata(two, [at(0, 7, 10), at(2, -1, 20)]), {"w": [10, 20]}),
    "empty_chunks_at_one_place": (
        metadata({"w": tensor([2], ([0], [1]), ([1], [1]), ([2], [0]), ([2], [0]))}, [at(0, 0, 10), at(1, 1, 20), at(2, 3, 30)]),
        {"w": [10, 20, 30, 30]},
    ),
    "records_of_unknown_keys": (
        metadata(two, [at(0, 0, 10), at(2, 1, 20), (index("x"), info()), (index("w", [3], 9), info())]),
        {"w": [10, 20]},
    ),
    "enum_by_getattr": (metadata({"w": old_enum}, [at(0, 0, 5)]), {"w": [5]}),
    "strides_as_a_sixth": (metadata({"w": tensor([4], ([0], [4]), values=6)}, [at(0, 0, 5)]), {"w": [5]}),
    "value_with_offset_none": (
        metadata({"v": make(Bytes)}, [(make(Index, fqn="v", offset=None, index=None), info(offset=7))]),
        {"v": [7]},
    ),
    "offset_of_64_bits": (metadata({"v": make(Bytes)}, [(index("v"), info(offset=(1 << 64) - 101))]), {"v": [(1 << 64) - 101]}),
    "nothing_in_it": (metadata({}, []), {}),
    "nothing_in_it_and_storage_none": (
        pickle.dumps(make(Metadata, state_dict_metadata={}, planner_data=None, storage_data=None), 4),
        {},
    ),
    "transforms": (metadata({"v": make(Bytes)}, [(index("v"), info(transform_descriptors=["zstd"]))]), {"v": [0]}),
    "planner_data_of_another_kind": (metadata(two, [at(0, 0, 10), at(2, 1, 20)], planner=["mine", {"a": 1}]), {"w": [10, 20]}),
    "paths_of_keys_not_stored": (
        metadata(two, [at(0, 0, 10), at(2, 1, 20)], planner={"w": ("w",), "gone": ("go", 1)}),
        {"w": [10, 20]},
    ),
    "extra_fields": (
        metadata(
            {
                "w": make(
                    Tensor,
                    properties=properties(),
                    size=Size([2]),
                    note={"of": "tensor"},
                    chunks=[make(Chunk, offsets=Size([0]), sizes=Size([2]), note=("of chunk", 1.5))],
                )
            },
            [(make(Index, fqn="w", index=0, offset=Size([0]), note=b"of index"), info(offset=3, note={"of": [None, "info"]}))],
            note=["of", "metadata"],
            storage_meta=make(StorageMeta, checkpoint_id="x", save_id=None, load_id=None, modules=["m"], note=1 << 80),
        ),
        {"w": [3]},
    ),
}
for protocol in range(6):
    m = make(Metadata, state_dict_metadata=two, planner_data={"w": ("w",)}, storage_data=dict([at(0, 0, 10), at(2, 1, 20)]))
    odd[f"protocol_{protocol}"] = (pickle.dumps(m, protocol), {"w": [10, 20]})
for name, (data, _) in odd.items():
    with open(f"{folder}/{name}", "wb") as f:
        f.write(data)
with open(f"{folder}/expected.json", "w") as f:
    json.dump({name: offsets for name, (_, offsets) in odd.items()}, f, indent=1)
