"""Taskset and environment as Verifiers loads and scores them. Needs Verifiers 0.3 or newer; no engine, no model."""

import pytest
import verifiers.v1 as vf
from code_golf.tasks import SUBSETS, SYSTEM_PROMPT
from verifiers.v1.episode import EnvInfo, Episode
from verifiers.v1.state import State
from verifiers.v1.trace import AgentInfo, TraceTask


def env_of(attempts=4, **settings):
    config = vf.resolve_env_config(
        {
            "taskset": {"id": "code-golf", **settings},
            "attempts": attempts,
            "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
        }
    )
    return vf.load_environment(config)


def trace_of(env, task, reply):
    trace = vf.Trace(
        task=TraceTask(type=type(task).__name__, data=task.data),
        state=State(),
        agent=AgentInfo(config=env.config.agent),
    )
    if reply is not None:
        message = vf.AssistantMessage(content=reply)
        trace.nodes.append(vf.MessageNode(message=message, sampled=True, parent=None))
    return trace


async def scored(replies):
    """Traces of one episode; a reply of None is an attempt that failed before it was scored."""
    env = env_of()
    task = next(iter(env.taskset))
    traces = [trace_of(env, task, reply) for reply in replies]
    for trace, reply in zip(traces, replies, strict=True):
        if reply is not None:
            await task.score(trace)
    episode = Episode(
        env=EnvInfo(id="code-golf"), task=TraceTask(type=type(task).__name__, data=task.data), traces=traces
    )
    await env.finalize(task, episode)
    return traces


@pytest.mark.parametrize("subset", sorted(SUBSETS))
def test_a_subset_becomes_its_tasks(subset):
    tasks = list(env_of(subset=subset).taskset)
    assert [task.data.expected for task in tasks] == [golf.expected for golf in SUBSETS[subset]]
    assert [task.data.prompt for task in tasks] == [golf.prompt for golf in SUBSETS[subset]]
    assert {task.data.system_prompt for task in tasks} == {SYSTEM_PROMPT}
    assert [task.data.idx for task in tasks] == list(range(len(tasks)))


def test_an_unknown_subset_is_refused():
    with pytest.raises(ValueError, match="subset"):
        env_of(subset="hard")


async def test_an_episode_of_every_kind():
    answer = f"print({SUBSETS['default'][0].expected!r})"
    replies = [f"```python\n{answer}\n```", f"x = 1\n{answer}", answer, "print('wrong')", f"{answer}\n1/0", "", None]
    traces = await scored(replies)
    values = [{name: reward.value for name, reward in trace.rewards.items()} for trace in traces]
    assert [trace.metrics.get("passed") for trace in traces] == [1, 1, 1, 0, 0, 0, None]
    assert [value.get("correct") for value in values] == [1, 1, 1, 0, 0, 0, None]
    assert [value["most_concise"] for value in values] == [0.25, 0, 0.25, 0, 0, 0, 0]
    assert sum(value["fastest"] for value in values) == pytest.approx(0.5)
    assert all(value["fastest"] == 0 for value in values[3:])
    assert all(set(trace.metrics) == {"passed", "latency"} for trace in traces[:-1])
    assert traces[0].info["code_golf"]["confinement"]["resources"] == "limited"


async def test_an_episode_in_which_nobody_passes_shares_nothing():
    assert [trace.reward for trace in await scored(["", "print('wrong')", None])] == [0, 0, 0]
