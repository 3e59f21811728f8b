"""What happens inside one transformer call of an arm, as its submodules and operations are seen to work.

An eager arm is watched by hooks, at once. A graph's modules give outputs only while it is captured, so the call is
captured again, into memory of its own. There a segment's outputs live until it has run: with `graph`, all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bcgbench.arms import Arm, Hook
from bcgbench.binding import Arguments, Traced
from bcgbench.engine import trees
from bcgbench.engine.diagnose import Watch
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.walk import backend_apart
from bcgbench.models.padding import OutsidePolicy

OPERATION_BYTES = 1 << 30
"""Results kept at most to name an operation, on a CPU."""


@dataclass(frozen=True, slots=True)
class Event:
    """A submodule is called, or has returned."""

    path: str
    entry: int | None
    """Position of its return among all returns; None when it is called."""
    tensors: dict[str, Tensor]


See = Callable[[Event], None]


class Probe(Watch):
    """Hands what submodules get and give to `see`, at once or, in a capture, when the segment has run."""

    def __init__(self, see: See, *, entered: Iterable[str] = (), deferred: bool = False, copied: bool = False) -> None:
        super().__init__()
        self._see, self._entered, self._deferred, self._copied = see, set(entered), deferred, copied
        self._events: list[Event] = []
        self._count = 0

    @contextlib.contextmanager
    def hooked(self, module: nn.Module) -> Iterator[None]:
        """Watch the module's submodules until the block ends; begins to count anew."""
        self._events.clear()
        self._count = 0
        handles: list[Any] = []
        for path, child in module.named_modules():
            if path in self._entered and path:
                handles.append(child.register_forward_pre_hook(self._on_call(path), with_kwargs=True))
            if path:
                handles.append(child.register_forward_hook(self._on_return(path)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def settle(self) -> None:
        """Hand on what waited for its data."""
        events, self._events = self._events, []
        for event in events:
            self._see(event)

    def _on_call(self, path: str) -> Callable[..., None]:
        def called(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._note(path, None, {**dict(enumerate(args)), **kwargs})

        return called

    def _on_return(self, path: str) -> Callable[..., None]:
        def returned(_module: nn.Module, _args: Any, output: Any) -> None:
            self._count += 1
            self._note(path, self._count - 1, output)

        return returned

    def _note(self, path: str, entry: int | None, tree: Any) -> None:
        # below torch functions: nothing of this is a call of the model, which a capture would count
        with torch._C.DisableTorchFunction():
            leaves, spec = trees.flatten(tree)
            named = {
                name: leaf for name, leaf in zip(trees.paths(spec), leaves, strict=True) if isinstance(leaf, Tensor)
            }
            if self._copied:  # a later operation of the segment may write to it
                named = {name: tensor.clone() for name, tensor in named.items()}
            self._events.append(Event(path, entry, named))
            if not self._deferred:
                self.settle()


@dataclass(frozen=True, slots=True)
class Side:
    """One arm on one traced call."""

    arm: Arm
    traced: Traced

    @property
    def hook(self) -> Hook:
        """The hook of the denoiser that was called."""
        return self.arm.hooks[self.traced.module]

    @property
    def arguments(self) -> Arguments:
        """What the forward gets: native where the length policy has no shape."""
        try:
            return self.hook.pad(self.traced.arguments)
        except OutsidePolicy:
            return self.traced.arguments

    @property
    def graph(self) -> SegmentedGraph | None:
        """The graph that serves this call; None where it runs eagerly."""
        graphed = self.hook.graphed
        return graphed.serving(graphed.sign(self.arguments))

    def observe(self, see: See, *, entered: Iterable[str] = ()) -> None:
        """Run the call as the arm does, watched."""
        if self.graph is None:
            self.eagerly(see, entered=entered)
            return
        module, graphed = self.hook.module, self.hook.graphed
        probe = Probe(see, entered=entered, deferred=True, copied=not graphed.auto)
        backend = backend_apart(graphed.device, module)
        graphed.recapture(self.arguments, backend=backend, watch=probe)

    def eagerly(self, see: See, *, entered: Iterable[str] = ()) -> Any:
        """Run the call eagerly on the arm's arguments, watched."""
        self.hook.graphed.calls += 1
        with Probe(see, entered=entered).hooked(self.hook.module):
            return self.hook.graphed.fall_back(self.arguments)


def on_host(event: Event) -> Event:
    return Event(event.path, event.entry, {name: t.to("cpu", copy=True) for name, t in event.tensors.items()})


def keep(side: Side, wanted: set[int], *, eagerly: bool = False) -> dict[int, Event]:
    """The outputs of some entries, on the host."""
    kept: dict[int, Event] = {}

    def see(event: Event) -> None:
        if event.entry in wanted:
            kept[event.entry] = on_host(event)

    (side.eagerly if eagerly else side.observe)(see)
    return kept


def inputs_of(side: Side, paths: list[str], *, until: int) -> dict[str, dict[str, Tensor]]:
    """What each of these modules was given last before entry `until` returned, on the host."""
    given: dict[str, dict[str, Tensor]] = {}
    over: list[bool] = []

    def see(event: Event) -> None:
        if event.entry is None and not over:
            given[event.path] = on_host(event).tensors
        elif event.entry == until:
            over.append(True)

    side.observe(see, entered=paths)
    return given


class _Log(TorchDispatchMode):
    """Results of each ATen operation while `active`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[tuple[str, list[Tensor]]] = []
        self.active = False
        self._left = OPERATION_BYTES

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.active and self._left > 0 and not func.is_view:
            kept = [tensor.clone() for tensor in trees.tensors(out)]
            self._left -= sum(tensor.nbytes for tensor in kept)
            self.results.append((func._schema.name, kept))
        return out


def operations_of(side: Side, owner: str, *, until: int) -> list[tuple[str, list[Tensor]]]:
    """The operations of `owner`'s last call before entry `until` returned, of an eager run."""
    log = _Log()
    log.active = not owner
    over: list[bool] = []

    def see(event: Event) -> None:
        if event.entry == until:
            over.append(True)
            log.active = False
        elif event.entry is None and not over:
            log.results.clear()
            log.active = True

    with log:
        side.eagerly(see, entered=[owner])
    return log.results
