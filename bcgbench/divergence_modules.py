"""One transformer call under two arms: the first module whose output differs, and the operation in it.

Bounded memory: a first pass over each arm keeps digests only, later ones the outputs of a few modules that differ. An
eager arm is watched by hooks. A graph's modules give outputs only while it is captured, so the call is captured again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bcgbench import fidelity
from bcgbench.arms import Arm, Hook, Traced
from bcgbench.binding import Arguments
from bcgbench.divergence_align import Aligned, Contrast, Growth, alignments, contrast, differs, growths
from bcgbench.engine import trees
from bcgbench.engine.diagnose import Watch, digest
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.walk import backend_apart
from bcgbench.models.padding import OutsidePolicy

WINDOW_BYTES = 256 << 20
"""Module outputs of arm a kept on the host at once while looking for a difference above rounding."""
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
        return graphed.cache.find(graphed.sign(self.arguments).signature)

    def observe(self, see: See, *, entered: Iterable[str] = ()) -> None:
        """Run the call as the arm does, watched."""
        if self.graph is None:
            self.eagerly(see, entered=entered)
            return
        module, graphed = self.hook.module, self.hook.graphed
        probe = Probe(see, entered=entered, deferred=True, copied=not graphed.auto)
        backend = backend_apart(next(iter(trees.tensors(self.arguments))).device, module)
        graphed.recapture(self.arguments, backend=backend, watch=probe)

    def eagerly(self, see: See, *, entered: Iterable[str] = ()) -> Any:
        """Run the call eagerly on the arm's arguments, watched."""
        with Probe(see, entered=entered).hooked(self.hook.module):
            return self.hook.graphed.fall_back(self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFinding:
    """Where two arms differ first inside a call."""

    module: str
    """Path of the innermost module whose inputs do not differ and whose work gives the difference; "" the whole."""
    kind: str
    """Its class."""
    seen_at: str
    """Path of the first module, in execution order, whose output differs: `module` itself or a part of it."""
    operation: str | None
    """ATen operation of the first difference; None on a GPU, and where the arms do not run the same operations."""
    contrast: Contrast | None
    """None where the arms run different modules."""
    floor: float | None
    """Largest difference there between two eager runs of arm a."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Found:
    entry: int
    path: str
    name: str
    """Which of the module's outputs."""
    pair: Aligned
    whole: Tensor
    """Arm a's tensor, uncut."""


class Bisection:
    """Narrows one differing call down. `rounding` lets differences of a padded call's rounding pass."""

    def __init__(self, a: Side, b: Side, *, rounding: bool) -> None:
        self._a, self._b, self._rounding = a, b, rounding
        self._growths: tuple[Growth, ...] = growths(a.traced.arguments, a.arguments) or growths(
            b.traced.arguments, b.arguments
        )

    def run(self) -> ModuleFinding | None:
        """The finding; None where no submodule's output differs, so that it arises in the outermost forward's end."""
        entries_a, entries_b = _digests(self._a), _digests(self._b)
        candidates: list[tuple[int, int]] = []
        odd: str | None = None
        for entry in range(max(len(entries_a), len(entries_b))):
            one, other = entries_a.get(entry), entries_b.get(entry)
            if one is None or other is None or one[0] != other[0]:
                odd = f"one arm runs {one and one[0]} where the other runs {other and other[0]}"
                break
            if one[1] != other[1]:
                candidates.append((entry, one[2]))
        found = self._search(candidates)
        if found is not None:
            return self._finding(found)
        if odd is not None:
            return ModuleFinding(module="", kind=type(self._a.hook.module).__name__, seen_at="", operation=None,
                                 contrast=None, floor=None, note=odd)  # fmt: skip
        return None

    def _search(self, candidates: list[tuple[int, int]]) -> _Found | None:
        """The first candidate that differs, a window of outputs at a time."""
        for window in _windows(candidates, at_once=None if self._rounding else 1):
            kept = _keep(self._a, window)
            found: list[_Found] = []

            def look(event: Event, kept: dict[int, Event] = kept, found: list[_Found] = found) -> None:
                if event.entry in kept and not found:
                    found.extend(self._unlike(kept[event.entry], event))

            self._b.observe(look)
            if found:
                return found[0]
        return None

    def _unlike(self, a: Event, b: Event) -> Iterator[_Found]:
        for name in a.tensors.keys() & b.tensors.keys():
            pair = self._differs(a.tensors[name], b.tensors[name].cpu())
            if pair is not None and a.entry is not None:
                kept = Aligned(pair.rows, pair.a.clone(), pair.b.clone())
                yield _Found(a.entry, a.path, name, kept, a.tensors[name])

    def _differs(self, a: Tensor, b: Tensor) -> Aligned | None:
        return differs(alignments(a, b, self._growths), rounding=self._rounding)

    def _finding(self, found: _Found) -> ModuleFinding:
        owner = self._owner(found)
        root = self._a.hook.module
        name = found.path if found.name == "value" else f"{found.path} output {found.name}"
        return ModuleFinding(
            module=owner,
            kind=type(root.get_submodule(owner)).__name__,
            seen_at=found.path,
            operation=self._operation(found, owner),
            contrast=contrast(found.pair, name=name, rounding=self._rounding),
            floor=self._floor(found),
        )

    def _owner(self, found: _Found) -> str:
        """The innermost module around the difference whose own inputs are alike."""
        parts = found.path.split(".")
        chain = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        given_a, given_b = (_inputs(side, chain, until=found.entry) for side in (self._a, self._b))
        for path in chain:
            if path not in given_a or path not in given_b:  # a container such as a ModuleList is never called
                continue
            a, b = given_a[path], given_b[path]
            if not any(self._differs(a[name], b[name]) for name in a.keys() & b.keys()):
                return path
        return ""

    def _floor(self, found: _Found) -> float:
        """Largest difference of that output between two eager runs of arm a."""
        again = _keep(self._a, {found.entry}, eagerly=True)[found.entry].tensors[found.name]
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (found.whole, again))
        return fidelity.compare(a, b, name=found.path).max_abs

    def _operation(self, found: _Found, owner: str) -> str | None:
        if found.whole.is_meta or self._a.hook.graphed.device.type != "cpu":
            return None
        logs = [_operations(side, owner, until=found.entry) for side in (self._a, self._b)]
        for (name, a), (other, b) in zip(*logs, strict=False):
            if name != other or len(a) != len(b):
                return None
            if any(self._differs(x, y) for x, y in zip(a, b, strict=True)):
                return str(name)
        return None


