"""One transformer call under two arms: the first module whose output differs, and the operation in it.

Memory is bounded: a first pass over each arm keeps digests only, later ones the outputs of a few modules that differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor

from bcgbench import fidelity
from bcgbench.divergence_align import Aligned, Contrast, Growth, alignments, contrast, differs, growths
from bcgbench.divergence_watch import Event, Side, inputs_of, keep, operations_of
from bcgbench.engine.diagnose import digest

WINDOW_BYTES = 256 << 20
"""Module outputs of arm a kept on the host at once while looking for a difference above rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFinding:
    """Where two arms differ first inside a call."""

    module: str
    """Path of the innermost module around the difference whose first input is alike; "" the outermost forward."""
    kind: str
    """Its class."""
    seen_at: str
    """Path of the first module, in execution order, whose output differs: `module` itself or a part of it."""
    operation: str | None
    """ATen operation of the first difference, or the first that one arm alone runs; None on a GPU, and where `inputs`
    bring it in."""
    inputs: tuple[str, ...]
    """Further inputs of `module` that differ already, such as a mask or positions."""
    contrast: Contrast | None
    """None where the arms run different modules."""
    floor: float | None
    """Largest difference there between two eager runs of arm a."""
    uncompared: tuple[str, ...] = ()
    """Earlier modules whose outputs could not be compared: other dtypes, or shapes unlike in several dimensions."""
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
        self._uncompared: dict[str, None] = {}
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
                                 inputs=(), contrast=None, floor=None, note=odd)  # fmt: skip
        return None

    def _search(self, candidates: list[tuple[int, int]]) -> _Found | None:
        """The first candidate that differs, a window of outputs at a time."""
        for window in _windows(candidates, at_once=None if self._rounding else 1):
            kept = keep(self._a, window)
            found: list[_Found] = []

            def look(event: Event, kept: dict[int, Event] = kept, found: list[_Found] = found) -> None:
                if event.entry in kept and not found:
                    found.extend(self._unlike(kept[event.entry], event))

            self._b.observe(look)
            if found:
                return found[0]
        return None

    def _unlike(self, a: Event, b: Event) -> Iterator[_Found]:
        if a.tensors.keys() != b.tensors.keys():
            self._uncompared[a.path] = None
        for name in (name for name in a.tensors if name in b.tensors):
            if not alignments(a.tensors[name], b.tensors[name], self._growths):
                self._uncompared[a.path] = None
            pair = self._differs(a.tensors[name], b.tensors[name].cpu())
            if pair is not None and a.entry is not None:
                kept = Aligned(pair.rows, pair.a.clone(), pair.b.clone())
                yield _Found(a.entry, a.path, name, kept, a.tensors[name])

    def _differs(self, a: Tensor, b: Tensor) -> Aligned | None:
        return differs(alignments(a, b, self._growths), rounding=self._rounding)

    def _finding(self, found: _Found) -> ModuleFinding:
        owner, inputs = self._owner(found)
        root = self._a.hook.module
        name = found.path if found.name == "value" else f"{found.path} output {found.name}"
        return ModuleFinding(
            module=owner,
            kind=type(root.get_submodule(owner)).__name__,
            seen_at=found.path,
            operation=None if inputs else self._operation(found, owner),
            inputs=inputs,
            contrast=contrast(found.pair, name=name, rounding=self._rounding),
            floor=self._floor(found),
            uncompared=tuple(self._uncompared),
        )

    def _owner(self, found: _Found) -> tuple[str, tuple[str, ...]]:
        """The innermost module around the difference whose first input is alike, and those of its inputs that are not.

        All earlier modules gave the same, so what differs was made between them, or is an argument of the call.
        """
        parts = found.path.split(".")
        chain = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        given_a, given_b = (inputs_of(side, chain, until=found.entry) for side in (self._a, self._b))
        for path in chain:
            if path not in given_a or path not in given_b:  # a container such as a ModuleList is never called
                continue
            a, b = given_a[path], given_b[path]
            shared = [name for name in a if name in b]
            unlike = tuple(name for name in shared if self._differs(a[name], b[name]))
            if shared[:1] != list(unlike[:1]):
                return path, unlike
        return "", ()

    def _floor(self, found: _Found) -> float:
        """Largest difference of that output between two eager runs of arm a."""
        again = keep(self._a, {found.entry}, eagerly=True)[found.entry].tensors[found.name]
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (found.whole, again))
        return fidelity.compare(a, b, name=found.path).max_abs

    def _operation(self, found: _Found, owner: str) -> str | None:
        if self._a.hook.graphed.device.type != "cpu":  # each result is kept
            return None
        log_a, log_b = (operations_of(side, owner, until=found.entry) for side in (self._a, self._b))
        names_a, names_b = [name for name, _ in log_a], [name for name, _ in log_b]
        alone: str | None = None
        # padding brings operations of its own, such as those that make a mask
        matched = SequenceMatcher(a=names_a, b=names_b, autojunk=False).get_opcodes()
        for kind, start_a, stop_a, start_b, stop_b in matched:
            if kind != "equal":
                alone = alone or f"{(names_a[start_a:stop_a] + names_b[start_b:stop_b])[0]}, run by one arm alone"
                continue
            for (name, a), (_, b) in zip(log_a[start_a:stop_a], log_b[start_b:stop_b], strict=True):
                if any(self._differs(x, y) for x, y in zip(a, b, strict=False)):
                    return name
        return alone


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
