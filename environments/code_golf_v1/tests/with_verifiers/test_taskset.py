"""The taskset as Verifiers 0.2 loads and scores it. Needs an interpreter with Verifiers; no engine, no model."""

import pytest
import verifiers.v1 as vf
from code_golf_v1.tasks import SUBSETS, SYSTEM_PROMPT
from verifiers.v1.loaders import load_taskset, taskset_config_type
from verifiers.v1.state import State
from verifiers.v1.trace import TraceTask


def tasks_of(**settings):
    config = taskset_config_type("code-golf-v1").model_validate({"id": "code-golf-v1", **settings})
    return load_taskset(config).load()


def trace_of(task, reply):
    trace = vf.Trace(task=TraceTask(type=type(task).__name__, data=task.data), state=State())
    if reply is not None:
        message = vf.AssistantMessage(content=reply)
        trace.nodes.append(vf.MessageNode(message=message, sampled=True, parent=None))
    return trace


async def scored(task, replies):
    traces = [trace_of(task, reply) for reply in replies]
    for trace, reply in zip(traces, replies, strict=True):
        if reply is not None:  # a rollout that failed is not scored, but its group is
            await task.score(trace)
    await task.score_group(traces)
    return traces


@pytest.mark.parametrize("subset", sorted(SUBSETS))
def test_a_subset_becomes_its_tasks(subset):
    tasks = tasks_of(subset=subset)
    assert [task.data.expected for task in tasks] == [golf.expected for golf in SUBSETS[subset]]
    assert [task.data.prompt for task in tasks] == [golf.prompt for golf in SUBSETS[subset]]
    assert {task.data.system_prompt for task in tasks} == {SYSTEM_PROMPT}
    assert [task.data.idx for task in tasks] == list(range(len(tasks)))


def test_the_default_subset_is_the_default():
    assert [task.data.name for task in tasks_of()] == [golf.name for golf in SUBSETS["default"]]


def test_an_unknown_subset_is_refused():
    with pytest.raises(ValueError, match="subset"):
        tasks_of(subset="hard")


async def test_a_group_of_every_kind():
    task = tasks_of()[0]
    answer = f"print({task.data.expected!r})"
    replies = [f"```python\n{answer}\n```", f"x = 1\n{answer}", answer, "print('wrong')", f"{answer}\n1/0", "", None]
    traces = await scored(task, replies)
    assert [trace.metrics.get("passed") for trace in traces] == [1, 1, 1, 0, 0, 0, None]
    assert [trace.rewards.get("correct") for trace in traces] == [1, 1, 1, 0, 0, 0, None]
    assert [trace.rewards["most_concise"] for trace in traces] == [0.25, 0, 0.25, 0, 0, 0, 0]
    assert sum(trace.rewards["fastest"] for trace in traces) == pytest.approx(0.5)
    assert all(trace.rewards["fastest"] == 0 for trace in traces[3:])
    assert all(set(trace.rewards) == {"correct", "most_concise", "fastest"} for trace in traces[:-1])
    assert all(set(trace.metrics) == {"passed", "latency"} for trace in traces[:-1])
    passing, failing = traces[:3], traces[3:6]
    assert max(t.metrics["latency"] for t in passing) < min(t.metrics["latency"] for t in failing)
    assert passing[0].info["code_golf"]["confinement"]["resources"] == "limited"


async def test_a_group_in_which_nobody_passes_shares_nothing():
    traces = await scored(tasks_of()[0], ["", "print('wrong')", None])
    assert [trace.reward for trace in traces] == [0, 0, 0]
