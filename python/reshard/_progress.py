"""A bar on rank 0, in a terminal or a notebook, while bytes move."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from ._reports import human_bytes

if TYPE_CHECKING:
    from ._reshard import Progress as Far


class Watched(Protocol):
    """Work that tells how far it is."""

    def progress(self) -> Far: ...


class Progress:
    """Watches a control from a thread of its own. Quiet on other ranks and where there is neither a terminal nor a notebook."""

    def __init__(self, control: Watched, what: str, *, enabled: bool, rank: int) -> None:
        self._control = control
        self._what = what
        wanted = enabled and rank == 0
        self._show = (_Notebook.found() or _Terminal.found()) if wanted else None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._show is not None:
            self._thread = threading.Thread(target=self._watch, name="reshard-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, cls: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
        if self._show is not None:
            self._show.clear()

    def _watch(self) -> None:
        start = time.monotonic()
        while self._show is not None and not self._stop.wait(0.1):
            now = self._control.progress()
            what = self._what if now.phase == "moving" else f"{self._what}: {now.phase}"
            self._show.line(bar(what, now.done, now.total, time.monotonic() - start))


class _Terminal:
    """One line that is written over and over."""

    @staticmethod
    def found() -> _Terminal | None:
        return _Terminal() if sys.stderr.isatty() else None

    def line(self, text: str) -> None:
        sys.stderr.write("\r" + text + "\x1b[K")
        sys.stderr.flush()

    def clear(self) -> None:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


class _Notebook:
    """One output below the cell that is replaced over and over."""

    def __init__(self) -> None:
        self._handle: Any = None

    @staticmethod
    def found() -> _Notebook | None:
        # Whoever runs in a notebook has imported IPython.
        shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
        return _Notebook() if shell is not None and hasattr(shell, "kernel") else None

    def line(self, text: str) -> None:
        from IPython.display import display

        shown = {"text/plain": text}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def clear(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)


def bar(what: str, done: int, total: int, seconds: float, width: int = 30) -> str:
    """One line of progress."""
    part = min(done / total, 1.0) if total else 0.0
    filled = int(part * width)
    rate = done / seconds if seconds > 0 else 0.0
    blocks = "█" * filled + "░" * (width - filled)
    return f"{what} {blocks} {part:4.0%}  {human_bytes(done)} of {human_bytes(total)}, {human_bytes(rate)}/s"
