"""Segments on a CPU with a graph's semantics: fixed storages, Python not run again, host constants frozen, outputs
overwritten. What the tape cannot see: faults of lifetime, memory pool, stream or kernel choice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bcgbench.engine import trees
from bcgbench.engine.bridge import Bridge
from bcgbench.engine.buffers import clone_strided
from bcgbench.engine.options import DEFAULT, Options
from bcgbench.engine.segments import Backend, CudaBackend

_UNINITIALISED = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
                  "aten::new_empty_strided"}  # fmt: skip


class TapeSegment:
    """Recorded ATen operations with the very tensors they saw.

    Replay runs them again and copies each result into the recorded storage. Views are not run again: their geometry is
    fixed, as in a graph.
    """

    def __init__(self) -> None:
        self.nodes: int | None = 0
        self.kernels: int | None = 0
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def begin(self) -> None:
        """The capture feeds `record`."""

    def bridge(self, result: Tensor) -> tuple[Tensor, Bridge]:
        tensor = clone_strided(result)  # as on a GPU: kernels and random numbers follow the strides
        return tensor, Bridge(tensor.detach())

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        schema = getattr(func, "_schema", None)  # compiled code has none, and may write to what it was given
        # no work: memory that is not written yet, or geometry, which is fixed
        if schema is not None and (schema.name in _UNINITIALISED or torch.Tag.inplace_view in func.tags):
            return
        # aliases: `t_` later in the forward turns the tensor that it is given, not what this operation saw
        args, kwargs, out = trees.map_leaves(_alias, (args, kwargs, out))
        held = {tensor.untyped_storage()._cdata for tensor in trees.tensors((args, kwargs))}
        fresh = [tensor for tensor in trees.tensors(out) if tensor.untyped_storage()._cdata not in held]
        if fresh or schema is None or schema.is_mutable:
            self._operations.append((func, args, kwargs, fresh))
            self.nodes = self.kernels = len(self._operations)

    def end(self) -> None:
        """The operations ran while they were recorded."""

    def replay(self, seen: Callable[[int, Any, list[Tensor]], None] | None = None) -> None:
        """As `Segment.replay`; `seen` is told each operation's number, the operation, and what it wrote."""
        # recorded below autocast: the casts are operations of their own
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for number, (func, args, kwargs, fresh) in enumerate(self._operations):
                out = func(*args, **kwargs)
                if fresh:
                    _overwrite(fresh, out, args, kwargs)
                if seen is not None:
                    seen(number, func, fresh or trees.tensors(out))

    def abandon(self) -> None:
        self._operations.clear()


def _alias(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _overwrite(fresh: list[Tensor], out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    held = {tensor.untyped_storage()._cdata for tensor in trees.tensors((args, kwargs))}
    results = [tensor for tensor in trees.tensors(out) if tensor.untyped_storage()._cdata not in held]
    for place, result in zip(fresh, results, strict=True):
        trees.check_like(place, result, name="result of a taped operation")
        place.copy_(result)


class TapeBackend:
    """Tape segments on a CPU: fidelity and graph use without a GPU, never a speed."""

    name = "tape"

    def __init__(self, options: Options = DEFAULT) -> None:
        self.options = options
        self.device = torch.device("cpu")
        self.forks: list[torch.cuda.Stream] = []
        self._random: Tensor | None = None

    def segment(self) -> TapeSegment:
        return TapeSegment()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self._random = torch.get_rng_state()
        try:
            yield
        finally:
            self.rewind()

    def rewind(self) -> None:
        assert self._random is not None
        torch.set_rng_state(self._random)

    def recover(self) -> None:
        """Nothing outlives a tape."""

    def check_alive(self) -> None:
        """There is no device to lose."""

    def pool_bytes(self) -> int:
        return 0


def backend_for(device: torch.device, options: Options = DEFAULT) -> Backend:
    """CUDA graphs on a GPU, the tape elsewhere; a tape has no pool to put anything into."""
    return CudaBackend(device, options) if device.type == "cuda" else TapeBackend(options)
