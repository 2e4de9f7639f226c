"""The project's own compiled programs: the command line, benchmarks and examples, built in release mode before timing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Missing(Exception):
    """A program is not there, and why."""


_BUILD = {
    "reshard": (["build", "--release", "-p", "reshard-cli", "--features", "reshard-cli/cloud"], "reshard"),
    "bars": (["bench", "--no-run", "-p", "reshard", "--bench", "bars"], "deps/bars-*"),
    "layout": (["bench", "--no-run", "-p", "reshard-layout", "--bench", "layout"], "deps/layout-*"),
    "metadata_scale": (["build", "--release", "-p", "reshard-formats", "--example", "metadata_scale"], "examples/metadata_scale"),
    "s3_server": (["build", "--release", "-p", "reshard-storage", "--example", "s3_server"], "examples/s3_server"),
}

_found: dict[str, Path] = {}


def program(name: str, build: bool = True) -> Path:
    """Where a program is, built if need be. RESHARD_BENCH_<NAME> names another one to use."""
    given = os.environ.get(f"RESHARD_BENCH_{name.upper()}")
    if given:
        return Path(given)
    if name not in _found:
        _found[name] = _build(name) if build else _look(name)
    return _found[name]


def _build(name: str) -> Path:
    cargo = os.environ.get("CARGO", "cargo")
    if not shutil.which(cargo):
        raise Missing(f"{name} is not built and cargo is not installed")
    arguments, _ = _BUILD[name]
    done = subprocess.run([cargo, *arguments, "--message-format=json"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise Missing(f"{name} does not build: {done.stderr.strip().splitlines()[-1:]}")
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message.get("executable") and message["target"]["name"] == name:
            return Path(message["executable"])
    raise Missing(f"cargo built {name} and did not say where")


def _look(name: str) -> Path:
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    found = [path for path in target.glob(_BUILD[name][1]) if os.access(path, os.X_OK) and path.suffix == ""]
    if not found:
        raise Missing(f"{name} is not built (and --no-build was given)")
    return max(found, key=lambda path: path.stat().st_mtime)


def needs(groups: list[int]) -> list[str]:
    """The programs that these groups run."""
    of = {3: ["metadata_scale", "reshard"], 4: ["bars", "layout"], 9: ["reshard"], 10: ["s3_server"]}
    return list(dict.fromkeys(name for group in groups for name in of.get(group, [])))
