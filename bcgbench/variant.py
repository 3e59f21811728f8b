"""A denoiser's forward in another arithmetic than eager's, on weights that other arms share.

Here: what a runner changes about the forward itself, compiled code left out (`compiled.py`), and undoing it: whatever
is set on the shared modules is set while an arm runs and is gone afterwards. Nothing here captures or measures.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bcgbench.types import Compilation

Namespace = dict[str, Any]
_ABSENT = object()
TRIES = 5
"""Calls per order of attention kernels, of which the fastest counts."""
ORDERS: dict[str, tuple[SDPBackend, ...]] = {
    "torch's own choice": (),
    "cuDNN first": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                    SDPBackend.MATH),
    "flash first": (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
                    SDPBackend.MATH),
}  # fmt: skip
"""Orders in which torch tries its attention kernels; one that a call cannot use is passed over."""


class Variant(Protocol):
    """What stands in for a denoiser's own forward."""

    pool_bytes: int
    """Reserved by CUDA graphs of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One forward."""

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Around calls: saves setting and undoing at each."""

    def prepare(self, forward: Callable[[], Any]) -> None:
        """Whatever must be done before the first measured call, `forward()` being a call that will come."""

    def settle(self) -> None:
        """Preparation is over."""

    @property
    def settings(self) -> dict[str, str]:
        """What a record says of it."""

    @property
    def compilation(self) -> Compilation | None:
        """What torch.compile did; None where nothing is compiled."""


@dataclass(slots=True)
class Switches:
    """Entries of namespaces (a module's `vars`, its table of submodules) that hold inside a `with` alone."""

    entries: list[tuple[Namespace, str, Any]] = field(default_factory=list)
    _before: list[Any] = field(default_factory=list)
    _depth: int = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """The entries hold; may be nested."""
        self._depth += 1
        if self._depth == 1:
            self._before = [names.get(name, _ABSENT) for names, name, _ in self.entries]
            for names, name, value in self.entries:
                names[name] = value
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._restore()

    def _restore(self) -> None:
        for (names, name, _), before in zip(self.entries, self._before, strict=True):
            if before is _ABSENT:
                names.pop(name, None)
            else:
                names[name] = before


def changes(module: nn.Module, action: Callable[[], object]) -> Switches:
    """What `action` sets on a module and those inside it, undone again."""
    tables = [table for part in module.modules() for table in (vars(part), part._modules, part._parameters)]
    before = [dict(table) for table in tables]
    action()
    entries = [
        (table, name, value)
        for table, old in zip(tables, before, strict=True)
        for name, value in table.items()
        if old.get(name, _ABSENT) is not value
    ]
    for table, old in zip(tables, before, strict=True):
        if table.keys() != old.keys() or any(table[name] is not value for name, value in old.items()):
            table.clear()
            table.update(old)
    return Switches(entries)


@contextlib.contextmanager
def replaced(module: nn.Module, forward: Any) -> Iterator[None]:
    """`module.forward` replaced on the instance. The wrapper keeps the signature: a pipeline may inspect it."""
    original, own = module.forward, vars(module).get("forward")  # accelerate's offloading puts one on the instance
    module.forward = functools.wraps(original)(
        lambda *args, **kwargs: forward(*args, **kwargs)  # noqa: PLW0108 - `wraps` cannot write to a bound method
    )
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


class BestEager:
    """Eager with the settings that a user would try first: fused projections, the fastest attention kernels."""

    compilation = None
    pool_bytes = 0

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        self._original = original
        self._on_gpu = any(weight.is_cuda for weight in module.parameters())
        self._order = next(iter(ORDERS))
        fuse = getattr(module, "fuse_qkv_projections", None)
        self._switches = Switches() if fuse is None else changes(module, fuse)
        self._fused = sum(name == "fused_projections" for _, name, _ in self._switches.entries)
        self._tried: dict[str, float] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._switches.on(), self._attention():
            return self._original(*args, **kwargs)

    def installed(self) -> contextlib.AbstractContextManager[None]:
        return self._switches.on()

    def _attention(self) -> contextlib.AbstractContextManager[Any]:
        order = ORDERS[self._order]
        return sdpa_kernel(list(order), set_priority=True) if order else contextlib.nullcontext()

    def prepare(self, forward: Callable[[], Any]) -> None:
        """Choose the order by the first call; a CPU has one kernel."""
        if self._tried or not self._on_gpu:
            return
        for name in ORDERS:
            self._order = name
            self._tried[name] = _fastest_s(forward)
        self._order = min(self._tried, key=lambda name: self._tried[name])

    def settle(self) -> None:
        """Nothing may come late."""

    @property
    def settings(self) -> dict[str, str]:
        tried = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in self._tried.items())
        return {
            "fused projections": f"{self._fused} attentions" if self._fused else "none: the model offers none",
            "attention order": self._order + (f" (tried: {tried})" if tried else ""),
        }


def _fastest_s(forward: Callable[[], Any]) -> float:
    times = []
    for _ in range(TRIES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        forward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
