"""Compiles miles_verifiers/wire/_scan.c when the package is installed. Where there is no compiler, scan.py does without."""

from __future__ import annotations

import os
import shutil
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
        self._kept = tempfile.TemporaryDirectory()  # until the builder has taken the file
        made = self._compiled(Path(self._kept.name))
        if version == "editable":
            self._put(made, Path(self.root, TARGET))
        elif made is not None:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data |= {"pure_python": False, "tag": f"cp311-abi3-{platform}"}
            build_data["force_include"][str(made)] = TARGET

    def _compiled(self, folder: Path) -> Path | None:
        source = str(Path(self.root, SOURCE))
        # "optional": where it cannot be compiled, setuptools warns and goes on.
        extension = Extension("_scan", [source], extra_compile_args=FLAGS, py_limited_api=True, optional=True)
        command = build_ext(Distribution({"ext_modules": [extension]}))
        command.build_lib = command.build_temp = str(folder)
        command.ensure_finalized()
        command.run()
        made = Path(command.get_ext_fullpath("_scan"))
        if made.exists():
            return made
        self.app.display_warning("the wire's scan runs in Python: it could not be compiled")
        return None

    def _put(self, made: Path | None, target: Path) -> None:
        """`made` in place of `target`, which is gone where nothing was made: it would be of another source."""
        aside = target.with_name(f".{os.getpid()}.so")
        try:
            if made is None:
                target.unlink(missing_ok=True)
            else:
                shutil.copyfile(made, aside)
                aside.replace(target)
        except OSError as error:
            self.app.display_warning(f"the wire's scan stays as it is: {error}")
