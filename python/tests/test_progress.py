"""The bar on the terminal."""

import pty
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from commands import on_terminal

import reshard.torch as rt
from reshard._progress import Progress, bar
from reshard._reports import human_bytes

SAVE = """
import sys, time
from reshard import _progress
class Slow:
    phase, done, total = sys.argv[2], 500, 1000
    def progress(self):
        return self
with _progress.Progress(Slow(), "saving", enabled=True, rank=int(sys.argv[1])):
    time.sleep(0.4)
"""


def run_on_terminal(rank, phase="moving"):
    """What lands on a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", SAVE, str(rank), phase], stderr=theirs, cwd=Path(__file__).parents[1])
    return on_terminal(process, ours, theirs)


def test_a_bar_on_the_terminal_of_rank_0_alone():
    assert "saving" in run_on_terminal(0) and "50%" in run_on_terminal(0)
    assert "saving" not in run_on_terminal(1)


def test_the_bar_says_when_bytes_are_only_being_made_durable():
    assert "saving: syncing" in run_on_terminal(0, "syncing")
    assert "saving: finishing" in run_on_terminal(0, "finishing")


def test_a_save_counts_its_sync_and_ends_at_the_whole(path):
    """Bytes that were written are not safe before they are synced: a bar that counts writes alone stands at 100 % and waits."""
    handle = rt.async_save({"x": torch.ones(1_000_000)}, path)
    handle.result()
    far = handle._control.progress()
    assert (far.phase, far.done) == ("finishing", far.total)
    assert far.total >= 2 * 4_000_000


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bar_in_the_notebook_of_rank_0_alone(monkeypatch, rank):
    """A stand-in for IPython's two functions: nothing else of a notebook is used."""
    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(data["text/plain"])

    def display(data, raw, display_id):
        shown.append(data["text/plain"])
        return Handle()

    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    far = types.SimpleNamespace(phase="moving", total=1000, done=500)
    with Progress(types.SimpleNamespace(progress=lambda: far), "saving", enabled=True, rank=rank):
        time.sleep(0.4)
    if rank:
        assert not shown
    else:
        assert "50%" in shown[0] and shown[-1] == ""


def test_quiet_where_there_is_no_terminal(path, capsys):
    rt.save({"x": torch.ones(10)}, path, progress=True)
    rt.load({"x": torch.zeros(10)}, path, progress=True)
    assert capsys.readouterr() == ("", "")


def test_lines_are_for_people():
    assert bar("loading", 500, 1000, 1.0, width=4) == "loading ██░░  50%  500 B of 1.0 kB, 500 B/s"
    assert bar("loading", 0, 0, 0.0, width=2) == "loading ░░   0%  0 B of 0 B, 0 B/s"
    assert [human_bytes(n) for n in (0, 999, 1000, 5e6, 3e12, 5e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "5.0 MB",
        "3.0 TB",
        "5000.0 TB",
    ]
