"""Files that trainers keep beside what the engine writes: complete or not there, and durable."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write(path: Path, content: Callable[[BinaryIO], object]) -> None:
    """Writes a file and waits until it is on the disk."""
    with open(path, "wb") as file:
        content(file)
        file.flush()
        os.fsync(file.fileno())


def rename(source: Path, target: Path) -> None:
    """Renames a file, over another one too, durably."""
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def publish(path: Path, content: Callable[[BinaryIO], object]) -> None:
    """Writes a file so that nobody ever finds a part of it."""
    partial = path.with_name(f".{path.name}.partial")
    write(partial, content)
    rename(partial, path)
