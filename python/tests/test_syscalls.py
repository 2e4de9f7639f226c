"""Faults by system call: every verb that writes, with old state in place, stopped or failed at its single system calls by strace.

What the fault store does to the engine's own operations (`matrix.rs`) the kernel does here to a real process on a real disk, for the
verbs of the command; `test_syscalls_saving.py` does the same for the calls that save. Without strace these tests are skipped.
`RESHARD_CAMPAIGN=1` (`make test-faults`) tries every call; else one or two of each.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

import reshard
import reshard.torch as rt

PACKAGE = str(pathlib.Path(reshard.__file__).parent.parent)
CAMPAIGN = "RESHARD_CAMPAIGN" in os.environ
#: What changes a disk. Opening is there too: a file that cannot be created or read is the commonest fault of all.
CALLS = "openat mkdir mkdirat pwrite64 pwritev fallocate ftruncate fsync fdatasync rename renameat renameat2 link linkat unlink unlinkat"
FAULTS = ("error=EIO", "error=ENOSPC", "signal=KILL") if CAMPAIGN else ("error=EIO", "signal=KILL")


def strace_works():
    if shutil.which("strace") is None:
        return False
    probe = ["strace", "-f", "-o", "/dev/null", "-e", "inject=fsync:error=EIO", "true"]
    return subprocess.run(probe, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not strace_works(), reason="strace is not there, or may not trace")


def environment():
    return {**os.environ, "PYTHONPATH": PACKAGE, "RESHARD_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def traced(command, inject=None, log=os.devnull):
    """Runs a command under strace; one thread makes its calls come in the same order every time, nearly."""
    which = CALLS.replace(" ", ",") if inject is None else inject
    options = ["-e", f"trace={which}"] if inject is None else ["-e", f"trace={inject.split(':')[0]}", "-e", f"inject={inject}"]
    whole = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", str(log), *options, *map(str, command)]
    return subprocess.run(whole, capture_output=True, text=True, env=environment(), timeout=120)


def calls_of(command, log, below):
    """How often a command makes each call; see :func:`counted_calls`."""
    traced(command, log=log)
    return counted_calls(log.read_text(), below)


def counted_calls(text, below):
    """How often a thread makes each call, up to its last one that concerns the folder: calls before are the interpreter's own."""
    made, last = {}, {}
    for line in text.splitlines():
        found = re.match(r"(\d+) +(\w+)\((.*)", line)
        if found is None:
            continue
        thread, name, rest = found.groups()
        made[thread, name] = made.get((thread, name), 0) + 1
        if str(below) in rest or not rest.startswith(("AT_FDCWD", '"')):
            first, _ = last.get(name, (made[thread, name], 0))
            last[name] = (min(first, made[thread, name]), max(last.get(name, (0, 0))[1], made[thread, name]))
    return last


def command(*arguments):
    return [sys.executable, "-m", "reshard", *arguments]


def content(path):
    """What lies at a path, every checksum compared; None where nothing does."""
    try:
        return reshard.digest(path)
    except (reshard.NotFound, reshard.Incomplete):
        return None


def old_or_new(path, before, after):
    found = content(path)
    return found in (before, after), found


WRITERS = {
    "convert": lambda base: command("convert", base / "two", base / "out", "--to", "dcp", "--overwrite"),
    "relayout": lambda base: command("relayout", base / "two", base / "out", "--mesh", "2", "--overwrite"),
    "merge": lambda base: command("merge", base / "two", base / "two", "--output", base / "out", "--overwrite"),
    "edit": lambda base: command("edit", base / "two", base / "fresh", "--set", "n=3"),
    "safetensors": lambda base: command("convert", base / "two", base / "model", "--to", "safetensors", "--overwrite"),
    "torch": lambda base: command("convert", base / "two", base / "m.pt", "--overwrite"),
    "recover": lambda base: command("recover", base / "lost"),
    "compressed": lambda base: command("convert", base / "two", base / "out", "--to", "dcp", "--compress", "zstd", "--overwrite"),
    "hugging_face": lambda base: command(
        "convert", base / "two", base / "hub", "--to", "huggingface", "--max-shard-size", "8kB", "--overwrite"
    ),
    "universal": lambda base: command("convert", base / "run2", base / "ds", "--to", "deepspeed-universal", "--overwrite"),
    "megatron": lambda base: command("convert", base / "run2", base / "megatron", "--to", "megatron", "--overwrite"),
}
OUTPUTS = {"safetensors": "model", "torch": "m.pt", "edit": "fresh", "recover": "lost", "hugging_face": "hub", "universal": "ds"}
OUTPUTS |= {"megatron": "megatron"}


def trained(step):
    """What a trainer goes on from."""
    state = {"w": {"step": torch.tensor(float(step)), "exp_avg": torch.full((3000,), step / 2), "exp_avg_sq": torch.ones(3000)}}
    groups = [{"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": ["w"]}]
    return {"model": {"w": torch.full((3000,), float(step))}, "optim": {"state": state, "param_groups": groups}}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    base = tmp_path_factory.mktemp("prepared") / "base"
    base.mkdir()
    rt.save({"w": torch.full((3000,), 1.0), "v": torch.full((2000,), 1.0), "n": 1}, base / "out")
    rt.save({"w": torch.full((3000,), 2.0), "v": torch.full((2000,), 2.0), "n": 2}, base / "two")
    for step in (1, 2):
        rt.save(trained(step), base / f"run{step}")
    reshard.convert(base / "run1", base / "ds", to="deepspeed-universal")
    reshard.convert(base / "run1", base / "megatron", to="megatron")
    reshard.convert(base / "out", base / "hub", to="huggingface", max_shard_size=8000)
    reshard.convert(base / "out", base / "model", to="safetensors")
    reshard.convert(base / "out", base / "m.pt")
    rt.save({"w": torch.full((3000,), 2.0), "n": 2}, base / "lost")
    (base / "lost" / ".metadata").unlink()
    return base


