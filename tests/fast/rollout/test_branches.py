"""Trees of messages -> token sequences: every sampled token is trained exactly once, on the exact path that led to it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_verifiers.record.samples import Fork, Sample, WeightSpan
from miles_verifiers.rollout.branches import Unfolded, unfold
from miles_verifiers.rollout.traces import Origin, Rollout, to_sample
from miles_verifiers.wire.transport import Turn


@dataclass
class Node:
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float] = field(default_factory=list)
    parent: int | None = None


@dataclass
class Branch:
    nodes: list[Node]


@dataclass
class Tree:
    """Messages in the order in which they came to be, as verifiers' Trace holds them."""

    nodes: list[Node] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    versions: dict[float, str] = field(default_factory=dict)
    """Which weights made a token, by its log-prob."""

    def given(self, ids: list[int], parent: int | None = None) -> int:
        self.nodes.append(Node(ids, [False] * len(ids), parent=parent))
        return len(self.nodes) - 1

    def said(self, ids: list[int], parent: int | None, version: str = "7", lead: tuple[int, ...] = (3,)) -> int:
        """A reply behind its generation prompt; its log-probs are told from all others'."""
        logprobs = [-float(len(self.nodes)) - i / 64 for i in range(len(ids))]
        self.nodes.append(Node([*lead, *ids], [False] * len(lead) + [True] * len(ids), logprobs, parent))
        self.versions |= dict.fromkeys(logprobs, version)
        self.turns.append(Turn(ids, [WeightSpan(version, len(ids))], prompt_tokens=0, seconds=0.0))
        return len(self.nodes) - 1

    def path(self, leaf: int) -> list[Node]:
        parent = self.nodes[leaf].parent
        return [*(self.path(parent) if parent is not None else []), self.nodes[leaf]]

    @property
    def leaves(self) -> list[int]:
        parents = {node.parent for node in self.nodes}
        return [number for number in range(len(self.nodes)) if number not in parents]

    @property
    def branches(self) -> list[Branch]:
        return [Branch(self.path(leaf)) for leaf in self.leaves]

    def unfolded(self) -> Unfolded:
        return unfold(self.branches, self.nodes, self.turns)

    def sample(self) -> Sample:
        trace = Trace(self.nodes, self.branches)
        return to_sample(Rollout(trace, self.turns), Origin(0, 0, 0, "env", "default"))


@dataclass
class Trace:
    nodes: list[Node]
    branches: list[Branch]
    rewards: dict[str, float] = field(default_factory=lambda: {"right": 1.0})
    metrics: dict[str, float] = field(default_factory=dict)
    error: None = None
    stop_condition: str | None = "agent_completed"
    is_truncated: bool = False
    last_reply: str = "it"


def ids_of(nodes: list[Node]) -> list[int]:
    return [token for node in nodes for token in node.token_ids]


def trained(sequence: Fork) -> list[float]:
    """Log-probs of the trained tokens, which in these tests say which token it is."""
    return [v for v, m in zip(sequence.rollout_log_probs, sequence.loss_mask, strict=True) if m]


def versions(sequence: Fork) -> list[str]:
    """Of each trained token."""
    return [span.version for span in sequence.weight_versions for _ in range(span.count)]


