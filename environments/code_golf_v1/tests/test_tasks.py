"""The tasks can be solved, and only by solving them."""

import pytest
from code_golf_v1.sandbox import run_confined
from code_golf_v1.scoring import is_correct
from code_golf_v1.tasks import SUBSETS

SOLUTIONS = {
    "sum of 1 to 100": "print(sum(range(101)))",
    "ten Fibonacci numbers": "a, b = 0, 1\nfor _ in range(10): print(a, end=' '); a, b = b, a + b",
    "HELLO reversed": "print('HELLO'[::-1])",
}
ALL = [golf for golfs in SUBSETS.values() for golf in golfs]


@pytest.mark.parametrize("golf", ALL, ids=lambda golf: golf.name)
async def test_a_solution_passes_and_the_question_itself_does_not(golf):
    calculated = golf.what.removeprefix("the result of ")
    solution = SOLUTIONS.get(golf.name, f"print({calculated if calculated != golf.what else repr(golf.expected)})")
    outcome = await run_confined(solution)
    assert outcome.ok
    assert is_correct(outcome.stdout, golf.expected)
    if golf.what != golf.expected:
        assert not is_correct((await run_confined(f"print({golf.what!r})")).stdout, golf.expected)


@pytest.mark.parametrize("golfs", SUBSETS.values(), ids=SUBSETS)
def test_names_and_prompts_are_unique(golfs):
    assert len({golf.name for golf in golfs}) == len({golf.prompt for golf in golfs}) == len(golfs)


def test_the_default_tasks_are_neither_hopeless_nor_solved():
    assert len(SUBSETS["default"]) >= 8
    assert all(0.2 <= golf.pass_rate <= 0.8 for golf in SUBSETS["default"])
