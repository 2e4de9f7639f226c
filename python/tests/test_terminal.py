"""The command on a terminal, where people read, and into a pipe, where programs do."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import commands
import numpy as np
import pytest
from safetensors.numpy import save_file

COMMAND = [sys.executable, "-m", "reshard"]


def clean_environment():
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    return environment | {"PYTHONPATH": commands.PACKAGE}


def on_terminal(*args):
    """What lands on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen([*COMMAND, *args], stdout=theirs, stderr=theirs, env=clean_environment())
    return commands.on_terminal(process, ours, theirs).splitlines()


def through_pipe(*args):
    done = subprocess.run([*COMMAND, *args], capture_output=True, text=True, env=clean_environment(), check=True)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A model of 1,000 layers that are not alike."""
    path = tmp_path_factory.mktemp("many") / "model.safetensors"
    save_file({f"layers.{i}.weight": np.zeros(i + 1, dtype=np.float32) for i in range(1000)}, path)
    return str(path)


@pytest.mark.parametrize("more", [[], ["--tree"]])
def test_a_long_list_has_a_cap_on_a_terminal_and_none_in_a_pipe(many, more):
    shown = on_terminal("ls", many, *more)
    assert len(shown) < 510
    assert any("more lines; --all lists them" in line for line in shown), shown[-3:]
    for whole in (on_terminal("ls", many, *more, "--all"), through_pipe("ls", many, *more)):
        assert sum("float32" in line for line in whole) == 1000
        assert not any("more lines" in line for line in whole)


def test_a_short_list_is_whole(many):
    assert not any("more lines" in line for line in on_terminal("ls", many, "layers.1?.*"))


def test_a_key_of_a_million_modules_is_one_line(tmp_path):
    """Modules are nested as deep as a key says: a stack that grows with it would end at some depth."""
    path = str(tmp_path / "deep.safetensors")
    save_file({"a." * 1_000_000 + "b": np.zeros(1, dtype=np.float32), "c": np.zeros(1, dtype=np.float32)}, path)
    assert len(through_pipe("ls", path, "--tree")) == 3
    assert len(through_pipe("ls", path, "--tree", "--depth", "1")) == 3


def test_keys_that_share_no_module_are_listed_in_a_moment(tmp_path):
    path = str(tmp_path / "wide.safetensors")
    save_file({f"{i}": np.zeros(1, dtype=np.float32) for i in range(100_000)}, path)
    done = subprocess.run(
        [*COMMAND, "ls", path, "--tree", "--sort", "none"], capture_output=True, env=clean_environment(), check=True, timeout=60
    )
    assert len(done.stdout.splitlines()) == 100_001
