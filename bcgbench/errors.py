"""Every error a user can meet. Each class knows its exit code; the command line turns it into one message.

    BcgbenchError                 7  anything not listed below
    ├── UsageError                2  bad input: unknown model, malformed resolution, unknown suite key, empty prompt
    ├── StoreError                2  a results folder that cannot be read or written, a newer schema
    ├── NothingMeasured           6  no record to report or compare
    ├── NotComparable             4  arms that were not run alike
    ├── EnvironmentFault          7  no GPU, no hub, not enough memory
    └── EngineError               4  the segmented graph could not do what was asked
        ├── SignatureError           a call that cannot be a graph key (too many leaves)
        ├── StaticInputError         an input whose shape or dtype differs from the captured one
        ├── CaptureError             a capture failed and was cleaned up; the process is usable
        ├── ReplayError              a replay raised; never turned into a silent eager call
        └── ProcessPoisoned          a failed capture left CUDA unusable: end this process

A message says what happened, what was expected and got, and what to do next.
"""

from __future__ import annotations


class BcgbenchError(Exception):
    """Base of every error that is shown to a user without a traceback."""

    exit_code = 7


class UsageError(BcgbenchError):
    """The input was wrong; nothing was run."""

    exit_code = 2


class StoreError(BcgbenchError):
    """A results folder or journal could not be read or written."""

    exit_code = 2


class NothingMeasured(BcgbenchError):
    """There is no record to answer the question with."""

    exit_code = 6


class NotComparable(BcgbenchError):
    """Two arms differ in more than the thing under test; the fields are named in the message."""

    exit_code = 4


class EnvironmentFault(BcgbenchError):
    """This machine lacks what the case needs: a GPU, memory, the model hub."""

    exit_code = 7


class EngineError(BcgbenchError):
    """Base of what the segmented-graph engine raises."""

    exit_code = 4


class SignatureError(EngineError):
    """A call that cannot be a graph key."""


class StaticInputError(EngineError):
    """An input does not have the shape, dtype or strides of the buffer that the graph reads."""


class CaptureError(EngineError):
    """A capture failed; allocator, generator and stream were restored."""


class ReplayError(EngineError):
    """A captured graph raised while it was replayed."""


class ProcessPoisoned(EngineError):
    """CUDA is not usable in this process any more; only a new process helps."""


class RankLost(Exception):
    """Another process of a parallel case did not take part in what all do together; it ends the case, not an arm."""


class RankFailed(Exception):
    """This process of a parallel case failed where the others wait for it; it ends the case. Raised from its cause."""


def first_line(error: BaseException) -> str:
    """What happened, without torch's and Ray's advice below it; "" for an error without a message."""
    return str(error).strip().partition("\n")[0]
