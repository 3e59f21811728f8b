"""What a forward asks of the host: reads, copies, shapes that depend on data, waits; each with its place."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bcgbench.engine import diagnose, trees
from bcgbench.engine.constants import HOST_READ_OPS, MAKERS, FunctionWatch, is_dynamic, is_read

_SYNCHRONISING = ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"))

Found = Counter[str]
"""What a forward asks of the host -> how often."""


class _Audit(TorchDispatchMode):
    """Notes host reads, host copies and shapes that depend on data, with where the model asks for them."""

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Found = Counter()
        self._root, self._device = root, device
        self._inside = False

    def note(self, kind: str, name: str) -> None:
        self.found[f"{kind}: {name} in {diagnose.call_site(self._root)}"] += 1

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch call as Python wrote it."""
        name = getattr(function, "__name__", str(function))
        given = trees.tensors((args, kwargs))
        on_device = any(tensor.device.type == self._device.type for tensor in given)
        if not self._inside and on_device and is_read(function, args, kwargs):
            self.note("host read", name)
            return self._within(function, args, kwargs)
        result = function(*args, **kwargs)
        if function in MAKERS and isinstance(result, Tensor) and self._from_host(given, result):
            self.note("host copy", name)
        return result

    def _from_host(self, given: list[Tensor], result: Tensor) -> bool:
        """Whether a call made a tensor of the device out of host data; on a CPU only Python's own data is such."""
        if self._device.type == "cpu":
            return not given
        return result.device.type != "cpu" and all(tensor.device.type == "cpu" for tensor in given)

    def _within(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        on_device = any(tensor.device.type == self._device.type for tensor in trees.tensors((args, kwargs)))
        if not self._inside and on_device:
            to_host = name == "aten::_to_copy" and str(kwargs.get("device")) == "cpu" and self._device.type != "cpu"
            if name in HOST_READ_OPS or to_host:
                self.note("host read", name)
            elif is_dynamic(func, args):
                self.note("shape depends on data", name)
        return func(*args, **kwargs)


def audit(run: Callable[[], object], *, root: nn.Module, device: torch.device) -> Found:
    """Host reads, host copies, data-dependent shapes and synchronising calls of `run()`; compilations: `jit.py`."""
    seen = _Audit(root, device)
    with FunctionWatch(seen.function), seen, _synchronising(seen):
        run()
    return seen.found


@contextlib.contextmanager
def _synchronising(seen: _Audit) -> Iterator[None]:
    """Calls that wait for the device noted until the block ends."""
    with contextlib.ExitStack() as stack:
        for owner, name in _SYNCHRONISING:
            original = getattr(owner, name)

            def wait(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                seen.note("synchronise", getattr(original, "__qualname__", "synchronize"))
                return original(*args, **kwargs)

            setattr(owner, name, wait)
            stack.callback(setattr, owner, name, original)
        yield
