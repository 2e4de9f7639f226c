"""The command in a process of its own: measured, and on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import reshard

#: Where the package lies that is tested.
PACKAGE = str(Path(reshard.__file__).parents[1])

_MEASURED = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, flush=True)
sys.stdout.buffer.write(done.stderr[:100_000])
"""


class Measured(NamedTuple):
    """How the command ended, how long it took, the most memory that it had, and what it wrote as errors."""

    code: int
    seconds: float
    memory: float
    said: str


def measured(*arguments) -> Measured:
    command = [sys.executable, "-c", _MEASURED, sys.executable, "-m", "reshard", *map(str, arguments)]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "PYTHONPATH": PACKAGE}, timeout=600)
    first, _, rest = done.stdout.partition(b"\n")
    code, memory = first.split()
    return Measured(int(code), time.monotonic() - start, float(memory), rest.decode(errors="replace"))


def on_terminal(process: subprocess.Popen, ours: int, theirs: int) -> str:
    """All that a process writes to the other side of a terminal, until it has ended well."""
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert process.wait() == 0, seen
    return seen.decode()
