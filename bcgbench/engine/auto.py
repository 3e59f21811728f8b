"""Break policy `auto`: eager only where capture is illegal, found call by call.

Two ways to be illegal. A result whose shape depends on data is seen in the rehearsal; the call starts an eager region
(`regions.py`). Anything else (a library that synchronises, a copy from pageable memory) is found by attempt: the call
that raised becomes a break, and so do the calls on the same source line, since a block that is repeated 60 times would
otherwise cost 60 attempts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bcgbench.engine import diagnose, trees
from bcgbench.engine.constants import MAKERS, HostConstants, Rehearsal, is_dynamic
from bcgbench.engine.recorder import Capture
from bcgbench.engine.regions import FreshValues, Region
from bcgbench.engine.segments import Backend
from bcgbench.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Spot:
    """A torch function called on one line of source."""

    name: str
    file: str
    line: int

    @classmethod
    def of(cls, function: Any) -> Spot:
        """Where the model is calling `function`."""
        return cls(diagnose.function_name(function), *diagnose.source_line())

    def __str__(self) -> str:
        return f"{self.name} at {self.file.rpartition('/')[2]}:{self.line}"


@dataclass(slots=True)
class Plan:
    """What is known to be illegal in one forward. Calls are numbered in order, those inside breaks left out."""

    device: torch.device
    dynamic: dict[int, Any] = field(default_factory=dict)
    """Calls whose result has a shape that depends on data, with the function."""
    host: dict[int, list[Tensor]] = field(default_factory=dict)
    """Host tensors given to calls that also work on the device, as they were in the rehearsal."""
    illegal: list[Spot] = field(default_factory=list)
    """Where a capture failed."""

    def host_tensors(self, tree: Any) -> list[Tensor]:
        """Tensors that a call has to copy to the device by itself."""
        return [tensor for tensor in trees.tensors(tree) if tensor.device.type != self.device.type]

    def check_host(self, number: int, function: Any, tree: Any, *, where: str) -> None:
        """Raise `CaptureError` if a call that is to break was given other host data than in the rehearsal."""
        found = self.host_tensors(tree)
        known = self.host.get(number, [])
        changed = len(found) != len(known) or not all(map(diagnose.bit_equal, found, known))
        if changed or (function in MAKERS and found):  # equal ones were served as a constant
            raise CaptureError(
                f"{where} copies host data to the device that the forward makes anew and differently in each call; a "
                "replay would copy the captured ones. Make the data on the device, or break around the code that "
                "makes them (--break auto,dotted.name)."
            )


class Survey(Rehearsal):
    """The rehearsal under `auto`: also notes which calls are dynamic, and which are given host data."""

    def __init__(self, constants: HostConstants, plan: Plan) -> None:
        super().__init__(constants)
        self._plan = plan
        self._number = 0
        self._function: Any = None

    def handle(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._in_break:
            return function(*args, **kwargs)
        self._number += 1
        self._function = function
        found = [] if function in MAKERS else self._plan.host_tensors((args, kwargs))
        if found and len(found) < len(trees.tensors((args, kwargs))):
            self._plan.host[self._number] = [tensor.clone() for tensor in found]
        try:
            return super().handle(function, args, kwargs)
        finally:
            self._function = None

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        return _DynamicWatch(self.operation)

    def operation(self, func: Any, args: tuple[Any, ...]) -> None:
        """An ATen operation about to run."""
        if self._function is not None and is_dynamic(func, args):
            self._plan.dynamic[self._number] = self._function


class _DynamicWatch(TorchDispatchMode):
    """Shows every operation to `seen`."""

    def __init__(self, seen: Callable[[Any, tuple[Any, ...]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen(func, args)
        return func(*args, **(kwargs or {}))


_FIXED = frozenset({Tensor.dtype.__get__, Tensor.device.__get__, Tensor.layout.__get__, Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
                    Tensor.requires_grad.__get__, Tensor.ndim.__get__, Tensor.dim, Tensor.is_floating_point,  # type: ignore[attr-defined]
                    Tensor.is_complex})  # fmt: skip
"""What the host may ask of a tensor whose shape depends on data: the answer does not."""


class AutoCapture(Capture):
    """A capturing call in which the calls of a plan run eagerly."""

    def __init__(self, backend: Backend, constants: HostConstants, *, module: nn.Module | None, plan: Plan) -> None:
        super().__init__(backend, constants, module=module)
        self.failed: Spot | None = None
        """The torch call that raised."""
        self.fresh = FreshValues()
        self._plan = plan
        self._region: Region | None = None
        """The open region: no segment is open then, and the next operation outside it opens one."""
        self._number = 0

    @property
    def _recording(self) -> bool:
        return self._segment is not None or self._region is not None

    def _begin(self) -> None:
        with torch._C.DisableTorchFunction():  # no call of the forward: CUDA writes its generator's state here
            super()._begin()

    def _end(self) -> None:
        if self._region is None:
            with torch._C.DisableTorchFunction():
                super()._end()
        self._region = None

    def _refuse_unreturned(self, tree: Any) -> None:
        super()._refuse_unreturned([tensor for tensor in trees.tensors(tree) if not self.fresh.holds(tensor)])

    def _refuse_dynamic(self, func: Any, args: tuple[Any, ...]) -> None:
        if is_dynamic(func, args):
            raise CaptureError(
                f"{func._schema.name} in {diagnose.call_site(self.module)}: the shape of its result depends on data, "
                "and the call before did not come here, or it lies below any torch call. A forward must do the same "
                "work for the same arguments; or put the code in a function and break there."
            )

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._recording and self.fresh.among((args, kwargs)):
            raise CaptureError(
                f"{func._schema.name} in {diagnose.call_site(self.module)} works on a tensor whose shape depends on "
                "data, below any torch call. Put the code in a function and break there."
            )
        if self._region is not None:
            self._region = None
            self._begin()
        return super().operation(func, args, kwargs)

    def run_break(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self._number  # nothing in a break counts
        try:
            if self._recording and self.fresh.among((args, kwargs)):
                return self._call_in_region(function, args, kwargs)
            return super().run_break(function, args, kwargs)
        finally:
            self._number = number

    def _function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._recording:
            return function(*args, **kwargs)
        self._number += 1
        if self._is_dynamic(function):
            return self._call_in_region(function, args, kwargs)
        if self.fresh.among((args, kwargs)):
            if function in _FIXED:
                return function(*args, **kwargs)
            return self._call_in_region(function, args, kwargs)
        try:
            if self._is_illegal(function, (args, kwargs)):
                return self.run_break(function, args, kwargs)
            return super()._function(function, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            self.failed = self.failed or Spot.of(function)
            raise

    def _is_dynamic(self, function: Any) -> bool:
        if self._number not in self._plan.dynamic:
            return False
        expected = self._plan.dynamic[self._number]
        if function != expected:
            raise CaptureError(
                f"The forward called {diagnose.function_name(function)} where it called "
                f"{diagnose.function_name(expected)} in the call before. A forward must do the same work for the same "
                "arguments to be captured."
            )
        return True

    def _is_illegal(self, function: Any, tree: Any) -> bool:
        if not self._plan.illegal or Spot.of(function) not in self._plan.illegal:
            return False
        self._plan.check_host(self._number, function, tree, where=self._where(function))
        return True

    def _where(self, function: Any) -> str:
        return f"{diagnose.function_name(function)} in {diagnose.call_site(self.module)}"

    def _call_in_region(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = self._open_region()
        self._region = None  # nothing that the call does is recorded
        call, leaves, sized = self.fresh.call(
            function, args, kwargs, where=self._where(function), freeze=self._freeze, run=self._unreturned.call
        )
        region.calls.append(call)
        if not sized:
            self._region = region
            return trees.rebuild(call.returned, leaves)
        self._begin()  # what has a known shape is handed to the next segment
        with self._unrecorded() as segment:
            for index in sized:
                leaves[index], bridge = self._place(segment, leaves[index])
                call.bridges.append((index, bridge))
        return trees.rebuild(call.returned, leaves)

    def _open_region(self) -> Region:
        """The region that the next call belongs to."""
        kind = self._backend.device.type
        autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        if self._region is not None and self._region.autocast == autocast:
            return self._region
        self._end()
        region = Region(self.fresh.values, self._backend.device, autocast)
        self.steps.append(region)
        return region
