"""Eager regions: calls on tensors whose shape depends on data, repeated on fresh values by every replay.

A call is kept as Python wrote it (`chunk`, `reshape(-1)`), not as the ATen operations below it: those hold the sizes of
the captured values. Tensors made by these calls have no place of their own. They live in slots, filled and emptied by
each replay, and every later call that takes one belongs to a region too, until the data are back in fixed memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from bcgbench.engine import trees
from bcgbench.engine.bridge import Bridge
from bcgbench.engine.buffers import Address
from bcgbench.engine.diagnose import same_value
from bcgbench.engine.keys import constant_key
from bcgbench.engine.steps import GuardFailed
from bcgbench.errors import CaptureError, StaticInputError

Values = dict[int, Tensor]
"""What the slots hold during one replay."""
_SIZED_BY_FIRST = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("index_put", "masked_scatter", "scatter", "scatter_add", "index_add", "index_copy")
)
"""Calls whose result has the shape of their first argument, whatever the shape of the others."""


class Slot:
    """Stands for a value that each replay makes anew."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass(slots=True)
class RegionCall:
    """One call of a region."""

    function: Callable[..., Any]
    where: str
    leaves: list[Any]
    """Of the arguments: slots, tensors in fixed memory, constants."""
    spec: trees.Spec
    returned: trees.Spec = trees.LEAF
    results: list[tuple[int, int]] = field(default_factory=list)
    """Output leaf and the slot that takes it."""
    same: list[tuple[int, int]] = field(default_factory=list)
    """Output leaf and the argument leaf that it is."""
    constants: list[tuple[int, Any]] = field(default_factory=list)
    """Output leaves that are not tensors (a shape, a number), with the values that the host went on with."""
    bridges: list[tuple[int, Bridge]] = field(default_factory=list)
    """Output leaf and where the next segment reads it."""
    drops: list[int] = field(default_factory=list)
    """Slots that no later call reads."""

    def reads(self) -> list[int]:
        """Slots among the arguments."""
        return [leaf.index for leaf in self.leaves if isinstance(leaf, Slot)]

    def replay(self, values: Values) -> None:
        """Call on the current values. Raises `GuardFailed` where the host went on with another result."""
        given = [values[leaf.index] if isinstance(leaf, Slot) else leaf for leaf in self.leaves]
        args, kwargs = trees.rebuild(self.spec, given)
        leaves, spec = trees.flatten(self.function(*args, **kwargs))
        if spec != self.returned:
            raise GuardFailed(f"{self.where} returned other containers than when captured", where=self.where)
        if any(leaves[index] is not given[argument] for index, argument in self.same):
            raise GuardFailed(f"{self.where} returned a copy, or its argument, unlike captured", where=self.where)
        for index, value in self.constants:
            if not same_value(leaves[index], value):
                text = f"host read at {self.where}: captured {value!r}, now {leaves[index]!r}"
                raise GuardFailed(text, where=self.where)
        try:
            for index, bridge in self.bridges:
                bridge.fill(leaves[index])
        except StaticInputError as error:
            raise GuardFailed(f"{self.where}: {error}", where=self.where) from None
        for index, slot in self.results:
            values[slot] = leaves[index]
        for slot in self.drops:
            del values[slot]


@dataclass(slots=True)
class Region:
    """Calls with no segment between them."""

    values: Values
    """Shared by all regions of a graph."""
    device: torch.device
    autocast: tuple[bool, torch.dtype]
    """As at the calls: a model may switch it off inside its forward."""
    calls: list[RegionCall] = field(default_factory=list)

    @property
    def guarded(self) -> bool:
        """Whether the host went on with a result."""
        return any(call.constants for call in self.calls)

    @property
    def label(self) -> str:
        """The first call and where it is, for a report."""
        more = f" and {len(self.calls) - 1} more" if len(self.calls) > 1 else ""
        return self.calls[0].where + more

    def replay(self) -> None:
        enabled, dtype = self.autocast
        with torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
            for call in self.calls:
                call.replay(self.values)


