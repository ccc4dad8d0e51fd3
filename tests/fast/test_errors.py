"""One tree, exit codes by branch, messages with place and next step, and errors that survive a process border."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

from miles_verifiers import errors
from miles_verifiers.errors import ConfigError, EngineError, InputError, MilesVerifiersError, ProcessFailed, WireError


def tree(root: type[MilesVerifiersError] = MilesVerifiersError) -> Iterator[type[MilesVerifiersError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


EXIT_CODES = {"InputError": 2, "CheckFailed": 1, "ComponentError": 3, "WireError": 3, "Interrupted": 130}


@pytest.mark.parametrize("kind", list(tree()), ids=lambda kind: kind.__name__)
def test_exit_codes_follow_the_branches(kind: type[MilesVerifiersError]) -> None:
    branch = next((base.__name__ for base in kind.__mro__ if base.__name__ in EXIT_CODES), None)
    assert kind("what").exit_code == EXIT_CODES.get(branch or "", 3)


def test_the_drawing_at_the_top_names_every_error() -> None:
    drawing = (errors.__doc__ or "").split("Every message", 1)[0]
    assert {word for line in drawing.splitlines() for word in line.split()} >= {kind.__name__ for kind in tree()}


def test_a_message_has_what_where_and_next_step() -> None:
    error = ConfigError("unknown profile 'x'", where="/profiles", next_step="take one of: cpu")
    assert str(error) == "unknown profile 'x'\n  where: /profiles\n  next:  take one of: cpu"
    assert str(ConfigError("bare")) == "bare"
    assert ConfigError("bare").args == ("bare",)


def test_a_place_is_added_only_where_there_was_none() -> None:
    assert ConfigError("what").at("here").where == "here"
    assert ConfigError("what", where="there").at("here").where == "there"


def test_a_failed_process_shows_its_last_lines() -> None:
    error = EngineError("the engine died", returncode=-9, tail=["loading", "Killed"])
    assert str(error).endswith("last lines:\n    loading\n    Killed")
    assert str(EngineError("the engine died")) == "the engine died"


@pytest.mark.parametrize("kind", list(tree()), ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_and_copying(kind: type[MilesVerifiersError]) -> None:
    more = {"returncode": 7, "tail": ["last"]} if issubclass(kind, ProcessFailed) else {}
    error = kind("what", where="where", next_step="next", **more)
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(back) is kind
        assert vars(back) == vars(error)
        assert (str(back), back.args) == (str(error), error.args)


def test_an_error_with_fields_of_its_own_survives_too() -> None:
    error = EngineError("died").at("engine 0")
    error.request = "r1"  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(error)).request == "r1"


def test_wire_errors_have_the_http_statuses_that_clients_know() -> None:
    known = {
        errors.RequestRefused: 400,
        errors.ReplyInvalid: 502,
        errors.GenerationAborted: 502,
        errors.EngineUnreachable: 502,
        errors.EngineBusy: 503,
        errors.DeadlineExceeded: 504,
    }
    assert {kind: kind.status for kind in known} == known
    assert all(400 <= kind.status <= 599 for kind in tree(WireError) if issubclass(kind, WireError))
    assert not issubclass(WireError, InputError)
