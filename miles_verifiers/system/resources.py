"""Where the project's own data lie: profiles/, locks/ and environments/.

In a checkout they are folders beside the package, in an installed wheel they were put into `miles_verifiers/_data`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def root() -> Path:
    """The folder that holds profiles/, locks/ and environments/."""
    package = Path(__file__).resolve().parent.parent
    packaged = package / "_data"
    return packaged if packaged.is_dir() else package.parent
