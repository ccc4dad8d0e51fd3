"""Hugging Face and Megatron-core parameters: one table, read in both directions.

The names are those of megatron-core 0.16 to 0.19, models/gpt/gpt_layer_specs.py. Its local layer spec has layer norms of
their own, its Transformer Engine spec fuses them into the linear layer behind; the table has both.

Axis legend: g query groups, q query heads per group, d head size, h hidden size, f feed-forward size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_verifiers.errors import ModelError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that the layouts below need."""

    groups: int
    heads_per_group: int
    head_size: int
    vocab_size: int
    padded_vocab_size: int
    """Megatron's, a multiple of what tensor parallel ranks share evenly; the rows behind vocab_size are zero."""


# A layout says how HF tensors lie within one unsharded Megatron tensor: `join` makes it of them, `part` undoes that.
# `view` gives a rank's piece the axes of the unsharded tensor.


@dataclass(frozen=True, slots=True)
class Layout:
    join: Callable[[Sequence[Tensor], Geometry], Tensor]
    part: Callable[[Tensor, Geometry], list[Tensor]]
    view: Callable[[Tensor], Tensor] = lambda piece: piece


def _join_qkv(parts: Sequence[Tensor], geometry: Geometry) -> Tensor:
    """q [g*q*d, ...], k [g*d, ...], v [g*d, ...] -> [g*(q+2)*d, ...]: each group's queries, then its key, then its value."""
    tail = parts[0].shape[1:]
    return torch.cat([part.reshape(geometry.groups, -1, *tail) for part in parts], dim=1).reshape(-1, *tail)


def _part_qkv(whole: Tensor, geometry: Geometry) -> list[Tensor]:
    tail = whole.shape[1:]
    sizes = [geometry.heads_per_group * geometry.head_size, geometry.head_size, geometry.head_size]
    return [part.reshape(-1, *tail) for part in whole.reshape(geometry.groups, -1, *tail).split(sizes, dim=1)]


def _join_vocabulary(parts: Sequence[Tensor], geometry: Geometry) -> Tensor:
    return torch.nn.functional.pad(parts[0], (0, 0, 0, geometry.padded_vocab_size - parts[0].shape[0]))


SAME = Layout(join=lambda parts, _: parts[0], part=lambda whole, _: [whole])
QKV = Layout(join=_join_qkv, part=_part_qkv)
# [2, f, h], sharded along f: each rank holds its rows of the gate and then its rows of the up projection.
GATE_UP = Layout(
    join=lambda parts, _: torch.stack(list(parts)),
    part=lambda whole, _: list(whole),
    view=lambda piece: piece.reshape(2, -1, piece.shape[-1]),
)
VOCABULARY = Layout(join=_join_vocabulary, part=lambda whole, geometry: [whole[: geometry.vocab_size]])


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the HF tensors that it is made of; `shard_dim` is split over tensor parallel ranks."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = SAME
    shard_dim: int | None = None


_IN_LAYER = (
    Rule("input_layernorm.weight", ("input_layernorm.weight",)),
    Rule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",)),
    *(
        Rule(f"self_attention.linear_qkv.{kind}", tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"), QKV, 0)
        for kind in ("weight", "bias")
    ),
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), shard_dim=1),
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
    Rule("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",)),
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GATE_UP, 1),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), shard_dim=1),
)
_OUTSIDE = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCABULARY, 0),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), VOCABULARY, 0),
)
_RULES: Mapping[tuple[bool, str], Rule] = {
    **{(True, rule.megatron): rule for rule in _IN_LAYER},
    **{(False, rule.megatron): rule for rule in _OUTSIDE},
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def rule_of(name: str) -> Rule | None:
    """The rule of a Megatron parameter with the names of its own layer filled in; None where there is none."""
    match = _LAYER.fullmatch(name)
    rule = _RULES.get((match is not None, match[2] if match else name))
    if rule is None or match is None:
        return rule
    return Rule(name, tuple(f"model.layers.{match[1]}.{hf}" for hf in rule.hf), rule.layout, rule.shard_dim)


def plan(megatron_names: Iterable[str], hf_names: Iterable[str] | None, *, tied: bool, where: str) -> dict[str, Rule]:
    """A rule for every Megatron parameter, complete on both sides.

    `hf_names` None leaves out the other side. Raises ModelError with every name that has no counterpart.
    """
    rules = {name: rule_of(name) for name in megatron_names}
    unmapped = sorted(name for name, rule in rules.items() if rule is None)
    known = {name: rule for name, rule in rules.items() if rule is not None}
    missing: list[str] = []
    unused: list[str] = []
    if hf_names is not None:
        available = {name for name in hf_names if not _without_meaning(name, tied)}
        wanted = {hf for rule in known.values() for hf in rule.hf}
        missing, unused = sorted(wanted - available), sorted(available - wanted)
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (
            ("Megatron parameters without a Hugging Face name", unmapped),
            ("tensors that the model needs and the folder lacks", missing),
            ("tensors of the folder that have no place in the model", unused),
        )
        if names
    ]
    if problems:
        raise ModelError(
            "weights cannot be mapped; " + "; ".join(problems),
            where=where,
            next_step="extend the table in miles_verifiers/training/megatron/mapping.py, or choose another model",
        )
    return known


@torch.no_grad()
def load(
    parameters: Mapping[str, Any],
    rules: Mapping[str, Rule],
    read: Callable[[str], Tensor],
    geometry: Geometry,
    *,
    rank: int,
    size: int,
) -> None:
    """Fill a tensor parallel rank's parameters from HF tensors. Raises ModelError if a shape does not fit."""
    for name, parameter in parameters.items():
        rule = rules[name]
        whole = rule.layout.join([read(hf) for hf in rule.hf], geometry)
        piece = whole if rule.shard_dim is None else whole.chunk(size, rule.shard_dim)[rank]
        if piece.numel() != parameter.numel():
            raise ModelError(
                f"{' + '.join(rule.hf)} gives {list(piece.shape)}, the model's {name} is {list(parameter.shape)}",
                next_step="config.json and the weights of the model folder do not belong together",
            )
        parameter.copy_(piece.reshape(parameter.shape))


@torch.no_grad()
def export(
    parameters: Mapping[str, Any],
    rules: Mapping[str, Rule],
    gather: Callable[[Tensor], list[Tensor]],
    geometry: Geometry,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, unsharded tensor) of every parameter. `gather` collects a piece from all tensor parallel ranks."""
    for name, parameter in parameters.items():
        rule = rules[name]
        piece = parameter.detach()
        if rule.shard_dim is None:
            whole = piece
        else:
            whole = torch.cat([rule.layout.view(part) for part in gather(piece)], dim=rule.shard_dim)
        yield from zip(rule.hf, rule.layout.part(whole, geometry), strict=True)


def _without_meaning(name: str, tied: bool) -> bool:
    """Old checkpoints store the rotary frequencies; with tied embeddings the head is only an alias."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
