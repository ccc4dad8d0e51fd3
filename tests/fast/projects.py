"""Python projects made on the spot, which build offline."""

from __future__ import annotations

import json
from pathlib import Path


def project(folder: Path, name: str, *requires: str, code: str = "", version: str = "0.1.0") -> Path:
    """A Python project of one module that needs no build tool from elsewhere: its backend lies in its own folder."""
    folder.mkdir(parents=True)
    backend = Path(__file__).parent / "one_module_backend.py"
    (folder / "one_module_backend.py").write_text(backend.read_text())
    (folder / f"{name.replace('-', '_')}.py").write_text(code)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "one_module_backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = {json.dumps(requires)}\n'
    )
    return folder