class TestByHand:
    def test_two_answers_of_one_prefix(self) -> None:
        tree = Tree()
        asked = tree.given([11, 12])
        first = tree.said([21, 2], asked)
        again = tree.given([14], first)
        tree.said([31, 32, 2], again)
        tree.said([41, 2], again, version="8")
        last, other = tree.unfolded().sequences
        assert last == Fork(
            tokens=[11, 12, 3, 21, 2, 14, 3, 41, 2],
            response_length=6,
            loss_mask=[1, 1, 0, 0, 1, 1],
            rollout_log_probs=[-1.0, -1.0 - 1 / 64, 0.0, 0.0, -4.0, -4.0 - 1 / 64],
            weight_versions=[WeightSpan("7", 2), WeightSpan("8", 2)],
            shared_length=0,
        )
        assert other == Fork(
            tokens=[11, 12, 3, 21, 2, 14, 3, 31, 32, 2],
            response_length=3,  # begins at its first trained token
            loss_mask=[1, 1, 1],
            rollout_log_probs=[-3.0, -3.0 - 1 / 64, -3.0 - 2 / 64],
            weight_versions=[WeightSpan("7", 3)],
            shared_length=6,
        )

    def test_branches_one_by_one_would_train_the_prefix_twice(self) -> None:
        """Control: what the tests below count."""
        tree = Tree()
        first = tree.said([21, 2], tree.given([11]))
        for ids in ([31, 2], [41, 2]):
            tree.said(ids, tree.given([14], first))
        alone = [unfold([branch], tree.nodes, tree.turns).sequences[0] for branch in tree.branches]
        counted = Counter(value for sequence in alone for value in trained(sequence))
        assert [counted[value] for value in tree.nodes[first].logprobs] == [2, 2]
        together = Counter(value for sequence in tree.unfolded().sequences for value in trained(sequence))
        assert set(together.values()) == {1}
        assert together.keys() == counted.keys()

    def test_compaction(self) -> None:
        """A new root with a summary: the sequences share nothing, and the summary is trained where it was sampled."""
        tree = Tree()
        said = tree.said([21, 2], tree.given([11]))
        tree.said([31, 2], tree.given([15], said))  # the summary
        tree.said([41, 2], tree.given([11, 31]))  # what it became is a prompt
        sample = tree.sample()
        assert (sample.tokens, sample.loss_mask) == ([11, 31, 3, 41, 2], [1, 1])
        (fork,) = sample.forks
        assert (fork.tokens, fork.loss_mask) == ([11, 3, 21, 2, 15, 3, 31, 2], [1, 1, 0, 0, 1, 1])
        assert fork.shared_length == 0
        assert (sample.turns, sample.generated_tokens, sample.sampled_tokens) == (3, 6, 6)
        assert (sample.status, sample.usable, sample.reward) == ("completed", True, 1.0)

    def test_a_prompt_that_was_rewritten(self) -> None:
        """A template that drops an earlier turn's thinking: the reply's other form is a message that nobody sampled."""
        tree = Tree()
        asked = tree.given([11])
        tree.said([91, 92, 21, 2], asked)
        kept = tree.given([21, 2], asked)
        tree.said([31, 2], tree.given([12], kept))
        last, other = tree.unfolded().sequences
        assert (last.tokens, last.response_length) == ([11, 21, 2, 12, 3, 31, 2], 2)
        assert (other.tokens, other.response_length, other.shared_length) == ([11, 3, 91, 92, 21, 2], 4, 1)

    def test_a_branch_that_adds_nothing_is_left_out(self) -> None:
        tree = Tree()
        said = tree.said([21, 2], tree.given([11]))
        tree.said([], said)  # an empty completion
        tree.given([12], said)
        tree.said([31, 2], tree.given([13], said))
        unfolded = tree.unfolded()
        assert len(tree.branches) == 3
        assert (len(unfolded.sequences), unfolded.replies, unfolded.problem) == (1, 2, "")

    def test_the_same_answer_sampled_twice_is_trained_twice(self) -> None:
        """Messages are told by identity: ids and prefix of these two are equal, and each was sampled."""
        tree = Tree()
        asked = tree.given([11])
        tree.said([21, 2], asked, version="7")
        tree.said([21, 2], asked, version="8")
        last, other = tree.unfolded().sequences
        assert last.tokens == other.tokens
        assert (last.loss_mask, other.loss_mask) == ([1, 1], [1, 1])
        assert (last.weight_versions, other.weight_versions) == ([WeightSpan("8", 2)], [WeightSpan("7", 2)])
        # Control: one message on two branches is trained once.
        shared = tree.nodes[1]
        last, other = unfold(
            [Branch([tree.nodes[0], shared, tree.nodes[2]]), Branch([tree.nodes[0], shared])], tree.nodes, tree.turns
        ).sequences
        assert (trained(last), trained(other)) == (shared.logprobs, tree.nodes[2].logprobs)

    def test_versions_are_found_in_the_order_of_the_messages(self) -> None:
        """The leaf of the second answer comes before that of the first, which went on."""
        tree = Tree()
        asked = tree.given([11])
        first = tree.said([21, 2], asked, version="1")
        goes_on = tree.said([22, 2], first, version="2")
        tree.said([21, 2], asked, version="3")
        tree.said([23, 2], goes_on, version="4")
        last, other = tree.unfolded().sequences
        assert [span.version for span in last.weight_versions] == ["1", "2", "4"]
        assert [span.version for span in other.weight_versions] == ["3"]


