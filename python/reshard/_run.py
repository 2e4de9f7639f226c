"""``reshard run -- torchrun train.py``: the switch for a program and all processes that it starts, by their environment alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

USAGE = """\
Usage: reshard run [--strict] [--cast never|widening|any] [--allow-pickle] [--no-overwrite] [--] COMMAND [ARGUMENT]...

Runs a program with reshard in place of torch.distributed.checkpoint, in every process that it starts.

  --strict          also refuse stored keys that nobody asks for
  --cast POLICY     where element types differ: any (as PyTorch does), widening, never
  --allow-pickle    unpickle values of classes that the program has not declared safe; loading them executes code from the file
  --no-overwrite    refuse to replace a checkpoint
"""
#: Where the options of the switch travel.
VARIABLE = "RESHARD_INSTALL"
#: Where the package is, for interpreters that would not find it.
PACKAGE = "RESHARD_INSTALL_PACKAGE"


def main(arguments: Sequence[str]) -> int:
    """Replaces this process by the program; returns only what went wrong."""
    options, command = _parsed(list(arguments))
    if command is None:
        sys.stdout.write(USAGE)
        return 0
    if not command:
        sys.stderr.write("error: no program to run\n\n" + USAGE)
        return 2
    try:
        os.execvpe(command[0], command, environment(options, os.environ))
    except OSError as error:
        sys.stderr.write(f"error: cannot run {command[0]}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


def environment(options: Mapping[str, object], base: Mapping[str, str]) -> dict[str, str]:
    """The environment of the program: a folder before all others in which Python looks for what to run at its start."""
    here = os.path.dirname(os.path.abspath(__file__))
    site = os.path.join(here, "_site")
    paths = [site, *(path for path in base.get("PYTHONPATH", "").split(os.pathsep) if path and path != site)]
    changed = {"PYTHONPATH": os.pathsep.join(paths), VARIABLE: json.dumps(dict(options)), PACKAGE: os.path.dirname(here)}
    return {**base, **changed}


def _parsed(arguments: list[str]) -> tuple[dict[str, object], list[str] | None]:
    """The options, and the program; None when help was asked for."""
    options: dict[str, object] = {}
    while arguments and arguments[0].startswith("-"):
        option = arguments.pop(0)
        if option == "--":
            break
        if option in ("-h", "--help"):
            return options, None
        if option == "--strict":
            options["strict"] = True
        elif option == "--allow-pickle":
            options["allow_pickle"] = True
        elif option == "--no-overwrite":
            options["overwrite"] = False
        elif option == "--cast" and arguments and arguments[0] in ("never", "widening", "any"):
            options["cast"] = arguments.pop(0)
        else:
            sys.stderr.write(f"error: unknown option {option}\n\n" + USAGE)
            raise SystemExit(2)
    return options, arguments
