"""The capturing call: turns what a forward does into steps.

Each segment is executed when it closes, so breaks see real data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from bcgbench.engine import breaks, diagnose, trees
from bcgbench.engine.bridge import Bridge
from bcgbench.engine.buffers import Address, borrow
from bcgbench.engine.constants import (
    HOST_READ_OPS,
    FunctionWatch,
    HostConstants,
    OperationWatch,
    is_dynamic,
    is_read,
    without_modes,
)
from bcgbench.engine.segments import Backend, Segment
from bcgbench.engine.sharing import Shared, written
from bcgbench.engine.steps import Break, Guard, Kernel, Step
from bcgbench.errors import CaptureError

_COLLECTIVES = ("c10d::", "_c10d_functional", "c10d_functional")
"""How operations of torch.distributed begin."""


class Capture:
    """One capture in progress: turns a forward call into steps."""

    def __init__(self, backend: Backend, constants: HostConstants, *, module: nn.Module | None) -> None:
        self.steps: list[Step] = []
        self.held: dict[int, Tensor] = {}
        self.watch = diagnose.Watch()
        self.shared: Shared | None = None
        """Results that are made more than once; None where nothing may be shared."""
        self._backend = backend
        self._constants = constants
        self.module = module
        self._segment: Segment | None = None
        self._made: dict[int, StorageWeakRef] = {}
        self._unreturned = breaks.Unreturned()

    def run(self, forward: Callable[[], Any]) -> Any:
        """Call `forward`, recording; returns its output, which holds the data of this call."""
        try:
            with FunctionWatch(self._function), OperationWatch(self.operation), breaks.active(self):
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

    @property
    def _recording(self) -> bool:
        """Whether what the forward does becomes part of the graph: not inside a break."""
        return self._segment is not None

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

        borrowed = self._backend.options.borrowed_inputs

        def keep(leaf: Any) -> Any:
            return borrow(leaf) if borrowed and isinstance(leaf, Tensor) and self._is_made(leaf) else leaf

        return trees.map_leaves(keep, tree)

    @contextlib.contextmanager
    def _between_segments(self) -> Iterator[None]:
        """Close the segment for the block, in which torch calls are not recorded, and open the next."""
        self._end()
        yield
        self._begin()

    def run_break(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the segment, call, keep the call as a step, and hand the model the output's bridges."""
        if not self._recording:  # a break inside a break is part of it
            return function(*args, **kwargs)
        with self._between_segments():
            result = self._unreturned.call(function, args, kwargs)
            frozen_args, frozen_kwargs = self._freeze((args, kwargs))
            step = Break(function, frozen_args, frozen_kwargs, streams=list(self._backend.forks),
                         where=diagnose.call_site(self.module))  # fmt: skip
            self.steps.append(step)
        return self._bridge(step, result, trees.tensors((args, kwargs)))

    def _attend(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Break at an attention kernel. Of its results only the first is carried on; the rest is for its backward."""
        kernel = Kernel(func)
        output = self.run_break(kernel, args, kwargs)
        results = (output, *kernel.take_rest())
        if self.shared is not None:
            self.shared.note(None, func, args, kwargs, results)
        return results

    @contextlib.contextmanager
    def _unrecorded(self) -> Iterator[Segment]:
        """The open segment, in which nothing is recorded for the block."""
        segment, self._segment = self._segment, None
        assert segment is not None
        try:
            yield segment
        finally:
            self._segment = segment  # also after an error: `run` must find the open segment to abandon it

    def _bridge(self, step: Break, result: Any, given: list[Tensor]) -> Any:
        leaves, spec = trees.flatten(result)
        step.spec = spec
        made: dict[int, Tensor] = {}
        with self._unrecorded() as segment:
            owned = {tensor.untyped_storage()._cdata for tensor in given}
            for index, leaf in enumerate(leaves):
                if not isinstance(leaf, Tensor):
                    step.constants.append((index, leaf))
                elif leaf.untyped_storage()._cdata in owned:
                    step.views.append((index, Address.of(leaf)))
                elif id(leaf) not in made:
                    made[id(leaf)], bridge = self._place(segment, leaf)
                    step.bridges.append((index, bridge))
                    step.single = bridge if spec == trees.LEAF else None
        return trees.rebuild(spec, [made.get(id(leaf), leaf) for leaf in leaves])

    def _place(self, segment: Segment, leaf: Tensor) -> tuple[Tensor, Bridge]:
        """Memory of the open segment for the result of an eager call."""
        if self._backend.options.pooled_outputs or not self._unreturned.holds(leaf):
            tensor, bridge = segment.bridge(leaf)
        else:
            tensor, bridge = leaf, Bridge(leaf)
        self._note_made(tensor)
        return tensor, bridge

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
        if not self._recording:
            return function(*args, **kwargs)
        if is_read(function, args, kwargs) and self._reads_device(args, kwargs):
            # copied in the segment, as a constant is below: the model may write to what it read
            return trees.clone(self._guard(function, args, kwargs))
        kept = self._constants.serve(function, {"args": args, **kwargs})
        if kept is not None:
            return kept.clone()  # made on the device at every replay: the model may write to it
        result = function(*args, **kwargs)
        if function is torch.tensor and result.device.type != self._backend.device.type:
            self._note_made(result)  # data of the host that the forward may go on to write to
        return result

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An ATen operation about to run."""
        segment = self._segment
        if segment is None:
            return func(*args, **kwargs)
        name = func._schema.name
        if self._is_host_read(name, args, kwargs):
            value = self._guard(func, args, kwargs)
            return self.operation(torch.ops.aten.clone.default, (value,), {}) if isinstance(value, Tensor) else value
        if breaks.breaks_at(name):
            return self._attend(func, args, kwargs)
        self._refuse_dynamic(func, args)
        self._refuse_host_write(func, args, kwargs)
        self._refuse_collective(name)
        self._refuse_unreturned((args, kwargs))
        if self.shared is None:
            return self._recorded(segment, func, args, kwargs)
        key = self.shared.key(func, args, kwargs)
        # a side stream may be ahead of the work that made it
        out = None if self._backend.forks else self.shared.result(key)
        if out is None:
            out = self._recorded(segment, func, args, kwargs)
            self.shared.note(key, func, args, kwargs, out)
        return out

    def run_compiled(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Compiled code, between the graph breaks of torch.compile, as one operation."""
        segment = self._segment
        if segment is not None:
            self._refuse_unreturned(args)
        with without_modes():
            return function(*args) if segment is None else self._recorded(segment, function, args, {})

    def _recorded(self, segment: Segment, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in trees.tensors((args, kwargs)):
            if not self._is_made(tensor):
                self.held.setdefault(tensor.untyped_storage()._cdata, tensor)
        out = func(*args, **kwargs)
        for tensor in trees.tensors(out):
            if tensor.untyped_storage()._cdata not in self.held:
                self._note_made(tensor)
        segment.record(func, args, kwargs, out)
        return out

    def _refuse_host_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A graph of the device repeats no work of the host: state kept there would stay as captured."""
        if self._backend.device.type == "cpu":
            return
        if any(tensor.device.type == "cpu" and not self._is_made(tensor) for tensor in written(func, args, kwargs)):
            raise CaptureError(
                f"{func._schema.name} in {diagnose.call_site(self.module)} writes to a tensor of the host that the "
                "forward did not make; a replay would not. Keep it on the device, or break around it by name."
            )

    def _refuse_dynamic(self, func: Any, args: tuple[Any, ...]) -> None:
        if is_dynamic(func, args):
            name = func._schema.name
            what = "indexing with a mask" if name.startswith(("aten::index", "aten::_index")) else name
            raise CaptureError(
                f"{what} in {diagnose.call_site(self.module)}: the shape of its result depends on data, which a graph "
                "cannot hold. Use torch.where or index with integers, or run it eagerly: --break auto."
            )

    def _refuse_collective(self, name: str) -> None:
        if name.startswith(_COLLECTIVES):
            raise CaptureError(
                f"{name} in {diagnose.call_site(self.module)}: a collective may not be captured. A replay repeats the "
                "host's counters of its capture, and hangs where ranks disagree. Break at the function that calls it "
                "(--break attention,dotted.name)."
            )
