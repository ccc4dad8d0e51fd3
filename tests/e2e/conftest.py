from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running import leftovers


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = leftovers()
    yield tmp_path / "run"
    assert leftovers() - before == set()