def chosen(first, last):
    """Which of a thread's calls to fail."""
    every = list(range(first, last + 1))
    return every if CAMPAIGN else sorted({every[0], every[-1]})


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_is_old_or_new_whatever_the_kernel_says(name, prepared, tmp_path):
    def fresh():
        base = tmp_path / "base"
        shutil.rmtree(base, ignore_errors=True)
        shutil.copytree(prepared, base)
        return base

    base = fresh()
    path = base / OUTPUTS.get(name, "out")
    before = content(path)
    counted = calls_of(WRITERS[name](base), tmp_path / "log", base)
    after = content(path)
    assert after is not None and after != before and sum(last - first + 1 for first, last in counted.values()) > 5, counted
    failed = done = 0
    for call, (first, last) in counted.items():
        for fault in FAULTS:
            if fault == "error=ENOSPC" and call not in ("pwrite64", "pwritev", "openat", "fallocate"):
                continue
            for number in chosen(first, last):
                base = fresh()
                inject = f"{call}:{fault}:when={number}"
                result = traced(WRITERS[name](base), inject)
                fine, found = old_or_new(path, before, after)
                assert fine, f"{name}, {inject}: neither old nor new: {found}\n{result.stderr}"
                assert result.returncode != 0 or found == after, f"{name}, {inject}: it ended well, and the old is there"
                assert "panicked" not in result.stderr, result.stderr
                failed, done = failed + (found != after), done + (found == after)
                # Whatever it left, running it again repairs it.
                if found != after and name != "edit":
                    again = subprocess.run([*map(str, WRITERS[name](base))], capture_output=True, text=True, env=environment())
                    assert again.returncode == 0 and content(path) == after, f"{name}, {inject}: again: {again.stderr}"
    assert failed and done, f"both outcomes are seen: {failed} and {done}"


def test_prune_never_costs_the_newest_step_whatever_the_kernel_says(tmp_path):
    prepared = tmp_path / "prepared"
    for step in (1, 2, 3):
        rt.save({"w": torch.full((300,), float(step)), "n": step}, prepared / f"step-{step}")
    (prepared / "step-1" / "notes.txt").write_text("mine")
    newest = content(prepared / "step-3")

    def fresh():
        root = tmp_path / "root"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(prepared, root)
        return root

    prune = command("prune", tmp_path / "root", "--keep-last", "1", "--grace", "0s")
    counted = calls_of(prune, tmp_path / "log", fresh())
    assert not (tmp_path / "root" / "step-2").exists()
    for call, (first, last) in counted.items():
        for fault in ("error=EIO", "signal=KILL"):
            for number in chosen(first, last):
                root = fresh()
                result = traced(prune, f"{call}:{fault}:when={number}")
                assert content(root / "step-3") == newest, f"{call}:{fault}:when={number}: {result.stderr}"
                assert (root / "step-1" / "notes.txt").read_text() == "mine"
                # A step that is half removed is no step; one that is there is whole.
                for _, step in reshard.steps(root):
                    assert reshard.verify(root / step).sound


READERS = {
    "verify": lambda base: command("verify", base / "out"),
    "digest": lambda base: command("digest", base / "out"),
    "diff": lambda base: command("diff", base / "out", base / "same"),
    "show": lambda base: command("show", base / "out", "w"),
    "ls": lambda base: command("ls", base / "out"),
    "inspect": lambda base: command("inspect", base / "out"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_that_could_not_read_says_so(name, prepared, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(prepared, base)
    shutil.copytree(base / "out", base / "same")
    log = tmp_path / "log"
    # How the engine opens files below a folder, and reads them; the loader of programs reads so too, and its failure is one.
    reads = ("openat2", "pread64", "preadv", "preadv2")
    traced(READERS[name](base), f"{','.join(reads)}:delay_enter=0", log=log)
    plain = subprocess.run([*map(str, READERS[name](base))], capture_output=True, text=True, env=environment())
    assert plain.returncode == 0, plain.stderr
    made, mine = {}, []
    for thread, call in re.findall(r"^(\d+) +(\w+)\(", log.read_text(), re.M):
        if call in reads:
            made[thread, call] = made.get((thread, call), 0) + 1
            mine.append((call, made[thread, call]))
    assert any(call == "openat2" for call, _ in mine), mine
    for call, number in dict.fromkeys(mine if CAMPAIGN else mine[:: max(1, len(mine) // 8)]):
        result = traced(READERS[name](base), f"{call}:error=EIO:when={number}")
        said = f"{call} {number}: exit {result.returncode}\n{result.stdout}\n{result.stderr}"
        # Another thread may have met it, or nothing was lost by it: then what is said is what is said without it.
        fine = result.returncode != 0 or re.sub(r"[\d.]+ m?s", "", result.stdout) == re.sub(r"[\d.]+ m?s", "", plain.stdout)
        assert fine and "panicked" not in result.stderr, said