def _digests(side: Side) -> dict[int, tuple[str, tuple[Any, ...], int]]:
    """By entry: the module, what tells its outputs apart, and their bytes."""
    found: dict[int, tuple[str, tuple[Any, ...], int]] = {}

    def see(event: Event) -> None:
        if event.entry is not None:
            told = tuple((name, t.shape, t.dtype, digest(t)) for name, t in event.tensors.items())
            found[event.entry] = event.path, told, sum(t.nbytes for t in event.tensors.values())

    side.observe(see)
    return found


def _windows(candidates: list[tuple[int, int]], *, at_once: int | None) -> Iterator[set[int]]:
    window: set[int] = set()
    size = 0
    for entry, nbytes in candidates:
        if window and (size + nbytes > WINDOW_BYTES or len(window) == at_once):
            yield window
            window, size = set(), 0
        window.add(entry)
        size += nbytes
    if window:
        yield window


def _on_host(event: Event) -> Event:
    return Event(event.path, event.entry, {name: t.to("cpu", copy=True) for name, t in event.tensors.items()})


def _keep(side: Side, wanted: set[int], *, eagerly: bool = False) -> dict[int, Event]:
    """The outputs of some entries, on the host."""
    kept: dict[int, Event] = {}

    def see(event: Event) -> None:
        if event.entry in wanted:
            kept[event.entry] = _on_host(event)

    (side.eagerly if eagerly else side.observe)(see)
    return kept


def _inputs(side: Side, paths: list[str], *, until: int) -> dict[str, dict[str, Tensor]]:
    """What each of these modules was given last before entry `until` returned, on the host."""
    given: dict[str, dict[str, Tensor]] = {}
    over: list[bool] = []

    def see(event: Event) -> None:
        if event.entry is None and not over:
            given[event.path] = _on_host(event).tensors
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
        if self.active and self._left > 0:
            kept = [tensor.clone() for tensor in trees.tensors(out)]
            self._left -= sum(tensor.nbytes for tensor in kept)
            self.results.append((func._schema.name, kept))
        return out


def _operations(side: Side, owner: str, *, until: int) -> list[tuple[str, list[Tensor]]]:
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
