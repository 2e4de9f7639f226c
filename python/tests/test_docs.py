"""The code blocks of the README and of docs/ run.

Python blocks of a page run in order, in one folder made for the page. Consecutive blocks on one process are one program. A
comment before a block changes that::

    <!-- test: ranks=4 -->            on four ranks, as torchrun would start them
    <!-- test: ranks=4 then=3 -->     and again on three
    <!-- test: ranks=4 torch=2.6 -->  where torch is that new
    <!-- test: skip because ... -->   not at all, and why

``console`` blocks hold lines ``$ reshard ...``, which must succeed in a folder with a demo checkpoint. Lines of output under a
command must occur in what it prints, in that order; numbers and spaces are not compared, and ``...`` is any text.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!-- test: ((?:(?!-->).)*?)\s*-->\s*\Z", re.DOTALL)
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
TIMEOUT = 300.0


class Block(NamedTuple):
    """One block: its page's line, language and text, and what the comment before it says."""

    line: int
    language: str
    code: str
    ranks: list[int]
    torch: tuple[int, ...]
    skipped: str | None


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        comment = COMMENT.search(text[: match.start()])
        words = comment[1] if comment else ""
        skipped = words.removeprefix("skip because ") if words.startswith("skip because ") else None
        ranks = [int(number) for number in re.findall(r"(?:ranks|then)=(\d+)", words)]
        newer = re.search(r"torch=([\d.]+)", words)
        least = tuple(map(int, newer[1].split("."))) if newer else ()
        assert not words or ranks or skipped, f"{page.name}: a comment that means nothing: {words!r}"
        found.append(Block(text.count("\n", 0, match.start()) + 2, match[1], match[2], ranks, least, skipped))
    return found


def pages_with(language: str) -> list[Path]:
    """Pages that have something to run."""
    return [page for page in PAGES if any(b.language == language and not b.skipped for b in blocks(page))]


# ---- Python --------------------------------------------------------------------------------------------------------------


def programs(page: Path) -> list[tuple[int, str]]:
    """What to run: on how many ranks (0: a process on its own), and the code, on the lines it has in the page."""
    found: list[tuple[int, str]] = []
    joined = False
    for block in blocks(page):
        if block.language != "python" or block.skipped or block.torch > TORCH:
            continue
        if block.ranks:
            found += [(ranks, "\n" * (block.line - 1) + block.code) for ranks in block.ranks]
        elif joined:
            code = found.pop()[1]
            found.append((0, code + "\n" * (block.line - 1 - code.count("\n")) + block.code))
        else:
            found.append((0, "\n" * (block.line - 1) + block.code))
        joined = not block.ranks
    return found


def _rank_main(page: str, code: str, rank: int, size: int, port: int, folder: str, results: Any) -> None:
    os.chdir(folder)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RESHARD_THREADS="2",
    )  # fmt: skip
    torch.set_num_threads(1)
    try:
        exec(compile(code, page, "exec"), {"__name__": "__main__"})
        results.send(None)
    except BaseException:
        results.send(f"rank {rank} of {size}:\n{traceback.format_exc()}")
    results.close()


