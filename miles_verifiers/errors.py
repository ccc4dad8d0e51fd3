"""The errors that users see, one tree.

    MilesVerifiersError
    ├── InputError                bad input, configuration or machine: nothing was started   exit 2
    │   ├── ConfigError
    │   ├── HostError             what this machine lacks: GPU, disk, port, permission
    │   ├── ModelError            a model source or folder that cannot be used
    │   └── EnvironmentPackageError
    ├── CheckFailed               the job ran, its result is not good                        exit 1
    │   ├── ParityError
    │   └── VerificationFailed
    ├── ComponentError            a part failed while it worked                              exit 3
    │   ├── ProcessFailed         a child process; carries exit code and last log lines
    │   │   ├── InstallError
    │   │   └── EngineError
    │   ├── RolloutError
    │   ├── TrainerError
    │   └── DumpError             a record that cannot be written, a file of a dump that cannot be read
    ├── WireError                 one generation request; carries the HTTP status            exit 3
    │   ├── RequestRefused        400
    │   │   ├── PromptTooLong     400   a budget that is used up, not a fault
    │   │   └── ModelUnknown      404
    │   ├── QueueFull             429
    │   ├── ReplyInvalid          502
    │   ├── GenerationAborted     502
    │   ├── EngineUnreachable     502
    │   ├── EngineBusy            503
    │   └── DeadlineExceeded      504
    └── Interrupted                                                                          exit 130

Every message names the thing, where it was found, and the next step. Ray and multiprocessing carry exceptions across
processes by pickling, which drops keyword arguments unless an error says how to rebuild itself: the base class does.
"""

from __future__ import annotations

import reprlib
from typing import Any, ClassVar, Self


def shown(value: object, most: int = 80) -> str:
    """`value`, which came from elsewhere, as a message names it: `most` characters, however long or deep it is.

    repr gives up at a list that is a thousand deep (3.11), which JSON may hold.
    """
    short = reprlib.Repr()
    short.maxlevel, short.maxdict = 4, 8
    short.maxstring = short.maxother = most
    return short.repr(value)[:most]


def _rebuild(cls: type[MilesVerifiersError], what: str, state: dict[str, Any]) -> MilesVerifiersError:
    error = cls.__new__(cls)
    Exception.__init__(error, what)
    error.__dict__.update(state)
    return error


class MilesVerifiersError(Exception):
    """Base of all errors of this package.

    `what` says what is wrong, `where` names the file, process or request, `next_step` what the user can do.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, what: str, *, where: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.next_step = next_step

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.next_step:
            lines.append(f"  next:  {self.next_step}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, dict(self.__dict__))

    def at(self, where: str) -> Self:
        """The same error, with a place where it had none."""
        if not self.where:
            self.where = where
        return self


class InputError(MilesVerifiersError):
    exit_code = 2


class ConfigError(InputError):
    pass


class HostError(InputError):
    pass


class ModelError(InputError):
    pass


class EnvironmentPackageError(InputError):
    pass


class CheckFailed(MilesVerifiersError):
    exit_code = 1


class ParityError(CheckFailed):
    pass


class VerificationFailed(CheckFailed):
    pass


class ComponentError(MilesVerifiersError):
    exit_code = 3


class ProcessFailed(ComponentError):
    """A child process ended with an error or was ended by a deadline.

    `returncode` is None where it had to be killed; `tail` holds the last lines that it printed.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        next_step: str = "",
        returncode: int | None = None,
        tail: list[str] | None = None,
    ) -> None:
        super().__init__(what, where=where, next_step=next_step)
        self.returncode = returncode
        self.tail = list(tail or [])

    def __str__(self) -> str:
        text = super().__str__()
        if self.tail:
            text += "\n  last lines:\n" + "\n".join(f"    {line}" for line in self.tail)
        return text


class InstallError(ProcessFailed):
    pass


class EngineError(ProcessFailed):
    pass


class RolloutError(ComponentError):
    pass


class TrainerError(ComponentError):
    pass


class DumpError(ComponentError):
    pass


class WireError(MilesVerifiersError):
    """One generation request failed. `status` is the HTTP status under which it is reported."""

    status: ClassVar[int] = 502


class RequestRefused(WireError):
    status = 400


class PromptTooLong(RequestRefused):
    """The prompt leaves no room for a reply: the rollout ends there, as truncated."""


class ModelUnknown(RequestRefused):
    status = 404


class QueueFull(WireError):
    status = 429


class ReplyInvalid(WireError):
    pass


class GenerationAborted(WireError):
    pass


class EngineUnreachable(WireError):
    pass


class EngineBusy(WireError):
    status = 503


class DeadlineExceeded(WireError):
    status = 504


class Interrupted(MilesVerifiersError):
    exit_code = 130
