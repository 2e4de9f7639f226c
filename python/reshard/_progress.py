"""A bar on rank 0's terminal while bytes move."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

from ._reports import human_bytes


class Progress:
    """Watches a control from a thread of its own. Quiet on other ranks and where stderr is no terminal."""

    def __init__(self, control: Any, what: str, *, enabled: bool, rank: int) -> None:
        self._control = control
        self._what = what
        self._enabled = enabled and rank == 0 and sys.stderr.isatty()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._enabled:
            self._thread = threading.Thread(target=self._watch, name="reshard-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, cls: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _watch(self) -> None:
        start = time.monotonic()
        while not self._stop.wait(0.1):
            sys.stderr.write("\r" + bar(self._what, self._control.done, self._control.total, time.monotonic() - start) + "\x1b[K")
            sys.stderr.flush()


def bar(what: str, done: int, total: int, seconds: float, width: int = 30) -> str:
    """One line of progress."""
    part = min(done / total, 1.0) if total else 0.0
    filled = int(part * width)
    rate = done / seconds if seconds > 0 else 0.0
    blocks = "█" * filled + "░" * (width - filled)
    return f"{what} {blocks} {part:4.0%}  {human_bytes(done)} of {human_bytes(total)}, {human_bytes(rate)}/s"
