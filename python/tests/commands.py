"""The command in a process of its own: measured, and on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
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


class Served(NamedTuple):
    """What a server answered by path, how it ended, the most memory that it had, and what it wrote as errors. Without answers it
    never listened."""

    answers: dict[str, tuple[int, str]]
    code: int
    memory: float
    said: str


def served(path, keys=(), seconds: float = 60) -> Served:
    """Serves a checkpoint, asks for its page, for tensors and for its numbers until they are there, and ends the server."""
    command = [sys.executable, "-m", "reshard", "serve", str(path), "--port", "0", "--until-stdin-ends"]
    answers: dict[str, tuple[int, str]] = {}
    with tempfile.TemporaryFile() as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONPATH": PACKAGE})
        stop = threading.Timer(seconds, process.kill)
        stop.start()
        try:
            address = process.stdout.readline().decode().strip()
            if address:
                for page in ["", *(f"api/tensor?key={urllib.parse.quote(key)}" for key in keys)]:
                    answers[page] = _asked(address + page)
                while "api/numbers" not in answers or '"running"' in answers["api/numbers"][1][:40]:
                    answers["api/numbers"] = _asked(address + "api/numbers")
                    time.sleep(0.02)
            memory = _most_memory(process.pid)
        finally:
            process.stdin.close()
            code = process.wait()
            stop.cancel()
            process.stdout.close()
        errors.seek(0)
        return Served(answers, code, memory, errors.read(100_000).decode(errors="replace"))


def _asked(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _most_memory(process: int) -> float:
    """The most memory that a process has had, as far as it still runs."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    return next((1024.0 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0.0)


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
