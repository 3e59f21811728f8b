"""Name what went wrong in a capture: the module and line of an operation, the first module whose output differs."""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.overrides import resolve_name

from bcgbench.engine import trees
from bcgbench.errors import CaptureError

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ENGINE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_TRITON = str(Path(torch.__file__).parents[1] / "triton")
_NOT_MODEL = (_ENGINE, _TORCH, _TRITON, contextlib.__file__)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes as integers of the same width (complex numbers as pairs), contiguous and flat."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.detach().contiguous().view(_INTEGER[tensor.dtype.itemsize]).flatten()


def bit_equal(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bytes; NaN equals the same NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b).to(a.device))


def same_value(a: Any, b: Any) -> bool:
    """Equal host values: arrays and tensors by shape, dtype and bytes, numbers by type and bits (NaN equals itself, 0.0
    and -0.0 differ), lists by their entries."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return bit_equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
    return bool(a == b)


def digest(tensor: Tensor) -> tuple[int, int]:
    """Two 64-bit sums over the bytes, for telling outputs apart without keeping them."""
    values = bits(tensor).to(torch.int64)
    weights = torch.arange(1, values.numel() + 1, device=values.device)
    return int(values.sum()), int((values * weights).sum())


class Watch:
    """Digests of every submodule's output, in the order of the calls."""

    def __init__(self) -> None:
        self.digests: list[tuple[str, tuple[tuple[int, int], ...]]] = []
        self._pending: list[tuple[str, list[Tensor]]] = []

    @contextlib.contextmanager
    def hooked(self, module: nn.Module) -> Iterator[None]:
        """Note each submodule's output until the block ends."""
        handles = [
            child.register_forward_hook(
                lambda _module, _args, out, path=path: self._pending.append((path, trees.tensors(out)))
            )
            for path, child in module.named_modules()
            if path
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def settle(self) -> None:
        """Digest what is pending: in a capture the data exists only after the segment ran."""
        for path, outputs in self._pending:
            self.digests.append((path, tuple(digest(tensor) for tensor in outputs)))
        self._pending.clear()


def first_difference(eager: Watch, captured: Watch) -> str:
    """Path of the first module whose output differs; a module that ran only once counts as different."""
    for (path, a), (other, b) in zip(eager.digests, captured.digests, strict=False):
        if path != other:
            return f"{path} ran eagerly where the capture ran {other}"
        if a != b:
            return path
    return "none of the submodules: the difference arises in the outermost forward"


def check_same(expected: Any, output: Any, *, explain: Callable[[], str]) -> None:
    """Raise `CaptureError` unless the captured output has the rehearsal's structure and bytes."""
    wanted, spec = trees.flatten(expected)
    got, got_spec = trees.flatten(output)
    if spec != got_spec:
        raise CaptureError(
            f"The capturing call returned {trees.describe(output)}, the call before {trees.describe(expected)}."
        )
    for index, (a, b) in enumerate(zip(wanted, got, strict=True)):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        if not both and not same_value(a, b):
            raise CaptureError(
                f"Output leaf {index} was {trees.describe(a)} in one call and {trees.describe(b)} in the next with the "
                "same arguments; a graph would return the captured one for ever. Return tensors, or run eagerly."
            )
        if both and not bit_equal(a, b):
            raise CaptureError(
                f"Replaying the captured segments does not give the eager output (leaf {index}, {trees.describe(a)}); "
                f"first differing module: {explain()}. Nothing was kept."
            )


def _module_path(root: nn.Module | None, module: nn.Module) -> str:
    if root is None:
        return type(module).__name__
    return next((path for path, child in root.named_modules() if child is module and path), type(module).__name__)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def function_name(function: Any) -> str:
    """`torch.Tensor.__getitem__`, `aten.relu.default`; a user's function by its own name."""
    return str(resolve_name(function) or getattr(function, "__qualname__", function))


def source_line() -> tuple[str, int]:
    """File and line of the innermost model code on the stack, the same for every module that runs it."""
    for frame in _frames(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith(_NOT_MODEL):
            return frame.f_code.co_filename, frame.f_lineno
    return "", 0


def call_site(root: nn.Module | None) -> str:
    """Module path and source line of the innermost model code on the stack."""
    return _site(_frames(sys._getframe(1)), root)


def operation_site(root: nn.Module | None) -> str:
    """As `call_site`, with torch's own modules, such as a linear layer, among the paths."""
    for frame in _frames(sys._getframe(1)):
        if isinstance(owner := _self_of(frame), nn.Module):
            file, line = source_line()
            return f"{_module_path(root, owner)} ({Path(file).name}:{line})"
    return call_site(root)


def error_site(error: BaseException, root: nn.Module | None) -> str:
    """Module path and source line where the model raised."""
    walked = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _site(iter(reversed(walked)), root)


def error_operation(error: BaseException) -> str:
    """The line of model code that raised, as it is written; "" where its source is not at hand."""
    entries = traceback.extract_tb(error.__traceback__)
    own = [entry for entry in entries if not entry.filename.startswith(_NOT_MODEL)]
    return (own[-1].line or "").strip() if own else ""


def _self_of(frame: FrameType) -> Any:
    """`self` in a function's frame. Python before 3.13 keeps the dict that it makes of the locals with the frame: left
    as it is, it would keep alive every tensor that the function no longer holds."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return None
    values = frame.f_locals
    owner = values.get("self")
    if isinstance(values, dict):
        values.clear()
    return owner


def _site(frames: Iterator[FrameType], root: nn.Module | None) -> str:
    line, path, traced = "", "", ""
    for frame in frames:
        name = frame.f_code.co_filename
        if name.startswith(_NOT_MODEL):
            continue
        owner = _self_of(frame)
        if isinstance(owner, GraphModule):  # code that torch.compile traced: the stack no longer says from where
            traced, line = owner.meta.get("site", (traced, line))
            continue
        line = line or f"{Path(name).name}:{frame.f_lineno}"
        if isinstance(owner, nn.Module):
            path = traced if owner is root and traced else ".".join(filter(None, (_module_path(root, owner), traced)))
            break
    return f"{path} ({line})" if path else line or "the forward"
