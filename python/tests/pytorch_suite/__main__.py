"""The runner: `python -m pytorch_suite --help`."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

TESTS = pathlib.Path(__file__).resolve().parent.parent

#: What tests name that this machine may not have, and what they get.
PLAIN = (
    (r'"cpu:gloo,cuda:nccl"', '"gloo"'),
    (r'f?"(cuda|hpu|xpu):[^"]*"', '"cpu"'),
    (r"""(["'])cuda\1""", r"\1cpu\1"),
    (r'"nccl"', '"gloo"'),
)


def adapted(text: str) -> str:
    """A test file that imports what is to be in place before anything else."""
    for pattern, plain in PLAIN:
        text = re.sub(pattern, plain, text)
    lines = text.splitlines(keepends=True)
    after = max((number + 1 for number, line in enumerate(lines) if line.startswith("from __future__")), default=0)
    return "".join([*lines[:after], "import pytorch_suite.in_place  # noqa\n", *lines[after:]])


def outcomes(path: pathlib.Path) -> dict[str, tuple[str, str]]:
    """How every test of a report ended, and why."""
    found: dict[str, tuple[str, str]] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').split('.')[-1]}.{case.get('name')}"
        how, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                how = "failed" if child.tag != "skipped" else "skipped"
                why = child.get("message") or ""
                why += "\n" + (child.text or "") if how == "failed" else ""
        found[name] = (how, why)
    return found


def run(source: pathlib.Path, file: str, mode: str, only: str | None, limit: float) -> dict[str, tuple[str, str]]:
    """One file in one mode."""
    with tempfile.TemporaryDirectory(prefix="pytorch-suite-") as folder:
        copy = pathlib.Path(folder) / pathlib.Path(file).name
        copy.write_text(adapted((source / file).read_text()))
        report = pathlib.Path(folder) / "report.xml"
        given = os.environ.get("PYTHONPATH", "")
        paths = [str(TESTS.parent), str(TESTS), folder, *([given] if given else [])]
        environment = {**os.environ, "RESHARD_IN_PLACE": mode, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x" if limit == 0 else "-q", f"--junitxml={report}", str(copy)]
        command += ["-p", "no:cacheprovider", f"--rootdir={folder}", *(["-k", only] if only else [])]
        try:
            done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=limit)
            text = done.stdout[-2000:] + done.stderr[-2000:]
        except subprocess.TimeoutExpired:
            return {"(all)": ("failed", f"more than {limit} s")}
        return outcomes(report) if report.exists() else {"(all)": ("failed", text)}


def main() -> int:
    """Runs files; 1 if something passes with PyTorch and not with reshard."""
    parser = argparse.ArgumentParser(prog="pytorch_suite", description=sys.modules["pytorch_suite"].__doc__)
    parser.add_argument("--source", type=pathlib.Path, required=True, help="a source tree of PyTorch")
    parser.add_argument("--mode", action="append", choices=("storage", "calls", "state"), help="what is put in place")
    parser.add_argument("--results", type=pathlib.Path, help="keep results here; a file's own are not run again")
    parser.add_argument("--only", help="pytest's -k")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for a file")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    known = json.loads(arguments.results.read_text()) if arguments.results and arguments.results.exists() else {}
    worse = 0
    for file in arguments.files:
        if file not in known:
            known[file] = run(arguments.source, file, "", arguments.only, arguments.limit)
            if arguments.results:
                arguments.results.write_text(json.dumps(known))
        good = {name for name, (how, _) in known[file].items() if how == "passed"}
        for mode in arguments.mode or ("calls",):
            ours = run(arguments.source, file, mode, arguments.only, arguments.limit) if good else {}
            bad = {name: ours.get(name, ("missing", ours.get("(all)", ("", ""))[1])) for name in sorted(good)}
            bad = {name: answer for name, answer in bad.items() if answer[0] != "passed"}
            print(f"{file} [{mode}]: {len(good) - len(bad)} of {len(good)} that pass with PyTorch", flush=True)
            for name, (how, why) in bad.items():
                print(f"--- {name}: {how}\n{why[-3000:]}", flush=True)
            worse += len(bad)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
