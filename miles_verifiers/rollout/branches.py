"""A trace's branches -> token sequences to train on, so that every sampled token is trained exactly once. Pure.

A trace is a tree of messages, each with the token ids that it adds; a path from the root to a leaf (branch) is the exact
sequence that the model saw and sampled (verifiers/v1/graph.py and trace.py, 0.2.0 and 0.4.0). Where a later prompt does not
begin with the ids of the turn before it (a harness that compacts, a template that is not append-only, two answers asked of one
prefix), the tree forks:

    prompt - reply a - question - reply b             branch 1
                   \\ question - reply c - reply d     branch 2, the last one

Rules
- The last branch, that of the last reply, comes first and trains all that was sampled on it: a, c and d.
- Every other one, in the trace's order, trains what no sequence before it has: b. One that adds nothing is left out.
- A message is told by identity, not by its ids: the same answer sampled twice is two messages, and both are trained on.
- A response begins at the first token that is trained; what was sampled before it is prompt there. Tokens in it that are not
  trained have loss mask 0 and log-prob 0.0. Ids are taken as they are, never made again from text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from miles_verifiers.record.samples import Fork, WeightSpan
from miles_verifiers.wire.transport import Turn


class Node(Protocol):
    """One message: ids that it adds [n], mask [n] True on sampled ones, log-probs of the sampled ones only."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def mask(self) -> list[bool]: ...
    @property
    def logprobs(self) -> list[float]: ...


class Branch(Protocol):
    @property
    def nodes(self) -> Sequence[Node]: ...


@dataclass(slots=True)
class Unfolded:
    """The sequences of one rollout, the last branch's first."""

    sequences: list[Fork] = field(default_factory=list)
    replies: int = 0
    """Messages with sampled tokens, each counted once."""
    problem: str = ""
    """Why they cannot be trained on; then there may be sequences missing."""


def unfold(branches: Sequence[Branch], nodes: Sequence[Node], turns: Sequence[Turn]) -> Unfolded:
    """Token sequences of one or more `branches`.

    `nodes` are all messages of the trace in the order in which they came to be, the branches' among them (the same objects);
    `turns` what the transport recorded of the rollout, in order. Each sampled message finds the weights that made it there.
    """
    made_by = _turns_by_node(nodes, turns)
    seen: set[int] = set()
    unfolded = Unfolded()
    last = len(branches) - 1
    for number in (last, *range(last)):
        path = branches[number].nodes
        fresh = [node for node in path if id(node) not in seen]
        replies = [node for node in fresh if any(node.mask)]
        if number != last and not replies:
            continue
        problem = _problem(replies, made_by)
        if problem:
            unfolded.problem = problem if len(branches) == 1 else f"branch {number + 1} of {len(branches)}: {problem}"
            # For people: what was seen of a rollout stays in the dump, also where the response cannot be told from it.
            if number == last:
                unfolded.sequences.append(Fork([token for node in path for token in node.token_ids]))
            return unfolded
        unfolded.sequences.append(_sequence(path, seen, made_by))
        unfolded.replies += len(replies)
        seen.update(map(id, path))
    return unfolded


def _sequence(path: Sequence[Node], seen: set[int], made_by: Mapping[int, Turn]) -> Fork:
    """The sequence of a whole path, trained on its messages that are not among `seen`."""
    tokens: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    spans: list[WeightSpan] = []
    shared = 0
    for node in path:
        tokens += node.token_ids
        if id(node) in seen:  # a beginning of the path: the parents of a message that was seen were seen with it
            shared += len(node.token_ids)
            mask += [0] * len(node.token_ids)
            log_probs += [0.0] * len(node.token_ids)
            continue
        values = iter(node.logprobs)
        mask += map(int, node.mask)
        log_probs += [next(values) if is_sampled else 0.0 for is_sampled in node.mask]
        if any(node.mask):
            _extend(spans, made_by[id(node)].weight_versions)
    start = mask.index(1)
    return Fork(
        tokens=tokens,
        response_length=len(tokens) - start,
        loss_mask=mask[start:],
        rollout_log_probs=log_probs[start:],
        weight_versions=spans,
        shared_length=shared,
    )


def _problem(replies: Sequence[Node], made_by: Mapping[int, Turn]) -> str:
    for node in replies:
        if len(node.logprobs) != sum(node.mask):
            return f"a reply of {sum(node.mask)} tokens has {len(node.logprobs)} log-probs"
    if not replies:
        return "the reply is empty: no token was sampled"
    if any(id(node) not in made_by for node in replies):
        return "the weight version of a reply is not known"
    return ""


def _turns_by_node(nodes: Sequence[Node], turns: Sequence[Turn]) -> dict[int, Turn]:
    """Who made which message, by the message's id(). A message has no name for its turn but its ids, so each takes the
    first turn with these ids that none before it took; turns that no message shows (a reply that the harness never saw) stay."""
    rest = list(turns)
    found: dict[int, Turn] = {}
    for node in nodes:
        sampled = [token for token, is_sampled in zip(node.token_ids, node.mask, strict=True) if is_sampled]
        at = next((i for i, turn in enumerate(rest) if sampled and turn.token_ids == sampled), None)
        if at is not None:
            found[id(node)] = rest.pop(at)
    return found


def _extend(spans: list[WeightSpan], more: Sequence[WeightSpan]) -> None:
    """Append, equal neighbours merged."""
    for span in more:
        if spans and spans[-1].version == span.version:
            spans[-1].count += span.count
        else:
            spans.append(WeightSpan(span.version, span.count))
