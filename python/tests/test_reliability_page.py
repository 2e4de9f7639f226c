"""The page on reliability names tests: each of them exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_named_test_exists():
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+\.(?:rs|py))::(\w+)(…?)`", page)
    assert len(named) > 40, named
    for file, name, more in named:
        folders = [ROOT / "crates" / "reshard" / "tests" / "it", ROOT / "python" / "tests"]
        path = next((folder / file for folder in folders if (folder / file).is_file()), None)
        assert path is not None, f"{file} does not exist"
        # A function, or a line of a table of tests that a macro makes functions of.
        rest = r"\w*" if more else ""
        pattern = rf"(?:def|fn) {name}{rest}\(|^    {name}{rest}: "
        assert re.search(pattern, path.read_text(encoding="utf-8"), re.M), f"{file} has no test {name}{more}"


def test_every_path_that_is_named_exists():
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:crates|python|scripts)/[\w/.]+)`", page):
        assert (ROOT / path).exists(), path
