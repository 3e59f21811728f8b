"""Which calls break a capture, and how a running capture is reached.

A policy patches the named functions for the length of one capture and always restores them. `eager_on_graph` and
`break_graph` mark breaks in a user's own code. Outside a capture all of them call straight through.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bcgbench.engine import trees
from bcgbench.errors import CaptureError, UsageError

P = ParamSpec("P")
R = TypeVar("R")


class Breakable(Protocol):
    """A capture in progress, or a rehearsal of one."""

    def run_break(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the running segment, call eagerly, begin the next."""

    def run_compiled(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call compiled code as one operation of the running segment."""


_current: ContextVar[Breakable | None] = ContextVar("bcgbench_capture", default=None)


@contextlib.contextmanager
def active(capture: Breakable) -> Iterator[None]:
    """Make `capture` the one that breaks reach in this context."""
    token = _current.set(capture)
    try:
        yield
    finally:
        _current.reset(token)


def capturing() -> bool:
    """Whether this context is inside a capture or its rehearsal."""
    return _current.get() is not None


def eager_on_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it always runs eagerly between two segments of a captured graph.

    At replay it is called again on the same argument objects: tensors hold the replay's data, constants are frozen.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        capture = _current.get()
        if capture is None:
            return function(*args, **kwargs)
        result: R = capture.run_break(function, args, kwargs)
        return result

    setattr(wrapper, _MARK, True)
    return wrapper


_MARK = "_bcgbench_break"


def as_break(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function if it is a break already, which nests without a second one; else a break of it."""
    return function if getattr(function, _MARK, False) else eager_on_graph(function)


def original_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside a break, however often it was wrapped; any other function itself."""
    while getattr(function, _MARK, False):
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function


def compiled_region(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled code that a capture takes for one operation: what it does inside is not seen, nor run again."""

    def call(*args: Any) -> Any:
        capture = _current.get()
        return function(*args) if capture is None else capture.run_compiled(function, args)

    return call


class Unreturned(TorchDispatchMode):
    """Around the call of a break: what it makes, and whether it changes a list or dict that it was given.

    Only what a break returns is copied into the graph. What it leaves elsewhere (an attribute, a list, a closure) would
    hold the captured data at every replay.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in trees.tensors((args, kwargs))}
        for tensor in trees.tensors(out):
            if tensor.untyped_storage()._cdata not in given:
                reference = StorageWeakRef(tensor.untyped_storage())  # keeps the identity from being reused
                self._made[reference.cdata] = reference
        return out

    def holds(self, tensor: Tensor) -> bool:
        """Whether a break made this tensor."""
        return tensor.untyped_storage()._cdata in self._made

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a break. Raises `CaptureError` if a container among its arguments changed."""
        before, spec = trees.flatten((args, kwargs))
        with self:
            result = function(*args, **kwargs)
        after, new_spec = trees.flatten((args, kwargs))
        if spec != new_spec or any(a is not b for a, b in zip(before, after, strict=True)):
            name = getattr(function, "__qualname__", function)
            raise CaptureError(
                f"The break {name} changes a list or dict that it was given, which a replay cannot repeat for the code "
                "after it. Return the new values from the break instead."
            )
        return result


def _nothing() -> None:
    """The body of a bare break."""


break_graph: Callable[[], None] = eager_on_graph(_nothing)
"""End the running segment and begin another; does nothing outside a capture."""


KERNELS = frozenset(
    f"aten::{name}"
    for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
                 "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
                 "_scaled_dot_product_flash_attention_for_cpu", "_flash_attention_forward",
                 "_efficient_attention_forward", "_cudnn_attention_forward")
)  # fmt: skip
"""torch's fused attention. The policy `attention` breaks at the kernel, not at the function around it: three launches
that make an additive mask of a boolean one stay in the segment (120 breaks per step for Qwen-Image)."""
_OF_TORCH = frozenset({"native", "_native_cudnn", "_native_efficient", "_native_flash"})
"""Backends of diffusers that end in one of these kernels. `_native_math` does not: it chooses composed attention
by a context that a replay would not have."""
_broken_kernels: ContextVar[frozenset[str]] = ContextVar("bcgbench_kernels", default=frozenset())


def breaks_at(operation: str) -> bool:
    """Whether the policy in force breaks at this ATen operation."""
    return operation in _broken_kernels.get()


_SYNCHRONISING = ("torch.cuda.synchronize", "torch.cuda.Stream.synchronize", "torch.cuda.Event.synchronize")
"""Never legal in a capture, and no torch calls: `auto` could not see which of them raised."""


