"""The ``reshard`` command: what pip installs as a script, and ``python -m reshard``."""

from __future__ import annotations

import os
import shlex
import signal
import sys

from . import _run
from ._reshard import run_command


def main() -> int:
    """Runs the command with ``sys.argv``; returns its exit code: 0 fine, 1 checked and found bad, 2 could not run."""
    # The one verb that is about Python programs.
    if sys.argv[1:2] == ["run"]:
        return _run.main(sys.argv[2:])
    # Python would wait for the command to come back before it looks at Ctrl-C; the command has its own way with it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    program = shlex.quote(sys.argv[0])
    if os.path.basename(sys.argv[0]) == "__main__.py":
        program = f"{shlex.quote(sys.executable)} -m reshard"
    return run_command(program, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
