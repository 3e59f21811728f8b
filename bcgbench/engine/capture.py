"""Capture a forward: warm call, rehearsal, capturing call, check.

While capturing, each segment is executed when it closes, so breaks see real data, and the captured output must equal
the rehearsal's bit for bit.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bcgbench.engine import breaks, diagnose, trees
from bcgbench.engine.breaks import BreakPolicy
from bcgbench.engine.buffers import Address, StaticInputs, borrow
from bcgbench.engine.constants import DYNAMIC_OPS, HOST_READ_OPS, FunctionWatch, HostConstants, Rehearsal, is_read
from bcgbench.engine.graph import Break, Guard, SegmentedGraph, Step
from bcgbench.engine.segments import Backend, Segment
from bcgbench.engine.signature import Call
from bcgbench.errors import CaptureError

Forward = Callable[[dict[str, Any]], Any]
"""A forward as the engine calls it: the bound arguments by name."""


class _Observer(TorchDispatchMode):
    """Sees every operation of the forward, also those issued below Python."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capture = capture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._capture.operation(func, args, kwargs or {})


class Capture:
    """One capture in progress: turns a forward call into steps."""

    def __init__(self, backend: Backend, constants: HostConstants, *, module: nn.Module | None) -> None:
        self.steps: list[Step] = []
        self.held: dict[int, Tensor] = {}
        self.watch = diagnose.Watch()
        self._backend = backend
        self._constants = constants
        self.module = module
        self._segment: Segment | None = None
        self._made: dict[int, StorageWeakRef] = {}
        self._unreturned = breaks.Unreturned()

    def run(self, forward: Callable[[], Any]) -> Any:
        """Call `forward`, recording; returns its output, which holds the data of this call."""
        try:
            with FunctionWatch(self._function), _Observer(self), breaks.active(self):
                self._begin()
                output = forward()
                self._end()
                self._refuse_unreturned(output)
        except BaseException:
            if self._segment is not None:
                self._segment.abandon()
                self._segment = None
            raise
        self._constants.check_all_served()
        return output

    def _begin(self) -> None:
        segment = self._backend.segment()
        self._segment = segment  # before it begins: one that fails while it begins must be abandoned too
        segment.begin()

    def _end(self) -> None:
        segment, self._segment = self._segment, None
        assert segment is not None
        try:
            segment.end()
        except RuntimeError:
            segment.abandon()
            raise
        if segment.nodes != 0:
            self.steps.append(segment)
        self.watch.settle()

    def _is_made(self, tensor: Tensor) -> bool:
        """Whether this capture wrote the tensor, so that every replay rewrites it before it is read."""
        return tensor.untyped_storage()._cdata in self._made

    def _note_made(self, tensor: Tensor) -> None:
        # a weak reference keeps the identity from being reused after the model freed the tensor
        reference = StorageWeakRef(tensor.untyped_storage())
        self._made[reference.cdata] = reference

    def _refuse_unreturned(self, tree: Any) -> None:
        if any(self._unreturned.holds(tensor) and not self._is_made(tensor) for tensor in trees.tensors(tree)):
            raise CaptureError(
                f"A tensor that a break made but did not return is used in {diagnose.call_site(self.module)}; a "
                "replay would use the captured one. Return it from the break."
            )

    def _freeze(self, tree: Any) -> Any:
        """What a break keeps of its arguments: views of what this graph writes, strong references to the rest."""
        self._refuse_unreturned(tree)

        def keep(leaf: Any) -> Any:
            return borrow(leaf) if isinstance(leaf, Tensor) and self._is_made(leaf) else leaf

        return trees.map_leaves(keep, tree)

    @contextlib.contextmanager
    def _between_segments(self) -> Iterator[None]:
        """Close the segment for the block, in which torch calls are not recorded, and open the next."""
        self._end()
        yield
        self._begin()

    def run_break(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the segment, call, keep the call as a step, and hand the model the output's bridges."""
        if self._segment is None:  # a break inside a break is part of it
            return function(*args, **kwargs)
        with self._between_segments():
            result = self._unreturned.call(function, args, kwargs)
            frozen_args, frozen_kwargs = self._freeze((args, kwargs))
            step = Break(function, frozen_args, frozen_kwargs, streams=list(self._backend.forks))
            self.steps.append(step)
        return self._bridge(step, result, trees.tensors((args, kwargs)))

    def _bridge(self, step: Break, result: Any, given: list[Tensor]) -> Any:
        owned = {tensor.untyped_storage()._cdata for tensor in given}
        leaves, spec = trees.flatten(result)
        step.spec = spec
        made: dict[int, Tensor] = {}
        segment, self._segment = self._segment, None  # nothing here is recorded
        assert segment is not None
        try:
            for index, leaf in enumerate(leaves):
                if not isinstance(leaf, Tensor):
                    step.constants.append((index, leaf))
                elif leaf.untyped_storage()._cdata in owned:
                    step.views.append((index, Address.of(leaf)))
                elif id(leaf) not in made:
                    made[id(leaf)], bridge = segment.bridge(leaf)
                    self._note_made(made[id(leaf)])
                    step.bridges.append((index, bridge))
        finally:
            self._segment = segment  # also after an error: `run` must find the open segment to abandon it
        return trees.rebuild(spec, [made.get(id(leaf), leaf) for leaf in leaves])

    def _guard(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where = f"{getattr(function, '__name__', function)} in {diagnose.call_site(self.module)}"
        with self._between_segments():
            value = function(*args, **kwargs)
            frozen_args, frozen_kwargs = self._freeze((args, kwargs))
            # a copy: `numpy` of a CPU tensor is the tensor's own memory, and would always equal itself at replay
            expected = value.copy() if isinstance(value, np.ndarray) else trees.clone(value)
            self.steps.append(Guard(function, frozen_args, frozen_kwargs, expected, where))
        return value

    def _reads_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        found = trees.tensors((args, kwargs))
        return any(tensor.device.type == self._backend.device.type for tensor in found)

    def _is_host_read(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        to_host = name == "aten::_to_copy" and str(kwargs.get("device")) == "cpu" and self._backend.device.type != "cpu"
        return (to_host or name in HOST_READ_OPS) and self._reads_device(args, kwargs)

    def _function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch call as Python wrote it."""
        if self._segment is None:
            return function(*args, **kwargs)
        if is_read(function, args, kwargs) and self._reads_device(args, kwargs):
            # copied in the segment, as a constant is below: the model may write to what it read
            return trees.clone(self._guard(function, args, kwargs))
        kept = self._constants.serve(function, {"args": args, **kwargs})
        # a copy, made on the device at every replay: the model may write to it
        return function(*args, **kwargs) if kept is None else kept.clone()

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An ATen operation about to run."""
        if self._segment is None:
            return func(*args, **kwargs)
        name = func._schema.name
        if self._is_host_read(name, args, kwargs):
            value = self._guard(func, args, kwargs)
            return self.operation(torch.ops.aten.clone.default, (value,), {}) if isinstance(value, Tensor) else value
        self._refuse_dynamic(func, name, args)
        self._refuse_unreturned((args, kwargs))
        for tensor in trees.tensors((args, kwargs)):
            if not self._is_made(tensor):
                self.held.setdefault(tensor.untyped_storage()._cdata, tensor)
        out = func(*args, **kwargs)
        for tensor in trees.tensors(out):
            if tensor.untyped_storage()._cdata not in self.held:
                self._note_made(tensor)
        self._segment.record(func, args, kwargs, out)
        return out

    def _refuse_dynamic(self, func: Any, name: str, args: tuple[Any, ...]) -> None:
        masked = name in {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"} and any(
            tensor.dtype in {torch.bool, torch.uint8} for tensor in trees.tensors(args[1])
        )
        overload = f"{name}.{func._schema.overload_name}" if func._schema.overload_name else name
        if masked or name in DYNAMIC_OPS or overload in DYNAMIC_OPS:
            what = "indexing with a mask" if masked else name
            raise CaptureError(
                f"{what} in {diagnose.call_site(self.module)}: the shape of its result depends on data, which a graph "
                "cannot hold. Use torch.where or index with integers, or put the code in a function and break there."
            )


def capture(
    forward: Forward, call: Call, *, backend: Backend, policy: BreakPolicy, module: nn.Module | None, step_limit: int
) -> SegmentedGraph:
    """Capture `forward(arguments)` for the signature of `call`, in three passes: warm, rehearsal, capture.

    Raises `CaptureError` if the forward cannot be captured or replays differently; the process is then usable, the
    generator where it was. Raises `ProcessPoisoned` if it is not.
    """
    if torch.is_grad_enabled():
        raise CaptureError("Grad mode is on; a graph holds inference only. Call the model under torch.no_grad().")
    inputs = StaticInputs(call.leaves, backend.device)

    def run() -> Any:  # rebuilt at each pass: a model may change a list that it was given
        return forward(trees.rebuild(call.signature.spec, inputs.leaves))

    with backend.capturing():
        before = inputs.versions
        run()
        backend.rewind()
        constants = HostConstants(backend.device)
        rehearsal = Rehearsal(constants)
        with FunctionWatch(rehearsal.handle), breaks.active(rehearsal), policy.patched():
            expected = trees.clone(run())
        backend.rewind()
        _check_unwritten(before, inputs)
        recorder = Capture(backend, constants, module=module)
        output = _record(recorder, run, backend, policy)
    _check_limits(recorder, step_limit)
    diagnose.check_same(expected, output, explain=lambda: _first_module(run, backend, policy, module))
    return SegmentedGraph(call.signature, inputs, recorder.steps, output, list(recorder.held.values()))


def _record(recorder: Capture, run: Callable[[], Any], backend: Backend, policy: BreakPolicy) -> Any:
    """The capturing call. After a failure the backend is recovered; an error that is not the engine's is wrapped."""
    try:
        with policy.patched():
            return recorder.run(run)
    except (CaptureError, KeyboardInterrupt, torch.OutOfMemoryError):
        backend.recover()
        raise
    except Exception as error:
        backend.recover()
        raise CaptureError(
            f"Capture failed in {diagnose.error_site(error, recorder.module)}: {type(error).__name__}: {error}. "
            "Break around that call (--break dotted.name), or run this model eagerly."
        ) from error


def _check_unwritten(before: list[int | None], inputs: StaticInputs) -> None:
    for index, (old, new) in enumerate(itertools.zip_longest(before, inputs.versions)):
        if old != new:
            raise CaptureError(
                f"The forward writes to its tensor argument {index} in place; the caller of a graph would not see it. "
                "Clone the argument inside the forward."
            )


def _check_limits(recorder: Capture, step_limit: int) -> None:
    if len(recorder.steps) > step_limit:
        raise CaptureError(
            f"The capture has {len(recorder.steps)} steps, the limit is {step_limit}. Break at fewer functions, or "
            "raise the limit."
        )


def _first_module(run: Callable[[], Any], backend: Backend, policy: BreakPolicy, module: nn.Module | None) -> str:
    """Run once eagerly and once capturing with every module's output digested; name the first that differs."""
    if module is None:
        return "no module is known"
    with backend.capturing():
        eager = diagnose.Watch()
        with eager.hooked(module):
            run()
            eager.settle()
        backend.rewind()
        constants = HostConstants(backend.device)
        rehearsal = Rehearsal(constants)
        with FunctionWatch(rehearsal.handle), breaks.active(rehearsal), policy.patched():
            run()
        backend.rewind()
        recorder = Capture(backend, constants, module=module)
        with recorder.watch.hooked(module):
            _record(recorder, run, backend, policy)
    return diagnose.first_difference(eager, recorder.watch)