@dataclass(frozen=True, slots=True)
class BreakPolicy:
    """Names of the functions that break. `attention` also breaks every backend of diffusers' attention registry, `auto`
    every call whose capture is illegal, `best` either of the two: see `choice.py`."""

    names: tuple[str, ...] = ()
    attention: bool = False
    auto: bool = False
    best: bool = False
    kernels: bool = True
    """Whether `attention` means torch's attention kernels, or the functions around them."""

    @classmethod
    def parse(cls, text: str) -> BreakPolicy:
        """`none`, or `attention`, `auto`, `best` and dotted names separated by commas. Raises `UsageError` for other
        text."""
        if text == "none":
            return cls()
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        dotted = tuple(name for name in names if name not in {"attention", "auto", "best"})
        bad = [name for name in dotted if "." not in name]
        if bad or not names:
            raise UsageError(
                f"Unknown break policy {', '.join(bad) or text!r}: expected attention, auto, best, none, or dotted "
                "names such as torch.nn.functional.scaled_dot_product_attention."
            )
        return cls(names=dotted, attention="attention" in names, auto="auto" in names, best="best" in names)

    @property
    def forms(self) -> tuple[BreakPolicy, BreakPolicy]:
        """What `best` chooses from: breaks where capture is illegal alone, and those at attention as well."""
        fewest = replace(self, best=False, auto=True)
        return fewest, replace(fewest, attention=True)

    @property
    def unsearched(self) -> BreakPolicy:
        """As compiled code takes it, which torch compiles anew under a search for breaks: `auto` finds none, `best` is
        `attention`."""
        return replace(self, attention=self.attention or self.best, auto=False, best=False)

    @contextlib.contextmanager
    def patched(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = as_break) -> Iterator[None]:
        """Turn the named functions into breaks until the block ends, however it ends; `wrap` makes a function one."""
        undo: list[Callable[[], None]] = []
        token = _broken_kernels.set(KERNELS if self.attention and self.kernels else frozenset())
        try:
            names = (*self.names, *(_SYNCHRONISING if self.auto else ()))
            undo.extend(_patch_name(name, wrap) for name in names)
            if self.attention:
                sdpa = "torch.nn.functional.scaled_dot_product_attention"
                undo.append(_patch_sdpa() if self.kernels else _patch_name(sdpa, wrap))
                undo.append(_patch_attention_registry(wrap, spared=_OF_TORCH if self.kernels else frozenset()))
            yield
        finally:
            _broken_kernels.reset(token)
            for restore in reversed(undo):
                restore()


def _patch_name(name: str, wrap: Callable[..., Any]) -> Callable[[], None]:
    owner, attribute = _resolve(name)
    own = attribute in vars(owner)
    original = inspect.getattr_static(owner, attribute, None)
    patched: Any = wrap(getattr(owner, attribute))
    # found through the class, a static or class method is already bound as it should be
    setattr(owner, attribute, staticmethod(patched) if isinstance(original, (staticmethod, classmethod)) else patched)
    return lambda: setattr(owner, attribute, original) if own else delattr(owner, attribute)


def _resolve(name: str) -> tuple[Any, str]:
    """Owner and attribute of a dotted name: the longest importable module, then attributes."""
    *parts, attribute = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:size]))
        except ImportError:
            continue
        with contextlib.suppress(AttributeError):
            for part in parts[size:]:
                owner = getattr(owner, part)
            getattr(owner, attribute)
            return owner, attribute
        break
    raise UsageError(f"Break {name!r} does not exist. Name a function as module.function or module.Class.method.")


def _patch_sdpa() -> Callable[[], None]:
    """Break torch's attention where it has no kernel of its own but is made of matrix products and a softmax."""
    original = F.scaled_dot_product_attention
    whole = eager_on_graph(original)

    @functools.wraps(original)
    def attend(*args: Any, **kwargs: Any) -> Any:
        # not a call of the forward, whose calls are numbered, nor an operation of it
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            fused = _current.get() is None or torch._fused_sdp_choice(*args, **kwargs) != 0
        return (original if fused else whole)(*args, **kwargs)

    F.scaled_dot_product_attention = attend
    return lambda: setattr(F, "scaled_dot_product_attention", original)


def _patch_attention_registry(wrap: Callable[..., Any], *, spared: frozenset[str]) -> Callable[[], None]:
    """Break every attention backend of diffusers but the spared, if diffusers is loaded: models import the dispatcher
    by name, so the registry entry is the one place that all of them pass (11 of 12 models checked)."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is None:
        return _nothing
    backends = dispatch._AttentionBackendRegistry._backends
    original = dict(backends)
    for key, function in original.items():
        if key.value not in spared:
            backends[key] = wrap(function)
    return lambda: backends.update(original)
