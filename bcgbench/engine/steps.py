"""What a captured forward does between its segments: breaks and guards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from bcgbench.engine import trees
from bcgbench.engine.bridge import Bridge
from bcgbench.engine.buffers import Address
from bcgbench.engine.diagnose import function_name, same_value


class GuardFailed(Exception):
    """A host value differs from the captured one: this call needs another graph.

    Segments before the guard have run: a forward that draws random numbers has advanced the generator.
    """

    def __init__(self, text: str, *, where: str) -> None:
        super().__init__(text)
        self.where = where
        """The same for every failure of one guard, whatever value it met."""


class Step(Protocol):
    """Anything that a graph does at replay."""

    def replay(self) -> None:
        """Run on the current contents of memory. Raises `GuardFailed` if a host value changed."""


class Kernel:
    """One of torch's attention kernels as the function of a break, which gives the first of its results."""

    def __init__(self, operation: Any) -> None:
        self.__qualname__ = operation._schema.name.replace("::", ".")
        self._operation = operation
        self._rest: list[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        results = self._operation(*args, **kwargs)
        if self._rest is None:  # the capturing call, whose caller below Python expects all
            self._rest = list(results[1:])
        output: Tensor = results[0]
        return output

    def take_rest(self) -> list[Any]:
        """The other results of the first call, no longer kept here."""
        rest, self._rest = self._rest, []
        return rest or []


@dataclass(slots=True)
class Break:
    """A call that runs eagerly between two segments, on the captured argument objects."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    bridges: list[tuple[int, Bridge]] = field(default_factory=list)
    """Output leaf and where the next segment reads it."""
    constants: list[tuple[int, Any]] = field(default_factory=list)
    """Output leaves that are not tensors, with their captured values: the host went on with them."""
    views: list[tuple[int, Address]] = field(default_factory=list)
    """Output leaves that are parts of the arguments, with the place that the next segment reads."""
    spec: trees.Spec = trees.LEAF
    """Containers of the output."""
    single: Bridge | None = None
    """The bridge of an output that is one new tensor and nothing else, as an attention's is: no tree to walk."""
    streams: list[torch.cuda.Stream] = field(default_factory=list)
    """Side streams that the call uses; joined, so that the next segment sees its work."""
    where: str = ""
    """Module path and source line of the call."""

    @property
    def name(self) -> str:
        """The function that breaks."""
        return str(getattr(self.function, "__qualname__", self.function))

    @property
    def guarded(self) -> bool:
        """Whether the host went on with a part of the output."""
        return bool(self.constants)

    @property
    def label(self) -> str:
        """What breaks and where, for a report."""
        return f"{function_name(self.function)} in {self.where}"

    def replay(self) -> None:
        result = self.function(*self.args, **self.kwargs)
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)
        single = self.single
        if single is not None and isinstance(result, Tensor):
            single.fill(result)
        else:
            self._take(result)

    def _take(self, result: Any) -> None:
        """Any output: into the bridges, and compared where the host went on with it."""
        leaves, spec = trees.flatten(result)
        if spec != self.spec or not all(isinstance(leaves[index], Tensor) for index, _ in self.bridges):
            raise GuardFailed(
                "a break returned other containers, or no tensor where it returned one when captured", where=self.name
            )
        for index, bridge in self.bridges:
            bridge.fill(leaves[index])
        for index, place in self.views:
            if not isinstance(leaves[index], Tensor) or Address.of(leaves[index]) != place:
                raise GuardFailed("a break returned another part of its arguments than when captured", where=self.name)
        for index, value in self.constants:
            if not same_value(leaves[index], value):
                raise GuardFailed(f"a break returned {leaves[index]!r}, captured with {value!r}", where=self.name)


@dataclass(slots=True)
class Guard:
    """A value that the host read while capturing; a different one is a miss, never a stale result."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: Any
    where: str
    guarded: ClassVar[bool] = True

    def replay(self) -> None:
        value = self.function(*self.args, **self.kwargs)
        if not same_value(value, self.expected):
            text = f"host read at {self.where}: captured {_short(self.expected)}, now {_short(value)}"
            raise GuardFailed(text, where=self.where)


def _short(value: Any) -> str:
    return trees.describe(value) if isinstance(value, Tensor) and value.numel() > 1 else repr(value)[:60]