class TestProblems:
    def forked(self) -> Tree:
        tree = Tree()
        asked = tree.given([11])
        tree.said([21, 2], asked)
        tree.said([31, 32, 2], asked)
        return tree

    def test_log_probs_that_are_missing(self) -> None:
        tree = self.forked()
        assert tree.sample().usable
        tree.nodes[1].logprobs.pop()
        sample = tree.sample()
        assert (sample.status, sample.reward, sample.usable) == ("failed", None, False)
        assert sample.error.startswith("branch 1 of 2: a reply of 2 tokens has 1 log-probs")
        assert sample.tokens == [11, 3, 31, 32, 2]  # kept for people

    @pytest.mark.parametrize(("lost", "branch"), [(0, "branch 1 of 2"), (1, "branch 2 of 2")])
    def test_a_weight_version_that_is_not_known(self, lost: int, branch: str) -> None:
        tree = self.forked()
        del tree.turns[lost]
        sample = tree.sample()
        assert (sample.status, sample.usable) == ("failed", False)
        assert sample.error.startswith(f"{branch}: the weight version of a reply is not known")

    def test_a_last_branch_without_a_sampled_token(self) -> None:
        tree = self.forked()
        tree.said([], tree.given([12]))
        sample = tree.sample()
        assert (sample.status, sample.forks) == ("failed", [])
        assert sample.error.startswith("branch 3 of 3: the reply is empty")


@st.composite
def trees(draw: st.DrawFn, distinct: bool = False) -> Tree:
    """Any tree with a reply on its last branch; few ids and many equal replies among them, or none that are equal."""
    tree = Tree()
    ids = st.lists(st.integers(0, 9), max_size=4)
    parents: list[int | None] = [None]
    size = draw(st.integers(1, 12))
    for number in range(size):
        parent, last = draw(st.sampled_from(parents)), number == size - 1
        if not last and draw(st.booleans()):
            parents.append(tree.given(draw(ids), parent))
            continue
        reply = draw(ids.filter(bool) if last else ids)
        version = draw(st.sampled_from(["7", "8"]))
        parents.append(tree.said([100 + number] * len(reply) if distinct else reply, parent, version, tuple(draw(ids))))
    return tree


@given(trees())
def test_every_sampled_token_is_trained_once(tree: Tree) -> None:
    unfolded = tree.unfolded()
    assert unfolded.problem == ""
    sampled = Counter(value for node in tree.nodes for value in node.logprobs)
    assert Counter(value for sequence in unfolded.sequences for value in trained(sequence)) == sampled
    assert unfolded.replies == sum(any(node.mask) for node in tree.nodes)
    for sequence in unfolded.sequences:
        assert sequence.loss_mask[0] == 1
        assert len(sequence.loss_mask) == len(sequence.rollout_log_probs) == sequence.response_length
        assert not any(v for v, m in zip(sequence.rollout_log_probs, sequence.loss_mask, strict=True) if not m)
        assert versions(sequence) == [tree.versions[value] for value in trained(sequence)]
        assert all(a.version != b.version for a, b in pairwise(sequence.weight_versions))


@given(trees(distinct=True), st.randoms())
def test_turns_may_have_ended_in_another_order(tree: Tree, random: Random) -> None:
    """Of requests that ran side by side, that is."""
    random.shuffle(tree.turns)
    for sequence in tree.unfolded().sequences:
        assert versions(sequence) == [tree.versions[value] for value in trained(sequence)]


@given(trees())
def test_every_sequence_is_the_exact_path_of_its_tokens(tree: Tree) -> None:
    """By the log-probs, which name the messages: what is trained lies at the place that it has on the path from the root."""
    by_first = {node.logprobs[0]: number for number, node in enumerate(tree.nodes) if node.logprobs}
    sequences = tree.unfolded().sequences
    paths = [ids_of(branch.nodes) for branch in tree.branches]
    assert sequences[0].tokens == paths[-1]
    for number, sequence in enumerate(sequences):
        assert sequence.tokens in paths
        start = len(sequence.tokens) - sequence.response_length
        for offset, value in enumerate(sequence.rollout_log_probs):
            if sequence.loss_mask[offset] and value in by_first:
                path = tree.path(by_first[value])
                assert len(ids_of(path)) - sum(path[-1].mask) == start + offset
                assert sequence.tokens[: len(ids_of(path))] == ids_of(path)
        shared = sequence.tokens[: sequence.shared_length]
        assert number == 0 or any(shared == earlier.tokens[: len(shared)] for earlier in sequences[:number])
        assert sequence.shared_length <= start
