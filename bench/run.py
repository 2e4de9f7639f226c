#!/usr/bin/env python3
"""Measures reshard beside PyTorch, in turns, on this machine: `make bench`. See README.md in this folder."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
for path in (HERE, ROOT / "python"):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

import output
import programs
import rows as groups
from harness import Bench, Row, remove

#: The first word of a row's key, and its group.
NUMBER_OF = {
    "large": 1,
    "small": 2,
    "metadata": 3,
    "planning": 4,
    "fsdp2": 5,
    "fsdp1-flat": 6,
    "fsdp1-orig": 6,
    "slices": 7,
    "background": 8,
    "convert": 9,
    "objects": 10,
    "others": 11,
    "numbers": 12,
    "drop-in": 13,
    "zero": 14,
    "views": 15,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to try the measurements themselves; the numbers mean nothing"
    )
    parser.add_argument("--only", metavar="N", help="only these groups, such as 5 or 1,5,7-9")
    parser.add_argument("--rounds", type=int, help="counted rounds of each row (3; 2 with --quick)")
    parser.add_argument(
        "--check", action="store_true", help="compare ratios with floors.json; exit 1 and say which rows are below"
    )
    parser.add_argument("--write-readme", action="store_true", help="put the table into the README, from this run or with --from")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="JSON", help="measure nothing: take the results of an earlier run"
    )
    parser.add_argument(
        "--dir", type=Path, default=HERE / "results" / "scratch", help="where files are written and read (decides on the disk)"
    )
    parser.add_argument("--no-build", action="store_true", help="use compiled programs as they are")
    parser.add_argument("--list", action="store_true", help="list the groups")
    return parser.parse_args()


def chosen(text: str | None) -> list[int]:
    if not text:
        return list(groups.NUMBERS)
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    unknown = numbers - set(groups.NUMBERS)
    if unknown:
        raise SystemExit(f"error: no group {', '.join(map(str, sorted(unknown)))}; there are 1 to {max(groups.NUMBERS)}")
    return sorted(numbers)


def measure(bench: Bench, numbers: list[int]) -> tuple[list[Row], list[str]]:
    """All rows of these groups. A group that fails does not stop the others."""
    found: list[Row] = []
    broken: list[str] = []
    for number in numbers:
        print(f"{number}. {groups.title(number)}", file=sys.stderr, flush=True)
        start = time.monotonic()
        try:
            for row in groups.module(number).rows(bench):
                row.group = number
                found.append(row)
        except Exception as error:
            traceback.print_exc()
            broken.append(
                f"{number}. {groups.title(number)}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
        bench.say(f"{time.monotonic() - start:.0f} s")
    return found, broken


def restored(path: Path) -> tuple[dict, list[Row]]:
    """Rows of an earlier run."""
    about = json.loads(path.read_text())
    found = []
    for plain in about["rows"]:
        row = Row(plain["key"], plain["title"])
        for name in ("group", "unit", "beside", "limit_name", "bytes", "note", "skipped"):
            setattr(row, name, plain[name])
        for side in ("ours", "other", "limit"):
            setattr(row, side, plain[side]["samples"] if plain[side] else [])
        found.append(row)
    return about, found


def main() -> int:
    options = arguments()
    if options.list:
        for number in groups.NUMBERS:
            print(f"{number:>2}. {groups.title(number)}")
        return 0
    if options.quick and (options.check or options.write_readme):
        print("error: floors and the README are about whole runs; leave out --quick", file=sys.stderr)
        return 2
    numbers = chosen(options.only)
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if options.quick:
        os.environ["RESHARD_BENCH_TRIAL"] = "1"  # ranks see it too
    broken: list[str] = []
    if options.source:
        about, found = restored(options.source)
        found = [row for row in found if row.group in numbers]
        print(output.table(found))
    else:
        build = not options.no_build
        for name in programs.needs(numbers) if build else []:
            try:
                print(f"building {name}", file=sys.stderr, flush=True)
                programs.program(name)
            except programs.Missing as missing:
                print(f"note: {missing}", file=sys.stderr)
        folder = options.dir / f"run-{os.getpid()}"
        folder.mkdir(parents=True)
        start = time.monotonic()
        try:
            bench = Bench(folder.resolve(), options.quick, options.rounds or (2 if options.quick else 3), build)
            found, broken = measure(bench, numbers)
        finally:
            remove(folder)
        seconds = time.monotonic() - start
        print(output.table(found))
        whole = numbers == groups.NUMBERS and not broken
        about = output.document(found, options.quick, whole, seconds)
        for path in output.write(found, HERE / "results", about):
            print(f"wrote {os.path.relpath(path)}", file=sys.stderr)
        print(f"{seconds:.0f} s; {output.CACHES}", file=sys.stderr)
    status = 0
    for line in broken:
        print(f"error: group {line}", file=sys.stderr)
        status = 2
    if about["quick"] and (options.check or options.write_readme):
        print("error: these are results of a trial with tiny sizes", file=sys.stderr)
        return 2
    if options.write_readme:
        if not about["whole"]:
            print("error: the README is written from a whole run without failures", file=sys.stderr)
            return 2
        output.write_readme(ROOT / "README.md", about)
    if options.check:
        floors = json.loads((HERE / "floors.json").read_text())["rows"]
        bad = output.failures(found, floors, set(numbers), NUMBER_OF)
        for line in bad:
            print(f"below its floor: {line}", file=sys.stderr)
        checked = sum(1 for key in floors if NUMBER_OF[key.split("/")[0]] in numbers)
        print(f"{checked - len({line.split(' ')[0] for line in bad})} of {checked} rows with a floor hold it", file=sys.stderr)
        status = max(status, 1 if bad else 0)
    return status


if __name__ == "__main__":
    sys.exit(main())