class FreshValues:
    """Which tensors of a running capture each replay makes anew, and the calls that make them."""

    def __init__(self) -> None:
        self.values: Values = {}
        self._calls: list[RegionCall] = []
        self._count = 0
        self._slots = WeakTensorKeyDictionary()  # the model alone decides how long a value lives
        self._storages: dict[int, StorageWeakRef] = {}

    def holds(self, tensor: Tensor) -> bool:
        """Whether this tensor, or the memory under it, was made by a call of a region."""
        return tensor in self._slots or tensor.untyped_storage()._cdata in self._storages

    def among(self, tree: Any) -> bool:
        """Whether any tensor of `tree` is made anew."""
        if self._count == 0:
            return False
        with torch._C.DisableTorchFunction():  # not a call of the forward, whose calls are numbered
            return any(map(self.holds, _tensors(tree)))

    def _slot(self, tensor: Tensor) -> Slot:
        if tensor not in self._slots:
            raise CaptureError(
                "A tensor whose shape depends on data was made where no torch call returned it; a replay could not "
                "make it again. Put the code in a function and break there."
            )
        return Slot(self._slots[tensor])

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, where: str,
        freeze: Callable[[Tensor], Tensor], run: Callable[..., Any],
    ) -> tuple[RegionCall, list[Any], list[int]]:  # fmt: skip
        """Run and keep a call. Returns it, its output leaves, and which of them have a shape that is known beforehand.

        `freeze` says how a tensor in fixed memory is kept. Raises `CaptureError` for a call that cannot be repeated.
        """
        given, spec = trees.flatten((args, kwargs))
        _check_repeatable(given, kwargs, where=where, fresh=self)
        kept = [
            (self._slot(leaf) if self.holds(leaf) else freeze(leaf)) if isinstance(leaf, Tensor) else leaf
            for leaf in given
        ]
        fixed = [leaf for leaf in given if isinstance(leaf, Tensor) and not self.holds(leaf)]
        places = [Address.of(tensor) for tensor in fixed]
        leaves, returned = trees.flatten(run(function, args, kwargs))
        if places != [Address.of(tensor) for tensor in fixed]:
            raise CaptureError(f"{where} resizes a tensor in fixed memory by data. Use its result instead.")
        call = RegionCall(function, where, kept, spec, returned)
        owned = {tensor.untyped_storage()._cdata for tensor in _tensors(given)}
        sized = function in _SIZED_BY_FIRST and bool(fixed) and given[0] is fixed[0]
        sized_leaves = []
        for index, leaf in enumerate(leaves):
            argument = next((at for at, other in enumerate(given) if other is leaf), None)
            if not isinstance(leaf, Tensor):
                call.constants.append((index, _constant(leaf, where=where)))
            elif argument is not None:
                call.same.append((index, argument))
            elif leaf.untyped_storage()._cdata not in owned and (sized or leaf.dim() == 0):
                sized_leaves.append(index)
            else:
                call.results.append((index, self._new_slot(leaf, owned)))
        self._calls.append(call)
        return call, leaves, sized_leaves

    def _new_slot(self, tensor: Tensor, owned: set[int]) -> int:
        """The slot of a result; its memory is fresh unless an argument owns it."""
        if tensor.untyped_storage()._cdata not in owned:
            reference = StorageWeakRef(tensor.untyped_storage())  # keeps the identity from being reused
            self._storages[reference.cdata] = reference
        if tensor not in self._slots:
            self._slots[tensor] = self._count
            self._count += 1
        return int(self._slots[tensor])

    def settle(self, output: Any) -> Any:
        """The forward's output with slots for fresh values; says for each call what it may drop."""

        def keep(leaf: Any) -> Any:
            return self._slot(leaf) if isinstance(leaf, Tensor) and self.holds(leaf) else leaf

        output = trees.map_leaves(keep, output)
        live = {leaf.index for leaf in trees.flatten(output)[0] if isinstance(leaf, Slot)}
        for call in reversed(self._calls):
            used = {*call.reads(), *[slot for _, slot in call.results]}
            call.drops = sorted(used - live)
            live |= used
        return output


def _tensors(tree: Any) -> list[Tensor]:
    """Tensors of a tree, those in slices included."""
    leaves = trees.flatten(tree)[0]
    parts = [part for leaf in leaves if isinstance(leaf, slice) for part in (leaf.start, leaf.stop, leaf.step)]
    return [leaf for leaf in (*leaves, *parts) if isinstance(leaf, Tensor)]


def _check_repeatable(given: list[Any], kwargs: dict[str, Any], *, where: str, fresh: FreshValues) -> None:
    if any(isinstance(leaf, slice) and fresh.among(leaf) for leaf in given):
        raise CaptureError(f"{where}: a slice is bounded by a tensor that depends on data. Use its item() instead.")
    out = kwargs.get("out")
    if out is not None and not all(map(fresh.holds, trees.tensors(out))):
        raise CaptureError(f"{where}: `out=` may be resized by data. Use the result instead.")


def _constant(value: Any, *, where: str) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()  # `numpy` of a CPU tensor is the tensor's own memory
    if constant_key(value) is None:
        raise CaptureError(
            f"{where} returned a {type(value).__name__}, which a replay cannot compare. Put the code that uses it in a "
            "function and break there."
        )
    return value