def run_on_ranks(page: Path, code: str, size: int, folder: Path) -> None:
    """Runs code on ranks that find each other as under torchrun."""
    context = multiprocessing.get_context("forkserver")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(str(page), code, rank, size, port, str(folder), theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((process, mine))
    deadline = time.monotonic() + TIMEOUT
    failures = []
    for rank, (_, results) in enumerate(started):
        try:
            if not results.poll(max(deadline - time.monotonic(), 0.0)):
                failures.append(f"rank {rank} of {size} did not end within {TIMEOUT} s")
            elif (failure := results.recv()) is not None:
                failures.append(failure)
        except EOFError:
            failures.append(f"rank {rank} of {size} died")
    for process, _ in started:
        process.join(10.0)
        if process.is_alive():
            process.kill()
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("page", pages_with("python"), ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, ranks):
    for size, code in programs(page):
        if size:
            run_on_ranks(page, code, size, tmp_path)
            continue
        paths = [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        program = f"import sys; exec(compile(sys.stdin.read(), {str(page)!r}, 'exec'), {{'__name__': '__main__'}})"
        run = subprocess.run(
            [sys.executable, "-c", program],
            input=code, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=TIMEOUT,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr


# ---- the command line ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def command(tmp_path_factory) -> Path:
    """The `reshard` binary: the one given, or that of the tree, built if there is none."""
    given = os.environ.get("RESHARD_BIN")
    if given:
        return Path(given)
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    if not target.is_absolute():
        target = ROOT / target
    built = [target / profile / "reshard" for profile in ("release", "debug")]
    if not any(path.exists() for path in built):
        subprocess.run([os.environ.get("CARGO", "cargo"), "build", "--quiet", "-p", "reshard-cli"], cwd=ROOT, check=True)
    return max((path for path in built if path.exists()), key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="session")
def demo(command, tmp_path_factory) -> Path:
    """A folder with the demo's checkpoint in it."""
    folder = tmp_path_factory.mktemp("demo")
    subprocess.run([command, "demo"], cwd=folder, check=True, capture_output=True)
    return folder


def commands(code: str) -> list[tuple[str, list[str]]]:
    """Commands and the lines that are shown under each."""
    found: list[tuple[str, list[str]]] = []
    for line in code.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip():
            found[-1][1].append(line)
    return found


def loosely(line: str) -> str:
    """A line without what may differ: numbers, and how many spaces there are."""
    return re.sub(r"\s+", " ", re.sub(r"[0-9a-f]*\d[0-9a-f]*(?:\.\d+)?", "#", line)).strip()


def missing_line(shown: list[str], printed: str) -> str | None:
    """The first shown line that the output lacks."""
    rest = iter([loosely(line) for line in printed.splitlines()])
    for line in shown:
        if line.strip() in ("...", "…"):
            continue
        wanted = re.compile(".*".join(re.escape(part.strip()) for part in re.split(r"\.\.\.|…", loosely(line))))
        if not any(wanted.search(found) for found in rest):
            return line
    return None


@pytest.mark.parametrize("page", pages_with("console"), ids=lambda page: page.name)
def test_console_blocks_run(page, command, demo, tmp_path):
    if "$ reshard demo\n" not in page.read_text():
        shutil.copytree(demo, tmp_path, dirs_exist_ok=True)
    environment = {**os.environ, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1"}
    for block in blocks(page):
        if block.language != "console" or block.skipped:
            continue
        for typed, shown in commands(block.code):
            words = shlex.split(typed)
            run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=TIMEOUT)
            where = f"{page.name}, line {block.line}: {typed}"
            assert run.returncode == 0, f"{where}\n{run.stdout}{run.stderr}"
            line = missing_line(shown, run.stdout)
            assert line is None, f"{where}\nno such line: {line}\n{run.stdout}"


# ---- all pages -------------------------------------------------------------------------------------------------------------


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(FENCE, "", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(FENCE, "", text)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in slugs(found.read_text()), f"{page.name} links to {target}, which has no such heading"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    named = re.findall(r"`((?:crates|python|scripts|bench|docs)/[\w./-]+)`", re.sub(FENCE, "", page.read_text()))
    gone = sorted({path for path in named if not (ROOT / path).exists()})
    assert not gone, f"{page.name} names {gone}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_names_its_language(page):
    unnamed = [block.line for block in blocks(page) if not block.language]
    assert not unnamed, f"{page.name}: a block without a language at line {unnamed} (rustdoc would take it for Rust)"


def test_messages_of_the_troubleshooting_page_are_those_that_are_given():
    """Every message in the first column stands in the sources, or is the system's own."""
    folders = [ROOT / "python" / "reshard", ROOT / "python" / "src", *(ROOT / "crates").glob("*/src")]
    files = [file for folder in folders for kind in ("*.py", "*.rs") for file in folder.rglob(kind)]
    # Strings that go on in the next line are one.
    sources = re.sub(r'"\s*\n\s*f?"|\\\n\s*', "", "\n".join(file.read_text() for file in files))
    rows = [line for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines() if line.startswith("| `")]
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert len(messages) > 15
    unknown = [message for message in messages if message not in sources and message != "No space left on device"]
    assert not unknown
