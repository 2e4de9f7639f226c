"""Tests against the real trainers, in an environment of their own: `make test-integrations`. Where a trainer is missing they are skipped."""

from __future__ import annotations

import importlib.util
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import pytest
from ranks import Ranks

#: Imported once, in the process from which ranks are forked: they are slow to import.
TRAINERS = ("accelerate", "transformers", "lightning", "torchtitan", "megatron.core", "trainers")


def has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="session")
def _ranks():
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(os.path.abspath(__file__)), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    ranks = Ranks(tuple(name for name in TRAINERS if has(name)))
    yield ranks
    ranks.close()
