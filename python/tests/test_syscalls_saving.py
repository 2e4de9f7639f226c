"""Faults by system call, for every call of the package that saves: failed or killed at its single system calls by strace.

Importing torch under strace takes longer than all the rest, so a process that has imported it forks the one that saves, and strace
takes hold of that one before it begins. Without strace these tests are skipped. `RESHARD_CAMPAIGN=1` (`make test-faults`) tries
every call of each kind; else the first and the last.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from test_syscalls import CAMPAIGN, FAULTS, PACKAGE, chosen, content, counted_calls, environment, strace_works

import reshard

pytestmark = pytest.mark.skipif(not strace_works(), reason="strace is not there, or may not trace")

CALLS = "mkdir mkdirat pwrite64 pwritev fallocate ftruncate fsync fdatasync rename renameat renameat2 link linkat unlink unlinkat openat2"

#: Forks a process for each line that it reads, and says how it ended. It must not use the engine itself before it forks.
SERVER = """
    import json, os, signal, sys
    import torch
    import torch.distributed.checkpoint as dcp
    import reshard.torch as rt
    import reshard.torch.checkpoint as drop_in

    def state(number):
        return {"w": torch.full((3000,), float(number)), "n": number}

    def checkpointer(path, number):
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, float(number))
        torch.nn.init.zeros_(model.bias)
        with rt.Checkpointer(path, model=model, signals=(), keep_last=1) as run:
            run.save(number)

    WAYS = {
        "save": lambda path, number: rt.save(state(number), path, overwrite=True),
        "async_save": lambda path, number: rt.async_save(state(number), path, overwrite=True).result(),
        "storage_writer": lambda path, number: dcp.save(state(number), storage_writer=rt.StorageWriter(path)),
        "drop_in": lambda path, number: drop_in.save(state(number), checkpoint_id=path),
        "checkpointer": checkpointer,
    }
    print("ready", flush=True)
    for line in sys.stdin:
        way, path, number = json.loads(line)
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            status = 1
            try:
                WAYS[way](path, number)
                status = 0
            except Exception as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(status)
        os.waitpid(child, os.WUNTRACED)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Server:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment(), "PYTHONPATH": PACKAGE},
        )
        assert self.process.stdout.readline() == "ready\n"

    def run(self, way, path, number, options, log=os.devnull):
        """How a save under strace ended: its exit code, or minus the signal that ended it."""
        self.process.stdin.write(json.dumps([way, str(path), number]) + "\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        tracer = subprocess.Popen(
            ["strace", "-f", "-qq", "-o", str(log), *options, "-p", str(child)], stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 30
        while "TracerPid:\t0\n" in pathlib.Path(f"/proc/{child}/status").read_text():
            assert tracer.poll() is None and time.monotonic() < deadline, tracer.stderr.read()
            time.sleep(0.002)
        os.kill(child, signal.SIGCONT)
        ended = int(self.process.stdout.readline())
        tracer.wait(30)
        return ended

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(30) == 0


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


def found_at(way, path):
    """What whoever resumes finds."""
    if way != "checkpointer":
        return content(path)
    newest = reshard.latest(path)
    return None if newest is None else content(newest)


@pytest.mark.parametrize("way", ["save", "async_save", "storage_writer", "drop_in", "checkpointer"])
def test_a_save_is_old_or_new_whatever_the_kernel_says(way, server, tmp_path):
    prepared, path = tmp_path / "prepared", tmp_path / "path"
    assert server.run(way, prepared, 1, ["-e", "trace=none"]) == 0
    before = found_at(way, prepared)

    def fresh():
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(prepared, path)

    fresh()
    log = tmp_path / "log"
    assert server.run(way, path, 2, ["-e", f"trace={CALLS.replace(' ', ',')}"], log) == 0
    after = found_at(way, path)
    counted = counted_calls(log.read_text(), path)
    assert before is not None and after is not None and after != before, (before, after)
    assert {"fsync", "unlinkat"} <= counted.keys() and any("rename" in call for call in counted), counted
    failed = done = 0
    for call, (first, last) in counted.items():
        for fault in FAULTS:
            if fault == "error=ENOSPC" and call not in ("pwrite64", "pwritev", "openat2", "fallocate"):
                continue
            for number in chosen(first, last):
                fresh()
                inject = f"{call}:{fault}:when={number}"
                ended = server.run(way, path, 2, ["-e", f"trace={call}", "-e", f"inject={inject}"])
                found = found_at(way, path)
                assert found in (before, after), f"{way}, {inject}: neither old nor new: {found}"
                assert ended != 0 or found == after, f"{way}, {inject}: it returned, and the old is there"
                failed, done = failed + (found != after), done + (found == after)
                if found != after and (CAMPAIGN or number == last):
                    assert server.run(way, path, 2, ["-e", "trace=none"]) == 0
                    assert found_at(way, path) == after, f"{way}, {inject}: saving again does not repair it"
    assert failed and done, f"both outcomes are seen: {failed} and {done}"
    print(f"{way}: {failed} old, {done} new")
