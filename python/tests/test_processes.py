"""Several processes at one path: a lock between them, kills at any moment, and a checkpoint that is always whole."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import reshard
import reshard.torch as rt

PACKAGE = str(pathlib.Path(reshard.__file__).parent.parent)
WRITERS = 4


def start(program, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": PACKAGE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def number_at(path):
    """Which writer's checkpoint lies at a path, every byte of it."""
    with reshard.open(path) as checkpoint:
        number = checkpoint["number"]
        assert (checkpoint["w"].numpy() == number).all() and (checkpoint["v"].numpy() == number).all()
    return number


@pytest.fixture
def sources(tmp_path):
    for number in range(WRITERS):
        rt.save(
            {"w": torch.full((20_000,), float(number)), "v": torch.full((300,), number), "number": number},
            tmp_path / f"s{number}",
        )
    path = tmp_path / "out"
    reshard.convert(tmp_path / "s0", path, to="dcp")
    return path


#: No torch: it starts in no time. Prints how many of its conversions it made and how many were refused.
WRITER = """
    import sys
    import reshard
    source, path, rounds = sys.argv[1:]
    made = refused = 0
    print("ready", flush=True)
    while rounds == "forever" or made + refused < int(rounds):
        try:
            reshard.convert(source, path, to="dcp", overwrite=True)
            made += 1
        except reshard.StorageError as error:
            assert "another writer" in str(error), error
            refused += 1
    print(made, refused, flush=True)
"""


def test_four_processes_overwriting_one_path_lose_nothing(sources, tmp_path):
    running = [start(WRITER, tmp_path / f"s{number}", sources, 25) for number in range(WRITERS)]
    seen = set()
    while any(process.poll() is None for process in running):
        try:
            seen.add(number_at(sources))
        except reshard.ReshardError as error:
            # Its files were replaced while it was read: whoever looks again finds a whole one.
            assert isinstance(error, (reshard.Incomplete, reshard.NotFound, reshard.Corrupt)), error
    told = [process.communicate()[0].split() for process in running]
    assert all(process.returncode == 0 for process in running)
    made = [int(words[1]) for words in told]
    assert sum(made) > 0, told
    assert number_at(sources) in range(WRITERS) and seen and reshard.verify(sources).sound
    rt.save({"w": torch.full((20_000,), 9.0), "v": torch.full((300,), 9), "number": 9}, sources, overwrite=True)
    assert number_at(sources) == 9 and len(os.listdir(sources)) == 3, "leftovers are swept"


def test_writers_that_are_killed_leave_a_whole_checkpoint_and_no_lock(sources, tmp_path):
    generator = random.Random(13)
    for _ in range(12):
        running = [start(WRITER, tmp_path / f"s{number}", sources, "forever") for number in range(2)]
        for process in running:
            process.stdout.readline()
        time.sleep(generator.uniform(0.0, 0.15))
        for process in running:
            os.kill(process.pid, signal.SIGKILL)
        for process in running:
            process.wait()
            process.stdout.close()
        assert number_at(sources) in range(WRITERS) and reshard.verify(sources).sound
    reshard.convert(tmp_path / "s3", sources, to="dcp", overwrite=True)
    assert number_at(sources) == 3 and len(os.listdir(sources)) == 3, "no lock and no leftovers stay behind"


#: Saves every other step until it has made so many; prints each that is durable.
JOB = """
    import sys
    import torch
    import reshard.torch as rt
    root, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    manager = rt.CheckpointManager(root, keep_last=3, async_=False)
    for step in range(first, first + 2 * count, 2):
        manager.save(step, {"w": torch.full((5_000,), float(step)), "step": step})
        print(step, flush=True)
    manager.close()
"""


def test_two_jobs_on_one_root_and_one_is_killed(tmp_path):
    root = tmp_path / "run"
    (root / "step-3-export").mkdir(parents=True)
    (root / "step-3-export" / "notes.txt").write_text("mine")
    survivor, victim = start(JOB, root, 2, 30), start(JOB, root, 3, 10_000)
    durable = [victim.stdout.readline() for _ in range(5)]
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    said = survivor.communicate()[0].split()
    assert survivor.returncode == 0 and [int(step) for step in said] == list(range(2, 62, 2)) and all(durable)
    newest = reshard.latest(root)
    with reshard.open(newest) as checkpoint:
        assert (checkpoint["w"].numpy() == checkpoint["step"]).all() and checkpoint["step"] >= 60
    for _, name in reshard.steps(root):
        assert reshard.verify(root / name).sound
    assert (root / "step-3-export" / "notes.txt").read_text() == "mine"
    manager = rt.CheckpointManager(str(root), keep_last=3)
    state = {"w": torch.zeros(5_000), "step": 0}
    manager.restore(state)
    assert state["step"] >= 60 and (state["w"] == state["step"]).all()
    manager.close()


#: Saves the same steps as another job does at the same time; prints how many it saved and how many were refused.
RIVAL = """
    import sys
    import torch
    import reshard
    import reshard.torch as rt
    root, name, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    saved = refused = 0
    print("ready", flush=True)
    sys.stdin.readline()
    with rt.CheckpointManager(root, keep_last=2, async_=False) as manager:
        for step in range(count):
            try:
                manager.save(step, {"w": torch.full((5_000,), float(name)), "name": name, "step": step})
                saved += 1
            except (reshard.StorageError, reshard.AlreadyExists) as error:
                assert "another writer" in str(error) or "exists" in str(error), error
                refused += 1
    print(saved, refused, flush=True)
"""


def test_two_jobs_that_save_the_same_steps_lose_none(tmp_path):
    root = tmp_path / "run"
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RIVAL), str(root), str(name), "25"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": PACKAGE, "OMP_NUM_THREADS": "1"},
        )
        for name in (1, 2)
    ]
    for rival in rivals:
        assert rival.stdout.readline() == "ready\n"
    for rival in rivals:
        rival.stdin.write("go\n")
        rival.stdin.flush()
    told = [rival.communicate()[0].split() for rival in rivals]
    assert [rival.returncode for rival in rivals] == [0, 0], told
    # Of every step one of them has saved it: no refusal was of a step that nobody was saving.
    assert sum(int(saved) for saved, _ in told) >= 25 and all(int(saved) + int(refused) == 25 for saved, refused in told), told
    steps = reshard.steps(root)
    assert steps and max(step for step, _ in steps) == 24
    for step, name in steps:
        assert reshard.verify(root / name).sound
        with reshard.open(root / name) as checkpoint:
            assert checkpoint["step"] == step and (checkpoint["w"].numpy() == checkpoint["name"]).all()
    state = {"w": torch.zeros(5_000), "name": 0, "step": 0}
    with rt.CheckpointManager(root, keep_last=2) as manager:
        manager.restore(state)
    assert state["step"] == 24 and state["name"] in (1, 2)
