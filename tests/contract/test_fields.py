"""The wire's table against the sources that are installed: a field that nobody decided about fails here."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from miles_verifiers.wire import fields


def source(package: str, path: str) -> ast.Module:
    """Parsed, not imported: SGLang takes its time, and has requirements that are another interpreter's."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse((Path(spec.origin).parent / path).read_text(encoding="utf-8"))


def fields_of(tree: ast.Module, name: str) -> set[str]:
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {item.target.id for item in body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}


def keys_written(tree: ast.Module, function: str, variable: str) -> set[str]:
    """Keys that `function` puts into its dict `variable`: in its literal, by subscript, by setdefault."""
    (scope,) = (n for n in tree.body if isinstance(n, ast.AsyncFunctionDef) and n.name == function)
    keys = set()
    for node in ast.walk(scope):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict(keys=literal)) if name == variable:
                keys |= {key.value for key in literal if isinstance(key, ast.Constant)}
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=key))]):
                keys |= {key} if name == variable else set()
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="setdefault"), args=[ast.Constant(value=key), *_]
            ):
                keys |= {key} if name == variable else set()
    return {key for key in keys if isinstance(key, str)}


SAMPLING_PARAMS = ("sglang", "srt/sampling/sampling_params.py", "SamplingParams")
GENERATE = ("sglang", "srt/managers/io_struct.py", "GenerateReqInput")


def sglang_fields(where: tuple[str, str, str]) -> set[str]:
    return fields_of(source(where[0], where[1]), where[2])


def test_every_sampling_parameter_of_sglang_is_in_the_table() -> None:
    assert sglang_fields(SAMPLING_PARAMS) - fields.SAMPLING.keys() == set()


def test_every_request_field_of_sglang_is_in_the_table() -> None:
    assert sglang_fields(GENERATE) - fields.SENT - fields.NOT_SENT.keys() == set()


def test_what_is_sent_exists_in_sglang() -> None:
    assert sglang_fields(GENERATE) >= fields.SENT
    targets = {field.target for field in fields.SAMPLING.values() if field.action == "map"}
    ours = {"n", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"}
    assert sglang_fields(SAMPLING_PARAMS) >= targets | ours


def test_every_field_of_renderers_is_in_the_table() -> None:
    tree = source("renderers", "client.py")
    body, sampling = keys_written(tree, "generate", "body"), keys_written(tree, "generate", "sp")
    assert {"model", "token_ids", "sampling_params", "cache_salt", "priority"} <= body  # the search finds something
    assert {"stop_token_ids", "logprobs", "skip_special_tokens"} <= sampling
    assert body - fields.BODY.keys() == set()
    assert sampling - fields.SAMPLING.keys() == set()


@pytest.mark.parametrize("name", ["temperature", "beam_width", "stop_regex"])
def test_a_field_that_is_taken_from_the_table_is_missed(name: str) -> None:
    """Control: the first test fails for a field that is in no list."""
    assert sglang_fields(SAMPLING_PARAMS) - (fields.SAMPLING.keys() - {name}) == {name}
