"""Collects small inputs for every fuzz target from the fixtures of crates/formats and crates/reshard: `python fuzz/seeds.py`."""

import json
import shutil
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent
TESTS = ROOT.parent / "crates/formats/tests"
LARGEST = 20_000


def put(target, name, data, largest=LARGEST):
    folder = ROOT / "seeds" / target
    folder.mkdir(parents=True, exist_ok=True)
    if len(data) <= largest:
        (folder / name).write_bytes(data)


def folder_input(folder):
    """A folder as the target `folder` takes it: of torch.save files the pickle and the sizes of storages."""
    data = b""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        name, sizes = path.relative_to(folder).as_posix().encode(), []
        body = path.read_bytes()
        if path.suffix in (".pt", ".bin"):
            with zipfile.ZipFile(path) as archive:
                entries = {entry.filename.split("/", 1)[1]: entry for entry in archive.infolist()}
                body = archive.read(entries["data.pkl"])
                while f"data/{len(sizes)}" in entries:
                    sizes.append(entries[f"data/{len(sizes)}"].file_size)
        data += bytes([len(name)]) + name + len(body).to_bytes(4, "little") + body
        data += bytes([len(sizes)]) + b"".join(min(size, 4096).to_bytes(2, "little") for size in sizes)
    return data


def main():
    # Those of `compressed` and `rules` are written by hand.
    for target in ("edit_note", "folder", "index", "metadata", "notes", "pickle", "record", "safetensors", "sidecar"):
        shutil.rmtree(ROOT / "seeds" / target, ignore_errors=True)
    for path in sorted(TESTS.glob("records/*/*.pt")):
        name = f"{path.parent.name}-{path.stem}"
        put("record", name, path.read_bytes())
        if zipfile.is_zipfile(path) and path.parent.name != "plain":
            try:
                with zipfile.ZipFile(path) as archive:
                    for entry in archive.namelist():
                        if entry.endswith("/data.pkl"):
                            put("pickle", name, archive.read(entry))
            except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError):
                pass  # a hostile archive, which Python's reader refuses as well
    for path in sorted(TESTS.glob("corpus/*/*/checkpoint/.metadata")):
        case = path.parent.parent
        put("metadata", f"{case.parent.name}-{case.name}", path.read_bytes())
    for path in sorted(TESTS.rglob("safetensors/**/*.safetensors")):
        put("safetensors", f"{path.parent.name}-{path.stem}", path.read_bytes())
    for path in sorted(TESTS.rglob("safetensors/**/*.index.json")):
        put("safetensors", f"{path.parent.name}-index", path.read_bytes())
    for path in sorted((ROOT.parent / "crates/reshard/tests/foreign").glob("*/*/checkpoint")):
        put("folder", f"{path.parent.parent.name}-{path.parent.name}", folder_input(path), largest=140_000)
    own = TESTS / "own"
    for target, name in (("sidecar", "first.sums"), ("edit_note", "edited.edit")):
        data = (own / name).read_bytes()
        put(target, name, data)
        put(target, f"{name}-body", data[8:-8])
    data = (own / "first.distcp").read_bytes()
    put("index", "first.distcp", data)
    put("index", "first.distcp-body", data[-24 - int.from_bytes(data[-24:-16], "little") : -24])
    header = (own / "notes.safetensors").read_bytes()
    header = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    for name, text in header["__metadata__"].items():
        put("notes", name, text.encode())
    for path in sorted(TESTS.glob("pickles/hostile/*/*")):
        if path.is_file() and path.suffix not in (".json", ".runs"):
            target = "pickle" if path.parent.name == "values" else "metadata"
            put(target, f"{path.parent.name}-{path.name}", path.read_bytes())


if __name__ == "__main__":
    main()
