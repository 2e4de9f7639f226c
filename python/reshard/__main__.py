"""``python -m reshard run -- torchrun train.py``."""

from __future__ import annotations

import sys

from ._run import main

if __name__ == "__main__":
    if sys.argv[1:2] != ["run"]:
        sys.stderr.write("error: `python -m reshard` knows `run`; see `python -m reshard run --help`\n")
        raise SystemExit(2)
    raise SystemExit(main(sys.argv[2:]))
