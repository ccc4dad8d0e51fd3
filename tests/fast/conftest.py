"""What every fast test gets without asking."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """A worker in the test's own process sets variables for good, which would reach the tests after it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
