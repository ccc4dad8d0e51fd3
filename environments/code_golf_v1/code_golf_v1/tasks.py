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
    pass_rate: float = 0.0
    """Measured share of passing rollouts; the conditions stand above `SUBSETS`."""

    @property
    def prompt(self) -> str:
        return _PROMPT.format(what=self.what)


def _text(text: str, pass_rate: float = 0.0) -> Golf:
    return Golf(text, text, text, pass_rate)


def _result(expression: str, expected: str, pass_rate: float = 0.0) -> Golf:
    return Golf(expression, f"the result of {expression}", expected, pass_rate)


SUBSETS: dict[str, tuple[Golf, ...]] = {
    "default": (
        _text("Hello, World!"),
        _text("Hello, Alice!"),
        _text("Hello, Python!"),
        _text("Hello!"),
        _text("I love Python!"),
        _text("Good morning!"),
        _text("Goodbye!"),
        _result("17 + 25", "42"),
        _result("7 * 6", "42"),
        _result('len("hello")', "5"),
    ),
    "original": (
        Golf("sum of 1 to 100", "the sum of the integers from 1 to 100", "5050"),
        Golf("ten Fibonacci numbers", "the first ten Fibonacci numbers, separated by spaces", "0 1 1 2 3 5 8 13 21 34"),
        Golf("HELLO reversed", "the string HELLO reversed", "OLLEH"),
    ),
}
