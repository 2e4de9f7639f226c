"""Fixtures: a scratch path, and ranks that are real processes."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def _ranks():
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(_ranks):
    """`ranks(n, function, *arguments)` runs a function of a test module on n ranks with a gloo group between them."""
    return _ranks.run


@pytest.fixture
def path(tmp_path):
    """A path that does not exist yet."""
    return str(tmp_path / "checkpoint")
