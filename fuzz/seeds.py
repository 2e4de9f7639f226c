"""Collects small inputs for every fuzz target from the fixtures of crates/formats: `python fuzz/seeds.py`."""

import json
import shutil
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent
TESTS = ROOT.parent / "crates/formats/tests"
LARGEST = 20_000


def put(target, name, data):
    folder = ROOT / "seeds" / target
    folder.mkdir(parents=True, exist_ok=True)
    if len(data) <= LARGEST:
        (folder / name).write_bytes(data)


def main():
    shutil.rmtree(ROOT / "seeds", ignore_errors=True)
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
