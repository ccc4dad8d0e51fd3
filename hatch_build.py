"""Compiles miles_verifiers/wire/_scan.c when the package is installed. Where there is no compiler, scan.py does without."""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

SOURCE = "miles_verifiers/wire/_scan.c"
TARGET = "miles_verifiers/wire/_scan.abi3.so"
"""Of Python's stable ABI: one file serves 3.11 and newer."""
FLAGS = ["-O2", "-g0"]
"""Without debugging information: the same source gives the same bytes in any folder, and so the same key of a venv."""


class CompileScan(BuildHookInterface):  # type: ignore[type-arg]
    """Beside its source for an editable install, into the wheel else."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version == "editable":
            if not _is_newer(root / TARGET, [root / SOURCE, Path(__file__)]):
                self._compile(root, root / TARGET)
            return
        self._kept = tempfile.TemporaryDirectory()
        built = Path(self._kept.name) / Path(TARGET).name
        if self._compile(root, built):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data |= {"pure_python": False, "tag": f"cp311-abi3-{platform}"}
            build_data["force_include"][str(built)] = TARGET

    def _compile(self, root: Path, target: Path) -> bool:
        # "optional": where it cannot be compiled, setuptools warns and goes on.
        extension = Extension(
            "_scan", [str(root / SOURCE)], extra_compile_args=FLAGS, py_limited_api=True, optional=True
        )
        try:
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as aside:
                command = build_ext(Distribution({"ext_modules": [extension]}))
                command.build_lib = command.build_temp = aside
                command.ensure_finalized()
                command.run()
                made = Path(command.get_ext_fullpath("_scan"))
                if made.exists():
                    made.replace(target)
                    return True
            self.app.display_warning("the wire's scan runs in Python: it could not be compiled")
        except OSError as error:
            self.app.display_warning(f"the wire's scan runs in Python: its folder cannot be written to: {error}")
        return False


def _is_newer(file: Path, sources: list[Path]) -> bool:
    return file.exists() and all(file.stat().st_mtime > source.stat().st_mtime for source in sources)
