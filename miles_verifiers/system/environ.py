"""Which of our environment variables a child may see. A leaf.

What runs environments and model-written programs sees an allow-list: a list of what is forbidden always lacks the next
credential. What runs our own code (engine, trainer, Ray) sees everything but what looks like a credential, because
drivers and collectives are steered by variables that nobody can list.

`python -m miles_verifiers.system.environ NAME,NAME COMMAND ...` becomes COMMAND under the allow-list and the named variables:
a new process image, so that not even /proc shows what was there before. Ray starts the rollout workers with it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence

RAY = {
    # Ray writes an authentication token into the home folder otherwise; all of its ports are on loopback here.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",
    # Ray copies a driver's `uv run` to its workers, which would put them into another venv than their role's.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
"""For drivers of Ray."""

_SECRET = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PRIVATE_?KEY|^AWS_|^WANDB_|^AZURE_|^GOOGLE_|^GITHUB_", re.I
)


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """The environment less what looks like a credential: for our own processes."""
    return {name: value for name, value in env.items() if not _SECRET.search(name)}


_ALLOWED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|HOSTNAME|LD_LIBRARY_PATH|"
    r"XDG_(CACHE|DATA|CONFIG|RUNTIME)_\w+|PYTHON(UNBUFFERED|UTF8|HASHSEED|IOENCODING|FAULTHANDLER|WARNINGS)|"
    r"SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|(HTTPS?|ALL|NO)_PROXY|"
    r"UV_(CACHE_DIR|OFFLINE|LINK_MODE|INDEX|INDEX_URL|DEFAULT_INDEX|PYTHON_DOWNLOADS)|"
    r"(OMP|MKL|OPENBLAS)_NUM_THREADS|TOKENIZERS_PARALLELISM|DO_NOT_TRACK|"
    r"HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|DATASETS_OFFLINE|HUB_DISABLE_TELEMETRY)|TRANSFORMERS_OFFLINE|"
    r"RAY_\w+|MILES_VERIFIERS_\w+",
    re.I,
)


def is_allowed(name: str, value: str) -> bool:
    """Whether a variable may reach what runs environments and model-written programs: known by name, and no login inside.

    `value` counts because addresses of proxies and indexes carry passwords (https://user:password@host).
    """
    return bool(_ALLOWED.fullmatch(name)) and not _SECRET.search(name) and not re.search(r"://[^/\s]*@", value)


def allowed(env: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Of `env`, what may reach foreign code: what is known to be harmless, and the variables named in `more`."""
    return {name: value for name, value in env.items() if is_allowed(name, value) or name in more}


def launcher(python: str, more: Sequence[str] = ()) -> list[str]:
    """The command that starts `python` under the allow-list; arguments are appended."""
    return [python, "-P", "-m", "miles_verifiers.system.environ", ",".join(more), python]


def main(more: str, *command: str) -> None:
    os.execve(command[0], command, allowed(os.environ, [name for name in more.split(",") if name]))  # noqa: S606


if __name__ == "__main__":
    main(*sys.argv[1:])
