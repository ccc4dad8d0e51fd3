"""What children see of our environment."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from miles_verifiers.system import environ, process

SECRETS = {
    "HF_TOKEN": "x",
    "HUGGING_FACE_HUB_TOKEN": "x",
    "WANDB_API_KEY": "x",
    "WANDB_ENTITY": "x",
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_PROFILE": "x",
    "OPENAI_API_KEY": "x",
    "PRIME_API_KEY": "x",
    "GITHUB_TOKEN": "x",
    "DATABASE_URL": "postgres://u:p@h/d",
    "MY_COMPANY_LOGIN": "x",
    "HTTPS_PROXY": "http://user:password@proxy:1",
    "UV_INDEX_URL": "https://user:password@index/simple",
    "MILES_VERIFIERS_SECRET": "x",
}
HARMLESS = {
    "PATH": "/bin",
    "HOME": "/h",
    "LC_ALL": "C",
    "https_proxy": "http://proxy:1",
    "UV_INDEX_URL": "https://index/simple",
    "MILES_VERIFIERS_PARENT": "1",
    "RAY_AUTH_MODE": "disabled",
    "HF_HUB_OFFLINE": "1",
}


def test_foreign_code_sees_what_is_known_to_be_harmless_and_what_was_named() -> None:
    assert environ.allowed(SECRETS) == {}
    assert environ.allowed(HARMLESS) == HARMLESS
    assert environ.allowed({**SECRETS, **HARMLESS}, ["OPENAI_API_KEY"]) == {**HARMLESS, "OPENAI_API_KEY": "x"}


def test_our_own_processes_see_everything_but_credentials() -> None:
    kept = environ.without_secrets({**SECRETS, "NCCL_DEBUG": "INFO"})
    assert "NCCL_DEBUG" in kept
    assert not {"HF_TOKEN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "OPENAI_API_KEY", "GITHUB_TOKEN"} & set(kept)


def test_the_launcher_becomes_the_command_under_the_allow_list() -> None:
    code = "import json, os; print(json.dumps([dict(os.environ), open('/proc/self/environ').read(), os.getpid()]))"
    with subprocess.Popen(
        [*environ.launcher(sys.executable, ["OPENAI_API_KEY"]), "-c", code],
        env={**SECRETS, "PATH": "/bin"},
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        seen, image, pid = json.loads(child.communicate(timeout=30)[0])
    assert {name for name in seen if name in SECRETS} == {"OPENAI_API_KEY"}
    assert "HF_TOKEN" not in image
    assert pid == child.pid


def test_variables_that_redirect_are_reported_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/p")
    monkeypatch.setenv("VIRTUAL_ENV", "/v")
    assert process.redirections().items() >= {("PYTHONPATH", "/p"), ("VIRTUAL_ENV", "/v")}
    assert not {"PYTHONPATH", "VIRTUAL_ENV"} & set(process.child_environment())
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    assert "VIRTUAL_ENV" not in process.redirections(), "that is ourselves"
