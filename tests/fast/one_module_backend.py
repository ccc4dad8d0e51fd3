"""A build backend (PEP 517 and 660) for a project of one module, so that tests build packages without fetching anything."""

import tomllib
import zipfile
from pathlib import Path


def build_wheel(directory, config_settings=None, metadata_directory=None):
    project = _project()
    module = project["name"].replace("-", "_")
    return _wheel(directory, project, {f"{module}.py": Path(f"{module}.py").read_text()})


def build_editable(directory, config_settings=None, metadata_directory=None):
    return _wheel(directory, _project(), {"_editable.pth": f"{Path.cwd()}\n"})


def _project():
    return tomllib.loads(Path("pyproject.toml").read_text())["project"]


def _wheel(directory, project, files):
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    info = f"{stem}.dist-info"
    needs = "".join(f"Requires-Dist: {each}\n" for each in project.get("dependencies", ()))
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    name = f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(Path(directory) / name, "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)
    return name
