"""Equal small results of one forward, made once: a graph holds them for all who ask.

A denoiser makes the same small tensors in each block: the joint mask, the additive mask of attention, an activation of
the timestep's embedding (seven kernels in each of Qwen-Image's 60 blocks). In eager mode they cost a launch each; in a
graph they are kernels of 2 us, and the data say that they are equal: the same operation on the same values.

Every value has a number, made of the operation and the numbers of what it read, so equal numbers are equal bits. What
is made twice is found in the rehearsal; the capture keeps the first and hands it out again. Nothing is shared in a
forward with breaks other than attention's kernels: a break is anybody's code and may write where it likes.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from bcgbench.engine import trees
from bcgbench.engine.constants import OperationWatch
from bcgbench.engine.keys import constant_key
from bcgbench.errors import CaptureError, SignatureError

LARGEST_BYTES = 2**20
"""Larger results are made anew: one that is kept until the forward ends takes memory from the others."""
_IMPURE = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
)
_WRITTEN_NEXT = ("empty", "new_empty", "_empty", "zeros", "new_zeros")
"""What is made to be written to, perhaps by a kernel that torch does not see."""

Key = Hashable
Table = dict[Key, int]
"""Number of each value; shared by the passes of one forward."""


@functools.lru_cache(maxsize=1024)
def is_pure(func: Any) -> bool:
    """Whether an operation of torch's own gives a new tensor that depends on its arguments alone."""
    schema = func._schema
    return (
        func.namespace == "aten"
        and not schema.is_mutable
        and bool(schema.returns)
        and all(value.alias_info is None for value in schema.returns)
        and not _IMPURE & set(func.tags)
        and not schema.name.removeprefix("aten::").startswith(_WRITTEN_NEXT)
    )


class Values:
    """The numbers of what lies in each tensor's memory, during one pass."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._count = itertools.count()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        """By storage; the weak reference keeps the identity from being reused."""

    def _number(self, key: Key) -> int:
        return self._table.setdefault(key, len(self._table))

    def _once(self) -> int:
        """The number of a value that equals no other of this pass."""
        return self._number(("once", next(self._count)))

    def _set(self, tensor: Tensor, number: int) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._known[reference.cdata] = reference, number

    def _storage(self, tensor: Tensor) -> int:
        """Number of a storage; one that this pass did not make is known by its identity."""
        identity = tensor.untyped_storage()._cdata
        if identity not in self._known:
            self._set(tensor, self._number(("given", identity)))
        return self._known[identity][1]

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
        """What a call computes; None if it cannot be told, or is no pure function of its arguments."""
        if not is_pure(func):
            return None
        leaves, spec = trees.flatten((args, kwargs))
        try:
            parts = [self._tensor(leaf) if isinstance(leaf, Tensor) else constant_key(leaf) for leaf in leaves]
        except SignatureError:
            return None
        return None if None in parts else (func, spec, tuple(parts), torch.get_default_dtype())

    def _tensor(self, tensor: Tensor) -> Hashable | None:
        if tensor.layout is not torch.strided:
            return None
        return (self._storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype,
                tensor.device, tensor.is_conj(), tensor.is_neg())  # fmt: skip

    def holds(self, key: Key, out: Any) -> bool:
        """Whether a result still is what the call made, and nothing was written to it."""
        return all(self._storage(tensor) == self._table.get((key, index))
                   for index, tensor in enumerate(trees.tensors(out)))  # fmt: skip

    def note(self, key: Key | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Number what an operation made or wrote."""
        given = {tensor.untyped_storage()._cdata for tensor in trees.tensors((args, kwargs))}
        for index, tensor in enumerate(trees.tensors(out)):
            if tensor.untyped_storage()._cdata not in given:
                self._set(tensor, self._once() if key is None else self._number((key, index)))
        for tensor in written(func, args, kwargs):
            self._set(tensor, self._once())


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation that it writes to."""
    if func._schema.is_mutable:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from trees.tensors(args[place] if place < len(args) else kwargs.get(argument.name))


class Repeats(OperationWatch):
    """The rehearsal's part: which values are made more than once, and never written to."""

    def __init__(self, table: Table) -> None:
        super().__init__(self._counted)
        self._values = Values(table)
        self._count: Counter[Key] = Counter()
        self._made: dict[int, tuple[StorageWeakRef, Key]] = {}
        self._written: set[Key] = set()

    def _counted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():
            key = self._values.key(func, args, kwargs)
            for tensor in written(func, args, kwargs):
                if made := self._made.get(tensor.untyped_storage()._cdata):
                    self._written.add(made[1])
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._values.note(key, func, args, kwargs, out)
            if key is not None and is_small(out):
                self._count[key] += 1
                for tensor in trees.tensors(out):
                    reference = StorageWeakRef(tensor.untyped_storage())
                    self._made[reference.cdata] = reference, key
        return out

    @property
    def found(self) -> frozenset[Key]:
        """What is worth keeping."""
        return frozenset(key for key, count in self._count.items() if count > 1) - self._written


def is_small(out: Any) -> bool:
    """Whether a result is tensors alone, of memory of their own, that together are small."""
    leaves = trees.flatten(out)[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return len(tensors) == len(leaves) and sum(t.untyped_storage().nbytes() for t in tensors) <= LARGEST_BYTES


class SharedWritten(CaptureError):
    """The forward writes to what it did not write to in the rehearsal: it must be captured without sharing."""


class Shared:
    """The capture's part: keeps the first of each repeated value and hands it out again."""

    def __init__(self, table: Table, wanted: frozenset[Key]) -> None:
        self._values = Values(table)
        self._wanted = wanted
        self._kept: dict[Key, Any] = {}
        self._lent: dict[int, StorageWeakRef] = {}
        """Storages that more than one tensor of the forward stands for."""

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
        """What a call computes. Raises `SharedWritten` if it writes to a value that was handed out twice."""
        with torch._C.DisableTorchFunction():
            if any(tensor.untyped_storage()._cdata in self._lent for tensor in written(func, args, kwargs)):
                raise SharedWritten
            return self._values.key(func, args, kwargs)

    def result(self, key: Key | None) -> Any:
        """The result of an equal call before; None if there is none."""
        if key not in self._kept:
            return None
        with torch._C.DisableTorchFunction():
            if not self._values.holds(key, self._kept[key]):
                return None
            for tensor in trees.tensors(self._kept[key]):
                reference = StorageWeakRef(tensor.untyped_storage())
                self._lent[reference.cdata] = reference
            return trees.map_leaves(Tensor.detach, self._kept[key])  # another object, as each call gives

    def note(self, key: Key | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An operation that ran: number what it made, and keep what will be made again."""
        with torch._C.DisableTorchFunction():
            self._values.note(key, func, args, kwargs, out)
            if key in self._wanted and is_small(out):
                self._kept[key] = out
