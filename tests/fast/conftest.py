"""What every fast test gets without asking, and what those of the wire ask for."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from fake_engine import FakeEngine


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """A worker in the test's own process sets variables for good, which would reach the tests after it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
