"""Tests against the real trainers, in an environment of their own: `make test-integrations`. Where a trainer is missing they are skipped."""

from __future__ import annotations

import importlib.util
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import pytest
from ranks import Ranks


def has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="session")
def _ranks(request):
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(os.path.abspath(__file__)), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    # Imported once, in the process from which ranks are forked, as they are slow to import: what the tests that are run need.
    modules = dict.fromkeys(item.module for item in request.session.items)
    wanted = dict.fromkeys(name for module in modules for name in getattr(module, "PRELOAD", ()))
    ranks = Ranks((*(name for name in wanted if has(name)), "trainers"))
    yield ranks
    ranks.close()
